"""Opens the windows of a run, one after another, and plans their steps."""

import threading
from typing import NamedTuple

from mtrain.config.schema import Config
from mtrain.data.epochs.batching import BatchPlan, Division, plan_batches
from mtrain.data.epochs.schedule import FIRST_STAGE, Position, StageSchedule, StageStarts
from mtrain.data.epochs.windows import WindowedCorpus
from mtrain.data.rewriting.throttle import Throttle
from mtrain.data.store.encoded import EncodedCorpus
from mtrain.errors import DataError


class Window(NamedTuple):
    """A part of an epoch that is planned at once."""

    corpus: EncodedCorpus
    plan: BatchPlan
    share: float  # of the pairs of the epoch that it has; 1.0 if it is the whole epoch

    @property
    def steps_in_epoch(self) -> int:
        """The number of steps in an epoch; an estimate if it has several windows."""
        return round(len(self.plan.steps) / self.share)


Opened = tuple[Position, Window]  # a window, and where it starts


def require_pairs(plan: BatchPlan, epoch: int) -> None:
    """Raise DataError if the plan of an epoch (from 0) has no pairs."""
    if not plan.steps:
        raise DataError(f"epoch {epoch + 1} has no training pairs; raise the weights of data.train")


class WindowPlanner:
    """The windows of a corpus, with the steps that training takes on each of them."""

    def __init__(self, corpus: WindowedCorpus, config: Config, division: Division):
        self.corpus, self.config = corpus, config
        self.division = division
        self.schedule = StageSchedule(config.data.stages or ())
        self._opened: dict[tuple[int, int, StageStarts], Window] = {}
        self._opening = threading.Lock()

    def open(
        self, epoch: int, window: int = 0, throttle: Throttle | None = None, starts: StageStarts = FIRST_STAGE
    ) -> Window:
        """Open and plan a window (both from 0). If the weights of its pairs are low, it may have no steps.
        The latest window with steps is cached.

        Raises DataError if it is damaged, and what rewriting its rows raises.
        """
        with self._opening:
            if (epoch, window, starts) in self._opened:
                return self._opened[epoch, window, starts]
            corpus = self.corpus.open(epoch, window, throttle, starts)
            plan = plan_batches(
                (corpus.source_lengths, corpus.target_lengths),
                self.config.training.batch_tokens,
                self.division,
                (self.config.seed, *self.corpus.key(epoch, window, starts)),
                corpus.weights,
            )
            opened = Window(corpus, plan, self.corpus.share_of_epoch(corpus, starts))
            if plan.steps:
                self._opened = {(epoch, window, starts): opened}
            return opened

    def find(self, position: Position, throttle: Throttle | None = None) -> Opened:
        """The first window with steps from a position on, and the position of its first step.

        Raises DataError if a whole epoch has no pairs, and what `open` raises.
        """
        position = self.schedule.in_stage(position)
        epoch_is_empty = position.window == 0  # as far as is known
        while True:
            window = self.open(position.epoch, position.window, throttle, position.starts)
            if window.plan.steps:
                return position, window
            following = self.after(position)
            if following.epoch > position.epoch:
                if epoch_is_empty:
                    require_pairs(window.plan, position.epoch)
                epoch_is_empty = True
            position = following

    def after(self, position: Position, taken: int = 0) -> Position:
        """The start of the window that follows the one at a position, after `taken` steps there."""
        return self.schedule.after(position, taken, self.corpus.count_windows(position.starts))

    def is_trained_on(self, position: Position) -> bool:
        """Whether training continues at the start of a window."""
        last = self.config.training.max_epochs
        return last is None or position.epoch < last

    def steps_in_epoch(self, stage: int = 0) -> int:
        """The number of steps in the first epoch of a stage (from 0), if each stage before it has one epoch.
        It is an estimate if the epoch has several windows. Raises what `find` raises."""
        return self.find(Position(epoch=stage, starts=tuple(range(stage + 1))))[1].steps_in_epoch
