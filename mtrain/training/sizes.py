"""Sizes of the model and its vocabulary, from how much there is to learn from."""

import logging
from typing import NamedTuple

from mtrain.config import validate
from mtrain.data.corpus import good_pairs
from mtrain.schema import Config

log = logging.getLogger(__name__)


class Sizes(NamedTuple):
    """What corpora of fewer than `pairs` pairs get."""

    pairs: float
    preset: str
    vocab_size: int


# Multi30k: Wu et al. (ACL 2021) found that models larger than tiny only overfit it. Millions of pairs: base,
# big and 32,000 pieces of Vaswani et al. (2017). Small corpora, small vocabularies: Gowda and May, "Finding
# the Optimal Vocabulary Size for Neural Machine Translation" (2020).
TABLE = (
    Sizes(2_000, "tiny", 1000),
    Sizes(10_000, "tiny", 4000),
    Sizes(100_000, "tiny", 8000),
    Sizes(1_000_000, "small", 8000),
    Sizes(10_000_000, "base", 32000),
    Sizes(float("inf"), "big", 32000),
)


def with_sizes(config: Config) -> Config:
    """The config with the sizes that `model.preset: auto` stands for; keys that were given stay as they are.

    Reads the training corpora once to count their pairs. Raises DataError if they cannot be read.
    """
    if config.model.preset != "auto":
        return config
    pairs = sum(1 for _ in good_pairs(config.data.train, config.data.bad_lines))
    _, preset, vocab_size = next(sizes for sizes in TABLE if pairs < sizes.pairs)
    raw = config.model_dump(mode="json", exclude_unset=True)
    raw["model"]["preset"] = preset
    raw["tokenizer"] = {"vocab_size": vocab_size, **raw.get("tokenizer", {})}
    pieces = raw["tokenizer"]["vocab_size"]
    log.info("model.preset: auto: %s, %d pieces, for %s pairs", preset, pieces, f"{pairs:,}")
    return validate(Config, raw, "model.preset: auto")
