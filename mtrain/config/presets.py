"""Presets of model sizes, and the sizes that `model.preset: auto` selects by the size of the corpus."""

import math
from typing import NamedTuple

PRESETS: dict[str, dict[str, int]] = {
    "tiny": {"d_model": 128, "ffn_dim": 256, "heads": 4, "encoder_layers": 4, "decoder_layers": 4},
    "small": {"d_model": 256, "ffn_dim": 1024, "heads": 4, "encoder_layers": 3, "decoder_layers": 3},
    "base": {"d_model": 512, "ffn_dim": 2048, "heads": 8, "encoder_layers": 6, "decoder_layers": 6},
    "big": {"d_model": 1024, "ffn_dim": 4096, "heads": 16, "encoder_layers": 6, "decoder_layers": 6},
}
# Decoding spends nearly all its time in the decoder. More encoder layers compensate for a shallow decoder
# (Kasai et al., "Deep Encoder, Shallow Decoder", ICLR 2021).
for _name, _layers in {"tiny": 6, "small": 6, "base": 12, "big": 12}.items():
    PRESETS[f"{_name}_deep"] = {**PRESETS[_name], "encoder_layers": _layers, "decoder_layers": 1}


class AutoSize(NamedTuple):
    """The sizes for corpora of fewer than `below` training pairs."""

    below: float
    preset: str
    vocab_size: int


# Multi30k (29,000 pairs): Wu et al. (ACL 2021) found that models larger than `tiny` only overfit, and here a
# vocabulary of 12,000 had a higher validation BLEU than 8,000. Millions of pairs: base, big and 32,000 as in
# Vaswani et al. (2017). Small corpora need small vocabularies (Gowda and May, "Finding the Optimal Vocabulary
# Size for Neural Machine Translation", 2020); 10,000 image captions do not yield 12,000 pieces.
AUTO_SIZES = (
    AutoSize(2_000, "tiny", 1_000),
    AutoSize(10_000, "tiny", 4_000),
    AutoSize(20_000, "tiny", 8_000),
    AutoSize(100_000, "tiny", 12_000),
    AutoSize(1_000_000, "small", 12_000),
    AutoSize(10_000_000, "base", 32_000),
    AutoSize(math.inf, "big", 32_000),
)


def auto_size(pairs: int) -> AutoSize:
    """The sizes that `model.preset: auto` stands for, given the number of training pairs."""
    return next(size for size in AUTO_SIZES if pairs < size.below)
