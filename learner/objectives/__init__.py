"""Objectives: what a step maximises, one a file.

Each takes the current and the behaviour policy's logprobs of some trained tokens, and returns a loss that sums over
the packed rows of a step, with the sums that its metrics need.
"""
