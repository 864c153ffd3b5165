"""The parts of `scripts/bench.py`. Each measurement runs in a process of its own, which `job` starts.

`job`, `meter` and `peers` also run in the Python environment of the other tools: they import torch, numpy and
the standard library, but never mtrain.
"""
