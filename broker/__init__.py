"""How components talk: messages, bus (NATS JetStream), store (S3), the registry of runs and versions, errors.

Everything a learner, an actor and a router share stands here; they never import each other.
Loads no torch.
"""
