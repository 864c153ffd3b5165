"""A micro-batch on a GPU never waits for a value, checked on the meta device, whose tensors have none."""

import pytest
import torch

from mtrain.config.model import ModelConfig
from mtrain.model.loss import translation_loss
from mtrain.model.transformer import Transformer

SIZES = {"d_model": 32, "ffn_dim": 64, "heads": 2, "encoder_layers": 2, "decoder_layers": 2}
VOCABULARY = {"source_vocab_size": 50, "target_vocab_size": 50, "max_positions": 64}
RATES = {"dropout": 0.1, "attention_dropout": 0.1, "word_dropout": 0.1}


@pytest.mark.parametrize("r_drop", [0.0, 1.0])
def test_a_micro_batch_reads_no_value(r_drop):
    """`.item()`, `bool()` and sizes that depend on values make a GPU wait; on the meta device they fail."""
    with torch.device("meta"):
        model = Transformer(ModelConfig(**SIZES, **VOCABULARY, **RATES)).train()
        ids = torch.zeros(4, 7, dtype=torch.int64)
    passes = 2 if r_drop else 1
    hidden = model(*(part.repeat(passes, 1) for part in (ids, ids == 0, ids)))
    sums = translation_loss(hidden, *model.projection(), ids, 0.1, r_drop)
    sums.loss.backward()
    assert all(parameter.grad.is_meta for parameter in model.parameters())
    with pytest.raises(RuntimeError):
        float(sums.nll)  # the check can fail
