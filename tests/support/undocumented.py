"""PyTorch without the parts that its documentation does not describe."""

from collections.abc import Iterator
from contextlib import contextmanager

from mtrain.kernels import undocumented


@contextmanager
def documented_only() -> Iterator[None]:
    """A context in which `undocumented` returns None, as if PyTorch lacked all names, in all threads."""
    undocumented.allowed = False
    try:
        yield
    finally:
        undocumented.allowed = True
