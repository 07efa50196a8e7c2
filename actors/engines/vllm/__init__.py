"""vLLM as the inference engine: a server of its own, driven over HTTP. What is pure stands in `flags` and `wire`.

`flags`: how to start a server, and what a running one lacks. `wire`: requests and replies. `client`: the calls.
`process`: the server as a child. `engine`: the `base.Engine` made of them.
"""
