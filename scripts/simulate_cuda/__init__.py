"""A simulated CUDA device, to run the CUDA paths of mtrain on a machine without a GPU.

    python scripts/simulate_cuda run -m mtrain translate RUN --device cuda   # or any other module or script
    python scripts/simulate_cuda counts   # operations, copies and waits of a training and a decoding step
    python scripts/simulate_cuda check    # the tests marked `gpu`, whole commands, and the counts

Tensors on `cuda:0` are in host memory, and CPU kernels compute with them. Dispatch, device checks, autocast,
autograd and pinned memory are PyTorch's own, and `torch.cuda.set_sync_debug_mode` works. Triton's interpreter
runs its kernels. CUDA graphs repeat what was captured: numbers of Python keep their values, what a capture
computes is invalid before a replay, the host must not wait in it, and its inputs must not be freed. There are
no kernels of GPUs, and streams have no effect: neither the order of work, nor speed, rounding, memory or NCCL
is simulated.

It takes a CPU build of PyTorch for Linux, and g++ to build the library of the device once. Where one of them
is missing, it says so and exits with 77, which means "skipped".
"""
