"""The probabilities of a pair classifier that sentence pairs are good."""

import math
from collections.abc import Iterator, Sequence

import torch

from mtrain.checkpoint.model_folder import Loaded
from mtrain.data.rewriting.classifier_pairs import pair_sequence
from mtrain.decoding.batches import in_batches, padded
from mtrain.decoding.decode import NOT_FINITE
from mtrain.decoding.scoring.score import Pairs, Progress
from mtrain.decoding.split import windows_of_pairs
from mtrain.device import autocast, resolve_precision
from mtrain.errors import ModelError
from mtrain.kernels.sequences import Padded
from mtrain.model.classifier import PairClassifier


def classify_pairs(
    loaded: Loaded[PairClassifier], device: torch.device, pairs: Pairs, progress: Progress = lambda _: None
) -> Iterator[float]:
    """Yield the probability that each (source, target) pair is good, in order, in bounded memory. It is NaN
    if a side exceeds the model's maximum length. The model is moved to the device. `progress` is called with
    the number of pairs whenever some are classified. Raises ModelError if the model's outputs are not finite.
    """
    tokenizer, config = loaded.tokenizer, loaded.config
    model = loaded.model.to(device)
    for sources, targets in windows_of_pairs(pairs):
        found = [*zip(tokenizer.encode_source(sources), tokenizer.encode_target(targets), strict=True)]
        fitting = [i for i, pair in enumerate(found) if max(map(len, pair)) < config.max_length]
        sequences = [pair_sequence(found[i], tokenizer.special.eos) for i in fitting]
        probabilities = [math.nan] * len(found)
        progress(len(found) - len(fitting))
        for rows in in_batches([*map(len, sequences)], config.decoding.moderate_batch_tokens):
            odds = log_odds(model, [sequences[i] for i in rows], device, config.decoding.precision)
            for row, value in zip(rows, odds, strict=True):
                probabilities[fitting[row]] = 1 / (1 + math.exp(-value)) if value > -700 else 0.0
            progress(len(rows))
        yield from probabilities


@torch.inference_mode()
def log_odds(
    model: PairClassifier, sequences: Sequence[Sequence[int]], device: torch.device, precision: str
) -> list[float]:
    """The log-odds that pairs are good, given the ids that `pair_sequence` returns for each, in one batch.
    The model must be in evaluation mode. Raises ModelError if its outputs are not finite."""
    ids, keep = padded(sequences, model.config.pad_id, device)
    with autocast(device, resolve_precision(device, precision)):
        odds = model.forward(ids.flatten(), Padded.of(ids, keep)).tolist()
    if not all(map(math.isfinite, odds)):
        raise ModelError(NOT_FINITE)
    return odds
