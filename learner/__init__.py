"""The learner: what owns a run, trains its policy and commits every step.

Mathematics without a network: advantages, packing, objectives, the policy, the truth check.
"""
