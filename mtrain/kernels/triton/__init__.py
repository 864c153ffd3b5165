"""Kernels for GPUs in Triton, which comes with PyTorch's builds for CUDA.

Triton is imported only with the modules that contain kernels. Callers ask `available.triton_works` first, and
otherwise compute the same with PyTorch's operators.
"""
