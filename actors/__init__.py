"""Rollout: what turns a task into a group of episodes.

Environments and rewards, the token rules of a conversation, inference engines, the replica that serves one engine,
and the actor that leases tasks, runs episodes and stores groups.
"""
