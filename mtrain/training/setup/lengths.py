"""The lengths of the training pairs, from which batches are planned before training begins."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import chain, islice

import numpy as np
import numpy.typing as npt

from mtrain.config.schema import Config
from mtrain.config.sections.corpora import Holdout
from mtrain.config.sections.data import DataConfig
from mtrain.config.sections.model import Architecture
from mtrain.data import Pair, are_too_long
from mtrain.data.epochs.batching import BatchPlan, Division, plan_batches
from mtrain.data.epochs.schedule import Position
from mtrain.data.epochs.windows import require_pairs
from mtrain.data.prepare import PreparedData
from mtrain.data.preparing.check_report import require_rest
from mtrain.data.reading.blocks import good_pairs
from mtrain.data.scanning.check import count_tag_ids
from mtrain.data.scanning.scanner import CorpusScanner
from mtrain.errors import DataError
from mtrain.invisible_characters import is_blank
from mtrain.tokenizer.tokenizer import Tokenizer

CHARACTERS_PER_TOKEN = 4.0  # assumed before there is a tokenizer
_SAMPLED = 20_000  # pairs of text that are segmented, at most
_COMPARED = 100_000  # pairs among which duplicates are counted, at most
_PLANNED = 1_000_000  # the sample is repeated up to this number of pairs, so that large batches are full

Lengths = npt.NDArray[np.integer]


@dataclass(frozen=True, eq=False)
class TrainingLengths:
    """The lengths of the pairs of an epoch, or of some of them, in tokens with EOS."""

    source: Lengths
    target: Lengths
    weights: npt.NDArray[np.floating]  # how often each pair occurs in an epoch
    share: float  # the number of these pairs, divided by the number of pairs of an epoch
    is_complete: bool  # whether these are all pairs of an epoch
    validation_pairs: int
    key: tuple[int, ...]  # of the plan of the batches, the seed first
    origin: str  # for messages
    distinct: float = 1.0  # the share of pairs that do not repeat an earlier one; at least, if there are many

    @classmethod
    def of_data(cls, data: PreparedData, config: Config, origin: str = "encoded pairs") -> "TrainingLengths":
        """The lengths of the encoded pairs in one window. With stages, an epoch is an average one."""
        window, share = data.train.of_average_epoch(config.training.max_epochs)
        compared = np.arange(min(len(window), _COMPARED))
        which = np.stack([side.distinct()[1] for side in window.fetch(compared)], axis=1)
        return cls(
            source=window.source_lengths,
            target=window.target_lengths,
            weights=window.weights,
            share=share,
            is_complete=share >= 1,
            validation_pairs=len(data.validation),
            key=(config.seed, *data.train.key(Position())),
            origin=origin,
            distinct=len(np.unique(which, axis=0)) / len(which),
        )

    @classmethod
    def of_text(
        cls, config: Config, scanner: CorpusScanner, tokenizer: Tokenizer | None
    ) -> "TrainingLengths":
        """The lengths of a sample of the text. Without a tokenizer, they are estimated. Each corpus counts
        once.

        Raises DataError if a corpus is unreadable, if no pair is left, or if a validation pair is unreadable.
        """
        scanner.result.require_text()
        text, held_out = scanner.result.text, [*chain.from_iterable(scanner.result.held_out)]
        drawn = list(islice(text.pairs(), 0, None, max(1, -(-len(text) // _SAMPLED))))
        # Encoding drops each pair whose source is held out or, with several directions, whose target is.
        sides = 2 if config.data.has_several_directions else 1
        hidden = {side for pair in held_out for side in pair[:sides]}
        sample = [pair for pair in drawn if hidden.isdisjoint(pair[:sides])]
        if drawn:
            require_rest(len(sample))
        # Duplicates are still in the text.
        pairs = round(max(scanner.result.usable_pairs, len(text)) * len(sample) / max(1, len(drawn)))
        source, target = _token_counts(sample, tokenizer)
        is_filled = (source > 1) & (target > 1)
        if tokenizer is not None:
            added = count_tag_ids(config.data, tokenizer)
            source, target = source + added[0], target + added[1]
        kept = is_filled & ~are_too_long(source, target, config.data.max_length)
        if not kept.any():
            raise DataError("no training pair is left; all are empty or longer than data.max_length")
        origin = f"{len(sample):,} of {pairs:,} pairs segmented"
        if tokenizer is None:
            origin = f"estimated at {CHARACTERS_PER_TOKEN:g} characters per token"
        compared = [*islice(text.pairs(), _COMPARED)]
        copies = max(1, min(pairs, _PLANNED) // len(sample))
        return cls(
            source=np.tile(source[kept], copies),
            target=np.tile(target[kept], copies),
            weights=np.ones(copies * int(kept.sum())),
            share=copies * len(sample) / pairs,
            is_complete=len(sample) == pairs,
            validation_pairs=len(held_out) or _count_validation(config.data),
            key=(config.seed, 0),
            origin=origin,
            distinct=len(set(compared)) / len(compared),
        )

    def of_examples(self, model: Architecture) -> "TrainingLengths":
        """The lengths of what a model is trained on. A pair classifier reads both sides as one sequence, and
        its labels are classes. Corrupted pairs are about as long as others."""
        if not model.is_classifier:
            return self
        return replace(self, source=self.source + self.target, target=np.ones_like(self.target))

    def plan(
        self, batch_tokens: int, micro_batch_tokens: int, world_size: int = 1, workers: int = 1
    ) -> BatchPlan:
        """The batches of these pairs on the first of `world_size` ranks; see `plan_batches`. Raises DataError
        if there are none."""
        division = Division(micro_batch_tokens, workers, world_size=world_size)
        plan = plan_batches((self.source, self.target), batch_tokens, division, self.key, self.weights)
        require_pairs(plan, epoch=0)
        return plan

    def steps_in_epoch(self, plan: BatchPlan) -> int:
        """The number of steps in an epoch; an estimate if these are not all of its pairs."""
        return max(1, round(len(plan.steps) / self.share))


def _count_validation(data: DataConfig) -> int:
    corpora = [] if isinstance(data.validation, Holdout) else data.validation
    return sum(1 for _ in good_pairs(corpora, data.bad_lines))


def _token_counts(pairs: Iterable[Pair], tokenizer: Tokenizer | None) -> tuple[Lengths, Lengths]:
    """The lengths of sources and targets with EOS. Blank text has the length 1."""
    sides = [["" if is_blank(text) else text for text in side] for side in zip(*pairs, strict=True)]
    sides = sides or [[], []]
    if tokenizer is None:
        characters = [np.array([len(text.strip()) for text in side]) for side in sides]
        counts = [np.ceil(side / CHARACTERS_PER_TOKEN).astype(np.int64) + 1 for side in characters]
    else:
        encoded = tokenizer.encode_source(sides[0]), tokenizer.encode_target(sides[1])
        counts = [np.array([len(ids) + 1 for ids in side]) for side in encoded]
    return counts[0], counts[1]
