"""Access to parts of PyTorch that its documentation does not describe.

A later PyTorch may remove them. Every caller therefore has a slower alternative that uses only documented
functions.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_enabled = True


def undocumented(name: str) -> Any:
    """The attribute `name` of torch, such as "ops.mkldnn._linear_pointwise", or None if there is none."""
    found: Any = torch if _enabled else None
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def undocumented_allowed() -> bool:
    """Whether code may rely on how PyTorch works inside: it may, except in `documented_only`."""
    return _enabled


@contextmanager
def documented_only() -> Iterator[None]:
    """A context in which `undocumented` returns None, as if PyTorch lacked all names, in all threads."""
    global _enabled
    before, _enabled = _enabled, False
    try:
        yield
    finally:
        _enabled = before
