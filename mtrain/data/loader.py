"""Loads the training batches: plans one epoch at a time, and makes batches a few steps ahead."""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import torch

from mtrain.config.schema import Config
from mtrain.data.batch import Batch, collate
from mtrain.data.batching import BatchPlan, Rows, plan_batches
from mtrain.data.encoded import EncodedCorpus
from mtrain.errors import DataError
from mtrain.tokenizer.vocabulary import SpecialIds

AHEAD = 3  # steps whose batches are made in advance


class Step(NamedTuple):
    """The input of one optimizer step."""

    epoch: int  # from 1
    tokens: int  # target tokens of all batches
    batches: list[Batch]  # the micro-batches
    position: tuple[int, int]  # epoch (from 0) and index of the next step, to resume from


def require_pairs(plan: BatchPlan, epoch: int) -> None:
    """Raise DataError if an epoch (from 0) has no pairs."""
    if not plan.steps:
        raise DataError(f"epoch {epoch + 1} has no training pairs; raise the weights of data.train")


class Loader:
    """The training batches of a corpus, for `device`. The number of micro-batches in a step is a multiple of
    `workers`, unless the step has too few pairs."""

    def __init__(
        self,
        corpus: EncodedCorpus,
        config: Config,
        special: SpecialIds,
        device: torch.device,
        micro_batch_tokens: int,
        workers: int = 1,
    ):
        self.corpus, self.config, self.special, self.device = corpus, config, special, device
        self.micro_batch_tokens, self.workers = micro_batch_tokens, workers
        self._opened: dict[int, tuple[EncodedCorpus, BatchPlan]] = {}

    def plan(self, epoch: int) -> BatchPlan:
        """The plan of an epoch (from 0). Raises DataError if it has no pairs."""
        return self._open(epoch)[1]

    def steps(self, epoch: int, index: int) -> Iterator[Step]:
        """Yield steps without end, starting with step `index` of `epoch` (both from 0)."""
        pending: deque[Future[Step]] = deque()
        with ThreadPoolExecutor(1, "loader") as pool:
            while True:
                corpus, plan = self._open(epoch)
                for i in range(index, len(plan.steps)):
                    pending.append(pool.submit(self._make, corpus, plan, epoch, i))
                    if len(pending) > AHEAD:
                        yield pending.popleft().result()
                while pending:  # prepare the next epoch only if it is needed
                    yield pending.popleft().result()
                epoch, index = epoch + 1, 0

    def _make(self, corpus: EncodedCorpus, plan: BatchPlan, epoch: int, index: int) -> Step:
        after = (epoch + 1, 0) if index + 1 == len(plan.steps) else (epoch, index + 1)
        batches = [self.batch(rows, corpus) for rows in plan.steps[index] if len(rows)]
        return Step(epoch + 1, plan.step_tokens[index], batches, after)

    def batch(self, rows: Rows, corpus: EncodedCorpus) -> Batch:
        """The tensors of some rows of an epoch's corpus, pinned if the device is a GPU. They are moved to the
        device later, so that it holds one micro-batch at a time."""
        indices: list[int] = rows.tolist()
        batch = collate(*corpus.fetch(indices), self.special.pad, self.special.bos, indices)
        return batch.pinned() if self.device.type == "cuda" else batch

    def largest(self, epoch: int) -> list[Batch]:
        """The batches of an epoch that need the most memory: the one with the most padded tokens, and the one
        with the largest attention matrices."""
        corpus, plan = self._open(epoch)
        micro_batches = [rows for step in plan.steps for rows in step if len(rows)]
        sizes = [
            (len(rows), int(corpus.source_lengths[rows].max()), int(corpus.target_lengths[rows].max()))
            for rows in micro_batches
        ]
        linear = max(range(len(micro_batches)), key=lambda i: sizes[i][0] * (sizes[i][1] + sizes[i][2]))
        square = max(range(len(micro_batches)), key=lambda i: sizes[i][0] * max(sizes[i][1:]) ** 2)
        return [self.batch(micro_batches[i], corpus) for i in dict.fromkeys((linear, square))]

    def _open(self, epoch: int) -> tuple[EncodedCorpus, BatchPlan]:
        """The corpus and the plan of an epoch. Those of the latest epoch are cached."""
        if epoch not in self._opened:
            corpus, recipe = self.corpus.epoch(epoch), self.config.training
            lengths = (corpus.source_lengths, corpus.target_lengths)
            sizes = (recipe.batch_tokens, self.micro_batch_tokens, self.config.seed, epoch)
            plan = plan_batches(*lengths, *sizes, weights=corpus.weights, workers=self.workers)
            require_pairs(plan, epoch)
            self._opened = {epoch: (corpus, plan)}
        return self._opened[epoch]
