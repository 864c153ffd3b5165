"""Kernels for GPUs in Triton, which comes with PyTorch's builds for CUDA.

Triton is imported only with the modules that contain kernels. Callers use `available.attempt`;
where that returns None, they compute the same with PyTorch's operators.
"""
