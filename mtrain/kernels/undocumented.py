"""Access to parts of PyTorch that its documentation does not describe.

A later PyTorch may remove them. Every caller therefore has a slower alternative that uses only documented
functions.
"""

from typing import Any

import torch

allowed = True  # False in tests, which compare with the alternatives


def undocumented(name: str) -> Any:
    """The attribute `name` of torch, such as "ops.mkldnn._linear_pointwise", or None if there is none."""
    found: Any = torch if allowed else None
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def undocumented_allowed() -> bool:
    """Whether code may rely on how PyTorch works inside: it may, except in tests."""
    return allowed
