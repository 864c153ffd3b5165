"""Access to parts of PyTorch that its documentation does not describe.

A later PyTorch may remove them. Every caller therefore has a slower alternative that uses only documented
functions.
"""

from typing import Any

import torch

allowed = True  # whether code may rely on PyTorch's internals; False in tests that compare with alternatives


def undocumented(name: str) -> Any:
    """The attribute `name` of torch, such as "ops.mkldnn._linear_pointwise", or None if there is none."""
    found: Any = torch if allowed else None
    for part in name.split("."):
        found = getattr(found, part, None)
    return found
