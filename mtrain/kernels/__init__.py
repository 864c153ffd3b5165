"""Fast operations, mostly plain functions of tensors. Of the rest of mtrain, only its errors are imported.

The test of each function compares it with the same computation in plain PyTorch.
"""
