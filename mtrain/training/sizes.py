"""Sizes of the model and its vocabulary, from how much there is to learn from."""

import logging
import math

from mtrain.config import validate
from mtrain.data.corpus import good_pairs
from mtrain.schema import Config

log = logging.getLogger(__name__)


# Preset and pieces of corpora of fewer than so many pairs. Multi30k: Wu et al. (ACL 2021) found that models
# larger than tiny only overfit it, and 12,000 pieces were better here than 8,000 (see the README, "What was
# tried"). Millions of pairs: base, big and 32,000 pieces of Vaswani et al. (2017). Small corpora, small
# vocabularies: Gowda and May, "Finding the Optimal Vocabulary Size for Neural Machine Translation" (2020);
# 10,000 captions and their translations have no 12,000 pieces.
TABLE = (
    (2_000, "tiny", 1000),
    (10_000, "tiny", 4000),
    (20_000, "tiny", 8000),
    (100_000, "tiny", 12000),
    (1_000_000, "small", 12000),
    (10_000_000, "base", 32000),
    (math.inf, "big", 32000),
)


def with_sizes(config: Config) -> Config:
    """The config with the sizes that `model.preset: auto` stands for; keys that were given stay as they are.

    Reads the training corpora once to count their pairs. Raises DataError if they cannot be read.
    """
    if config.model.preset != "auto":
        return config
    pairs = sum(1 for _ in good_pairs(config.data.train, "skip"))  # `check` is to count the bad ones
    _, preset, vocab_size = next(row for row in TABLE if pairs < row[0])
    raw = config.model_dump(mode="json", exclude_unset=True)
    raw["model"]["preset"] = preset
    raw["tokenizer"] = {"vocab_size": vocab_size, **raw.get("tokenizer", {})}
    pieces = raw["tokenizer"]["vocab_size"]
    log.info("model.preset: auto: %s, %d pieces, for %s pairs", preset, pieces, f"{pairs:,}")
    return validate(Config, raw, "model.preset: auto")
