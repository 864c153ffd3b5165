"""Progress of a run: the progress bar, log lines where there is no terminal, and metrics.jsonl."""

import errno
import json
import logging
import os
import re
import time
from collections import defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from mtrain.checkpoint.state import TrainState
from mtrain.config.schema import Config
from mtrain.device import copy_to_host_async
from mtrain.errors import DivergedError, StorageError
from mtrain.progress_bar import Bar
from mtrain.storage.atomic import write_atomically
from mtrain.training.records.tensorboard import TensorBoard
from mtrain.training.step.learner import StepMetrics
from mtrain.training.validation.classifier import ClassifierScores
from mtrain.training.validation.samples import lines_of, remove_later_samples, step_of
from mtrain.training.validation.translation import Scores

log = logging.getLogger(__name__)

# Consecutive non-finite steps after which training has diverged. In fp16, the first steps may be non-finite
# until the loss scale is found.
MAX_NONFINITE_STEPS = {"fp32": 3, "bf16": 3, "fp16": 20}

SPIKE_WINDOW = 64  # number of previous steps with whose mean nll the nll of a step is compared
MIN_SPIKE = 1.0  # nats/token above that mean; smaller deviations are never a spike


class Progress:
    """Collects the metrics of steps, and logs them. They are read one step late, so that the device need not
    wait for the host.

    A resumed run continues the sums since the last line of metrics.jsonl, which checkpoints have.
    """

    def __init__(
        self, config: Config, state: TrainState, total_steps: int | None, precision: str, is_first: bool
    ):
        """Among several ranks, only the first writes and shows progress. The loss is per target token or,
        for a pair classifier, per pair. The `state` is read; steps that are skipped are counted in it."""
        classifies = config.model.is_classifier
        self.unit = "nats/pair" if classifies else "nats/token"
        self.speed_unit = "pairs/s" if classifies else "target tokens/s"
        self.is_first = is_first
        self.max_nonfinite_steps = MAX_NONFINITE_STEPS[precision]
        self.run_dir, self.state = Path(config.run_dir), state
        self.file = self.run_dir / "metrics.jsonl"
        # Since the last line of metrics.jsonl.
        self.sums: defaultdict[str, float] = defaultdict(float, state.metric_sums)
        self.bar = Bar("", "steps", total_steps, state.step, disable=not is_first)
        self._score: list[str] = []  # of the last validation
        self.pending: deque[tuple[Callable[[], list[float]], int, Callable[[], list[str]]]] = deque()
        self.recent: deque[float] = deque(maxlen=SPIKE_WINDOW)  # nll of single steps
        self.tensorboard = TensorBoard(self.run_dir)
        self.unwritten: list[str] = []  # lines of metrics.jsonl that could not be written yet
        self.clock = time.perf_counter()

    def remove_later_records(self) -> None:
        """Remove lines from metrics.jsonl and samples.jsonl that a resumed run will write again. Raises
        StorageError if this fails for metrics.jsonl."""
        self.unwritten = [*filter(self._is_current, self.unwritten)]  # first: the disk may be full
        try:
            lines = lines_of(self.file)
        except StorageError as error:
            cure = "restore the file, or move it elsewhere; fit then creates a new one"
            raise StorageError(f"{error}; {cure}") from None
        if self.file.exists():
            write_atomically(self.file, "".join(filter(self._is_current, lines)))
        remove_later_samples(self.run_dir, self.state.step)

    def start(self) -> None:
        """Start the clock and TensorBoard."""
        if self.is_first:
            self.tensorboard.start(self.state.step)
        self.clock = time.perf_counter()
        self.bar.unpause()  # which does not count the time before

    def close(self) -> None:
        """Write what is left, and close the files."""
        self._write_lines("some lines are not written")
        self.tensorboard.close()

    def _is_current(self, line: str) -> bool:
        """Whether a line of metrics.jsonl is not later than the current state."""
        step, current = step_of(line), self.state.step
        repeated = self.state.validation_due and step == current and "validation" in json.loads(line)
        return step <= current and not repeated

    def add_step(self, metrics: StepMetrics, locate: Callable[[], list[str]]) -> None:
        """Add the metrics of a step, and read the metrics of the previous step. `locate` returns where the
        pairs of the step come from, as `file:line`."""
        self.pending.append((copy_to_host_async(metrics.values), metrics.tokens, locate))
        self.read_pending(keep=1)
        self.bar.update()

    def read_pending(self, keep: int = 0) -> None:
        """Read the metrics of all but the newest `keep` steps.

        Raises DivergedError after too many consecutive steps with a non-finite loss or gradient.
        """
        while len(self.pending) > keep:
            values, tokens, locate = self.pending.popleft()
            loss, nll, norm, skipped = values()
            for name, value in (("loss", loss), ("nll", nll), ("tokens", tokens), ("steps", 1)):
                self.sums[name] += value
            self.sums["norm"] = norm
            self.state.skipped_in_a_row = self.state.skipped_in_a_row + 1 if skipped else 0
            if not skipped:
                self._watch_for_spikes(nll / tokens, self.state.step - len(self.pending), locate)
            else:
                self.state.skipped_steps += 1
                level = logging.WARNING if self.is_first else logging.DEBUG
                message = "step skipped: the loss or gradient is not finite (%d so far)"
                log.log(level, message, self.state.skipped_steps)
            if self.state.skipped_in_a_row >= self.max_nonfinite_steps:
                raise DivergedError(
                    f"diverged: {self.max_nonfinite_steps} steps in a row had a non-finite loss or gradient; "
                    "start another run (--run-dir) with a lower training.learning_rate or more "
                    "training.warmup_steps"
                )

    def _watch_for_spikes(self, nll: float, step: int, locate: Callable[[], list[str]]) -> None:
        """Log a warning if the nll is far above the mean of the previous steps, which bad pairs can cause.
        The loss would not do: it rises when R-Drop begins."""
        if len(self.recent) == SPIKE_WINDOW:
            mean = fmean(self.recent)
            if nll > mean + max(MIN_SPIKE, 6 * pstdev(self.recent, mean)):
                found = locate()
                some = ", ".join(found[:8]) + (", ..." if len(found) > 8 else "")
                usual = f"{mean:.2f} before"
                log.warning("step %d: nll %.2f %s, %s; pairs %s", step, nll, self.unit, usual, some)
        self.recent.append(nll)

    def log_step(self, epoch: int, rate: float, stage: int | None = None) -> None:
        """Log the means since the last line of metrics.jsonl, and the gradient norm of the last step. `stage`
        is the number of the stage of training, if there are stages."""
        self.read_pending()
        sums = self.sums
        loss = sums["loss"] / sums["tokens"]
        speed = sums["tokens"] / sums["seconds"]
        self._write(
            epoch=epoch,
            **({} if stage is None else {"stage": stage}),
            loss=loss,
            nll=sums["nll"] / sums["tokens"],
            learning_rate=rate,
            grad_norm=sums["norm"],
            target_tokens=self.state.target_tokens_seen,
            target_tokens_per_second=speed,
            data_seconds=sums.get("data_seconds", 0.0) / sums["steps"],
            skipped_steps=self.state.skipped_steps,
        )
        self.sums.clear()
        rates = [f"lr {rate:.2g}", f"{speed:,.0f} {self.speed_unit}"]
        stages = [] if stage is None else [f"stage {stage}"]
        self.bar.details = [*stages, f"loss {loss:.3f}", *self._score, *rates]
        if self.bar.disable:
            details = ", ".join([f"loss {loss:.3f} {self.unit}", *rates])
            log.info("step %d, %s: %s", self.state.step, ", ".join([*stages, f"epoch {epoch}"]), details)

    def log_validation(self, scores: Scores | ClassifierScores, best: bool) -> None:
        """Log the scores of a validation."""
        self._write(validation=scores.record(), target_tokens=self.state.target_tokens_seen)
        self._score = [scores.headline()]
        first, *more = scores.describe()
        log.info("step %d: validation %s%s", self.state.step, first, " (best)" if best else "")
        for line in more:
            log.info("%s", line)

    def elapsed(self, stepping: bool = False) -> float:
        """The seconds since the last call, or since `start`. If `stepping`, they count for the speed of the
        steps since the last line of metrics.jsonl."""
        now = time.perf_counter()
        seconds = now - self.clock
        self.clock = now
        if stepping:
            self.sums["seconds"] += seconds
        return seconds

    def _write(self, **record: Any) -> None:
        if not self.is_first:
            return
        record = {"step": self.state.step, **record, "seconds": self.state.seconds, "time": time.time()}
        self.tensorboard.write(self.state.step, record["time"], record)
        # JSON has no NaN or infinity, so they become strings. No string in a record contains these words.
        self.unwritten.append(re.sub(r"NaN|-?Infinity", r'"\g<0>"', json.dumps(record)) + "\n")
        self._write_lines("trying again with the next line")

    def _write_lines(self, consequence: str) -> None:
        """Write the unwritten lines to metrics.jsonl. A failure is logged with its `consequence`."""
        if not self.unwritten:
            return
        try:
            with self.file.open("ab", buffering=0) as stream:
                end, lines = stream.tell(), "".join(self.unwritten).encode()
                if stream.write(lines) != len(lines):  # a full disk; the lines are written again
                    stream.truncate(end)
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:  # does not end the run
            log.warning("%s: cannot write: %s; %s", self.file, error.strerror, consequence)
        else:
            self.unwritten.clear()
