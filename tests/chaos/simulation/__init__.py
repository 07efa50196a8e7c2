"""The whole of Farflung's services in one thread, on virtual time, under faults that a seed decides.

What runs is the product's own code, shells included; only what lies outside of it is played: the clients of NATS and
S3, the engine, and the policy's arithmetic. `python -m tests.chaos.simulation --help` tells how to run schedules.
"""
