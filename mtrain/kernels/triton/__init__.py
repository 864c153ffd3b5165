"""Kernels for GPUs in Triton, which comes with PyTorch's builds for CUDA.

Triton is imported only with the modules that contain kernels. Callers ask `available.triton_works`, then call
`available.attempt`; if either fails, they compute the same with PyTorch's operators.
"""
