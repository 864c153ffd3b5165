"""Access to parts of PyTorch that its documentation does not describe.

A later PyTorch may remove them. Every caller therefore has an equivalent that is documented, only slower.
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


@contextmanager
def documented_only() -> Iterator[None]:
    """A context in which `undocumented` finds nothing, in any thread, as if PyTorch had removed all of it."""
    global _enabled
    before, _enabled = _enabled, False
    try:
        yield
    finally:
        _enabled = before
