"""The presets have as many parameters as PyTorch's Transformer of the same sizes."""

import pytest
import torch
from torch import nn

from mtrain.config.model import ModelConfig
from mtrain.config.presets import PRESETS
from mtrain.model.transformer import Transformer

VOCABULARY = 8000


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_has_as_many_parameters_as_a_transformer_of_pytorch(preset):
    sizes = PRESETS[preset]
    words = {"source_vocab_size": VOCABULARY, "target_vocab_size": VOCABULARY, "max_positions": 64}
    with torch.device("meta"):
        ours = Transformer(ModelConfig(**sizes, **words))
        theirs = nn.Transformer(
            sizes["d_model"],
            sizes["heads"],
            sizes["encoder_layers"],
            sizes["decoder_layers"],
            sizes["ffn_dim"],
            batch_first=True,
            norm_first=True,
        )
    embeddings = VOCABULARY * sizes["d_model"]  # shared by source, target and output
    assert count(ours) == count(theirs) + embeddings


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
