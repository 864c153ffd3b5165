"""Validation of a pair classifier: how well it tells the validation pairs from corrupted versions of them."""

import math
import random
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mtrain.config.schema import Config
from mtrain.config.sections.corruptions import Corruptions
from mtrain.data import Pair
from mtrain.data.prepare import PreparedData
from mtrain.data.rewriting.classifier_pairs import Corrupter, draw_others, pair_sequence
from mtrain.decoding.batches import in_batches
from mtrain.decoding.scoring.classify import log_odds
from mtrain.distributed.ranks import Ranks
from mtrain.model.build import AnyModel, evaluating
from mtrain.model.classifier import PairClassifier
from mtrain.progress_bar import ProgressBar
from mtrain.storage.manifest import sha256_of_json
from mtrain.tokenizer.tokenizer import Tokenizer


class ClassifierScores(NamedTuple):
    """Scores of a pair classifier on the validation set."""

    nll: float  # nats/pair, unsmoothed; good pairs count as much as corrupted ones
    auc: float  # of the kinds of corruption that it is trained on, together
    by_kind: dict[str, float]  # AUC of each kind that some pairs allow

    def record(self) -> dict[str, float]:
        """The scores by name, for metrics.jsonl."""
        by_kind = {f"auc_{kind}": auc for kind, auc in self.by_kind.items()}
        return {"nll": self.nll, "auc": self.auc, **by_kind}

    def headline(self) -> str:
        """The most important score, for the progress bar."""
        return f"AUC {self.auc:.4f}"

    def describe(self) -> list[str]:
        """The scores for the log, in lines."""
        by_kind = ", ".join(f"{kind} {auc:.4f}" for kind, auc in self.by_kind.items())
        return [f"nll {self.nll:.3f}, {self.headline()} ({by_kind})"]


class ClassifierValidator:
    """Scores pair classifiers on the validation set. Each pair is corrupted in all ways, always in the same
    manner. If there are several ranks, each has a share of the pairs."""

    texts: Mapping[str, Sequence[str]] = {}  # what `record_translations` records: nothing

    def __init__(
        self, data: PreparedData, config: Config, tokenizer: Tokenizer, micro_batch_tokens: int, ranks: Ranks
    ):
        assert config.data.corruptions is not None
        self.ranks = ranks
        self.precision = config.training.precision
        self.leading_metric = config.training.best_metric  # selects the best model
        self.reason = ""  # as configured
        self.trained = {kind for kind, share in config.data.corruptions if share}
        self._examples: dict[str, list[tuple[int, int]]] = {}  # by kind: the good and the bad sequence
        self._sequences = self._make_examples(data.validation, tokenizer, config.data.max_length)
        lengths = [len(sequence) for sequence in self._sequences]
        self._batches = list(in_batches(lengths, micro_batch_tokens)) if lengths else []

    def _make_examples(
        self, validation: list[Pair], tokenizer: Tokenizer, max_length: int
    ) -> list[list[int]]:
        """Make the examples of each kind. Returns all different sequences in them."""
        corrupter, eos = Corrupter(tokenizer, max_length), tokenizer.special.eos
        source = tokenizer.encode_source([pair.source for pair in validation])
        target = tokenizer.encode_target([pair.target for pair in validation])
        pairs = list(zip(source, target, strict=True))
        others = draw_others(np.array([len(ids) for ids in target], np.int32), (0,)).tolist()
        numbers: dict[tuple[int, ...], int] = {}

        def number(ids: tuple[list[int], list[int]]) -> int:
            return numbers.setdefault(tuple(pair_sequence(ids, eos)), len(numbers))

        for kind in Corruptions.model_fields:
            made = [
                corrupter.corrupt(kind, pair, pairs[others[row]], random.Random(f"validation {kind} {row}"))
                for row, pair in enumerate(pairs)
            ]
            self._examples[kind] = [(number(each.good), number(each.bad)) for each in made if each]
        return [list(sequence) for sequence in numbers]

    def fingerprint(self) -> str:
        """SHA-256 of the sequences and of the kinds of corruption. Scores are comparable only if their
        fingerprints are equal."""
        return sha256_of_json([self._sequences, sorted(self.trained)])

    def scores(self, shares: Sequence[Sequence[float]]) -> ClassifierScores:
        """The scores, given the log-odds of all ranks."""
        odds = np.empty(len(self._sequences))
        for rank, share in enumerate(shares):
            rows = [row for batch in self._batches[rank :: len(shares)] for row in batch]
            odds[rows] = share
        by_kind = {kind: roc_auc(*odds[np.array(pairs)].T) for kind, pairs in self._examples.items() if pairs}
        trained = [pair for kind in sorted(self.trained) for pair in self._examples[kind]]
        good, bad = (odds[sorted({pair[version] for pair in trained})] for version in (0, 1))
        # Of a pair, if one half is good.
        nll = float(np.logaddexp(0, -good).mean() + np.logaddexp(0, bad).mean()) / 2
        return ClassifierScores(nll, roc_auc(good, bad), by_kind)

    def share(self, model: AnyModel) -> list[float]:
        """The log-odds of the sequences of this rank. The model is in evaluation mode meanwhile.
        Raises ModelError if they are not finite."""
        assert isinstance(model, PairClassifier)
        batches = self._batches[self.ranks.rank :: self.ranks.size]
        found: list[float] = []
        with evaluating(model), ProgressBar("validated", "pairs", sum(map(len, batches))) as progress:
            for rows in batches:
                sequences = [self._sequences[row] for row in rows]
                found += log_odds(model, sequences, self.ranks.device, self.precision)
                progress.add(len(rows))
        return found

    def alignment_layer(self, _: AnyModel) -> None:
        """The decoder layer to take word alignments from: there is none."""


def roc_auc(positive: npt.ArrayLike, negative: npt.ArrayLike) -> float:
    """The probability that a positive example has a higher score than a negative one; equal scores count one
    half. NaN if there are none of either, or if a score is NaN."""
    good, bad = np.asarray(positive, np.float64), np.sort(np.asarray(negative, np.float64))
    if not (good.size and bad.size) or np.isnan(good).any() or np.isnan(bad).any():
        return math.nan
    wins = np.searchsorted(bad, good) + np.searchsorted(bad, good, "right")  # twice, so that ties count 1
    return float(wins.sum() / (2 * good.size * bad.size))
