"""``task=constraint_distance``: how far the masked distribution is from the model's own given a valid output.

Exact where the valid outputs of a prompt can be enumerated, otherwise estimated from samples of both distributions.
"""
