"""How many tokens a batch of `decoding.batch_tokens: auto` has."""

from types import SimpleNamespace

import pytest
import torch

from mtrain.config.sections.decoding import DecodingConfig
from mtrain.decoding.batches import batch_tokens, padded


def models(width: int, count: int = 1) -> list[SimpleNamespace]:
    """Models of a width, in name only."""
    sizes = {"decoder_layers": 6, "ffn_dim": 4 * width, "target_vocab_size": 32_000}
    return [SimpleNamespace(config=SimpleNamespace(d_model=width, **sizes))] * count


@pytest.mark.parametrize(
    ("width", "count", "free", "expected"),
    [
        (512, 1, 80 * 2**30, 65_536),
        (256, 1, 80 * 2**30, 131_072),
        (512, 1, 8 * 2**30, 32_768),
        (512, 4, 8 * 2**30, 8192),
        (512, 1, 2**20, 8192),  # the value of a CPU
    ],
)
def test_batches_for_a_gpu_depend_on_the_width_and_the_free_memory(monkeypatch, width, count, free, expected):
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 2**20)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 2**20)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 80 * 2**30))
    given = models(width, count)
    assert batch_tokens(DecodingConfig(), given, torch.device("cuda")) == expected
    assert batch_tokens(DecodingConfig(), given, torch.device("cpu")) == 8192
    assert batch_tokens(DecodingConfig(batch_tokens=500), given, torch.device("cuda")) == 500


def test_the_width_of_a_padded_matrix_is_rounded_up_but_bounded():
    rows = [[4, 5, 3], [6, 7, 8, 9, 3]]
    matrix, keep = padded(rows, 1, torch.device("cpu"))
    assert matrix.tolist() == [[4, 5, 3, 1, 1], rows[1]] and keep.sum(dim=1).tolist() == [3, 5]
    assert padded(rows, 1, torch.device("cpu"), multiple=4)[0].shape == (2, 8)
    assert padded(rows, 1, torch.device("cpu"), multiple=4, most=6)[0].shape == (2, 6)
