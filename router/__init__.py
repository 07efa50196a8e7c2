"""Placement of generation requests on replicas, so that KV prefixes are found where they lie.

`placement` decides and owns no socket; `service` takes requests from the bus and forwards them. Loads no torch.
"""
