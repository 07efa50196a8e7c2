"""Inference engines behind one small protocol (`base.Engine`).

`embedded` runs transformers and PEFT in the actor's own process. An engine that drives another server takes its
place beside it and is named in `create`.
"""
