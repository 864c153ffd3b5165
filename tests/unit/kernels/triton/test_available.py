"""Whether kernels are used, and what is logged if Triton does not work."""

import logging
from collections.abc import Iterator

import pytest
import torch

from mtrain.kernels.triton import dropout
from mtrain.kernels.triton.available import triton_works


@pytest.fixture(autouse=True)
def _nothing_is_known_before_and_after() -> Iterator[None]:
    triton_works.cache_clear()
    yield
    triton_works.cache_clear()


def test_only_cuda_devices_use_kernels(caplog: pytest.LogCaptureFixture) -> None:
    assert not triton_works(torch.device("cpu")) and not triton_works(torch.device("mps"))
    assert not caplog.records


def test_the_reason_is_logged_once_if_triton_does_not_work(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("Failed to find C compiler\nPlease specify one via CC")

    monkeypatch.setattr(dropout, "hashed_dropout", fail)
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: None)  # there may be no such device
    monkeypatch.setattr(torch, "ones", lambda *_, **__: None)
    with caplog.at_level(logging.WARNING):
        assert not any(triton_works(torch.device("cuda:0")) for _ in range(3))
    (record,) = caplog.records
    assert "Triton does not work on cuda:0" in record.message
    assert record.message.endswith("(RuntimeError: Failed to find C compiler)")
