"""The parts of `scripts/bench.py`. Each measurement is a process of its own; `job` says how they are started.

`job`, `meter` and `peers` also run in the environment of the other tools: they import torch, numpy and the
standard library, never mtrain.
"""
