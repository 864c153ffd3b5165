"""A loss that computes few logits at a time."""

import pytest

from mtrain.kernels import cross_entropy


def limit_logits(monkeypatch: pytest.MonkeyPatch, most: int | None) -> None:
    """Let the loss compute at most so many logits in fp32 at a time; None: as usual."""
    if most is not None:
        monkeypatch.setattr(cross_entropy, "_MAX_LOGITS", {"cpu": most, "cuda": most})
        monkeypatch.setattr(cross_entropy, "_MAX_LOGIT_BYTES", 4 * most)
