"""The steps of a run, one after another: planned an epoch at a time, their batches made a few steps ahead."""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

from mtrain.data.batch import Batch, collate
from mtrain.data.batching import BatchPlan, Rows, plan_batches
from mtrain.data.encode import EncodedCorpus
from mtrain.errors import DataError
from mtrain.schema import Config
from mtrain.tokenizer import SpecialIds

AHEAD = 3  # steps


class Step(NamedTuple):
    """One optimizer step to come."""

    epoch: int  # from 1
    tokens: int  # target tokens of all batches
    batches: list[Batch]  # one for each forward and backward pass
    position: tuple[int, int]  # epoch from 0 and index of the step after this one: where to go on


class Feed:
    """Training batches of a corpus. Every step has a multiple of `workers` passes, or fewer than that."""

    def __init__(self, corpus: EncodedCorpus, config: Config, special: SpecialIds, workers: int = 1):
        self.corpus, self.config, self.special, self.workers = corpus, config, special, workers
        self._planned = 0, self._make_plan(0)

    def plan(self, epoch: int) -> BatchPlan:
        """The plan of an epoch, from 0. Raises DataError if it has no pair."""
        if epoch != self._planned[0]:
            self._planned = epoch, self._make_plan(epoch)
        return self._planned[1]

    def steps(self, epoch: int, index: int) -> Iterator[Step]:
        """The steps from step `index` of `epoch` (both from 0) on, without end."""
        pending: deque[Future[Step]] = deque()
        with ThreadPoolExecutor(1, "feed") as pool:
            while True:
                plan = self.plan(epoch)
                for i in range(index, len(plan.steps)):
                    after = (epoch + 1, 0) if i + 1 == len(plan.steps) else (epoch, i + 1)
                    pending.append(pool.submit(self._make, epoch, plan.step_tokens[i], plan.steps[i], after))
                    if len(pending) > AHEAD:
                        yield pending.popleft().result()
                epoch, index = epoch + 1, 0

    def _make(self, epoch: int, tokens: int, passes: list[Rows], after: tuple[int, int]) -> Step:
        return Step(epoch + 1, tokens, [self.batch(rows) for rows in passes if len(rows)], after)

    def batch(self, rows: Rows) -> Batch:
        """The tensors of some pairs of the corpus."""
        indices: list[int] = rows.tolist()
        return collate(*self.corpus.fetch(indices), self.special.pad, self.special.bos, indices)

    def _make_plan(self, epoch: int) -> BatchPlan:
        recipe = self.config.training
        lengths = (self.corpus.source_lengths, self.corpus.target_lengths)
        sizes = (recipe.batch_tokens, recipe.pass_tokens, self.config.seed, epoch)
        plan = plan_batches(*lengths, *sizes, weights=self.corpus.weights, workers=self.workers)
        if not plan.steps:
            raise DataError(f"epoch {epoch + 1} has no pair to train on; raise the weights of data.train")
        return plan
