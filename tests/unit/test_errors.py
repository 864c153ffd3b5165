"""Which errors mean that memory is exhausted, and errors of other processes."""

import pickle

import pytest

from mtrain.errors import DataError, Interrupted, StorageError, is_out_of_memory


class OutOfMemoryError(RuntimeError):
    """Named like torch.OutOfMemoryError."""


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OutOfMemoryError("CUDA"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 354304 bytes."),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("std::bad_alloc"),
        RuntimeError("could not create a primitive"),
        RuntimeError("could not execute a primitive"),
        RuntimeError("could not create a memory object"),
        OSError(12, "Cannot allocate memory"),
    ],
    ids=str,
)
def test_errors_of_exhausted_memory_are_recognized(error):
    assert is_out_of_memory(error)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        RuntimeError("could not create a primitive descriptor for the matmul primitive"),  # unsupported
        StorageError("cannot write model.safetensors: Cannot allocate memory"),  # has its exit code
        ValueError(),
    ],
    ids=str,
)
def test_other_errors_are_not(error):
    assert not is_out_of_memory(error)


@pytest.mark.parametrize("error", [DataError("a.tsv:1: bad"), Interrupted("stopped", 15)], ids=repr)
def test_errors_reach_other_processes(error):
    """Other processes pickle them, as in `concurrent.futures`."""
    received = pickle.loads(pickle.dumps(error))
    assert (type(received), str(received)) == (type(error), str(error))
    assert received.exit_code == error.exit_code
