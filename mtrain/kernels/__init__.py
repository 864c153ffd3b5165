"""Fast operations, mostly plain functions of tensors. Nothing here imports from the rest of mtrain.

The test of each function compares it with the same computation in plain PyTorch.
"""
