"""Progress of a run: the progress bar, log lines where there is no terminal, and metrics.jsonl."""

import errno
import json
import logging
import os
import re
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from tqdm import tqdm

from mtrain.checkpoint.checkpoint import TrainState
from mtrain.device import copy_to_host_async
from mtrain.errors import DivergedError
from mtrain.storage.atomic import write_atomically
from mtrain.training.step import StepMetrics
from mtrain.training.validate import Scores

log = logging.getLogger(__name__)

# Consecutive non-finite steps after which training has diverged. fp16 needs some to find the loss scale.
NONFINITE_STEPS = {"fp32": 3, "bf16": 3, "fp16": 20}

SPIKE_WINDOW = 64  # steps whose mean loss a new loss is compared with
SPIKE = 1.0  # nats/token above the mean; smaller deviations are never a spike


class Progress:
    """Collects the measurements of steps, one step late, so that reading them does not stall the device.

    The sums since the last line are in `state.window`, so that a resumed run continues them.
    """

    def __init__(
        self, run_dir: Path, state: TrainState, total_steps: int | None, precision: str, quiet: bool
    ):
        self.allowed = NONFINITE_STEPS[precision]
        self.file, self.state = run_dir / "metrics.jsonl", state
        hidden = quiet or None  # None: hidden unless stderr is a terminal
        self.bar = tqdm(total=total_steps, initial=state.step, unit="step", disable=hidden)
        self.pending: deque[tuple[Callable[[], list[float]], int, Sequence[int]]] = deque()
        self.recent: deque[float] = deque(maxlen=SPIKE_WINDOW)  # losses of single steps, nats/token
        self.unwritten: list[str] = []  # lines of metrics.jsonl that could not be written yet
        self.clock = time.perf_counter()

    def begin(self) -> None:
        """Start the clock, and remove lines from metrics.jsonl that this run writes again."""
        if self.file.exists():
            lines = self.file.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
            write_atomically(self.file, "".join(filter(self._is_current, lines)))
        self.clock = time.perf_counter()

    def _is_current(self, line: str) -> bool:
        """Whether a line of metrics.jsonl is whole and describes the run up to its present state."""
        try:
            record = json.loads(line) if line.endswith("\n") else {}
            step = float(record["step"])
        except (ValueError, KeyError, TypeError, RecursionError):
            return False
        repeated = self.state.validation_due and step == self.state.step and "validation" in record
        return step <= self.state.step and not repeated

    def add(self, sums: StepMetrics, rows: Sequence[int] = ()) -> None:
        """Add a step that was sent to the device, with the corpus rows of its pairs, and read the previous
        one."""
        self.pending.append((copy_to_host_async(sums.values), sums.tokens, rows))
        self.read(keep=1)
        self.tick(stepping=True)
        self.bar.update()

    def read(self, keep: int = 0) -> None:
        """Read the measurements of all but the newest `keep` steps. Raises DivergedError."""
        while len(self.pending) > keep:
            values, tokens, rows = self.pending.popleft()
            loss, nll, norm, skipped = values()
            state, window = self.state, self.state.window
            for key, value in (("loss", loss), ("nll", nll), ("tokens", tokens)):
                window[key] = window.get(key, 0.0) + value
            window["norm"] = norm
            state.skipped_in_a_row = state.skipped_in_a_row + 1 if skipped else 0
            if not skipped:
                self._watch_for_spikes(loss / tokens, state.step - len(self.pending), rows)
            else:
                state.skipped_steps += 1
                log.warning(
                    "step skipped: the loss or gradient is not finite (%d so far)", state.skipped_steps
                )
            if state.skipped_in_a_row >= self.allowed:
                raise DivergedError(
                    f"diverged: {self.allowed} steps in a row had a non-finite loss or gradient; "
                    "lower training.learning_rate or raise training.warmup_steps"
                )

    def _watch_for_spikes(self, loss: float, step: int, rows: Sequence[int]) -> None:
        """Warn about a step whose loss is far above that of the steps before it, as bad pairs cause it."""
        if len(self.recent) == SPIKE_WINDOW:
            mean = fmean(self.recent)
            if loss > mean + max(SPIKE, 6 * pstdev(self.recent, mean)):
                some = ", ".join(map(str, rows[:8])) + (", .." if len(rows) > 8 else "")
                usual = f"{mean:.2f} before"
                log.warning(
                    "step %d: loss %.2f nats/token, %s; rows %s of data/train.arrow", step, loss, usual, some
                )
        self.recent.append(loss)

    def log_step(self, epoch: int, rate: float) -> None:
        """Write the means since the last line and the last gradient norm."""
        self.read()
        state, window = self.state, self.state.window
        loss, speed = window["loss"] / window["tokens"], window["tokens"] / window["seconds"]
        self._write(
            epoch=epoch,
            loss=loss,
            nll=window["nll"] / window["tokens"],
            learning_rate=rate,
            grad_norm=window["norm"],
            target_tokens=state.target_tokens_seen,
            target_tokens_per_second=speed,
            skipped_steps=state.skipped_steps,
        )
        state.window = {}
        line = f"loss {loss:.3f} nats/token, lr {rate:.2g}, {speed:,.0f} target tokens/s"
        self.bar.set_postfix_str(line, refresh=False)
        if self.bar.disable:
            log.info("step %d, epoch %d: %s", state.step, epoch, line)

    def log_validation(self, scores: Scores, best: bool) -> None:
        """Write the scores of a validation."""
        self.tick()
        self._write(validation=scores._asdict())
        log.info(
            f"step {self.state.step}: validation nll {scores.nll:.3f}, perplexity {scores.perplexity:.2f}, "
            f"BLEU {scores.bleu:.2f}, chrF {scores.chrf:.2f}{' (best)' if best else ''}"
        )

    def tick(self, stepping: bool = False) -> None:
        """Add the time since the last call to the run's and, after a step, to that of the logged steps."""
        now = time.perf_counter()
        self.state.seconds += now - self.clock
        if stepping:
            self.state.window["seconds"] = self.state.window.get("seconds", 0.0) + now - self.clock
        self.clock = now

    def _write(self, **record: Any) -> None:
        record = {"step": self.state.step, **record, "seconds": self.state.seconds, "time": time.time()}
        # JSON has no NaN and infinity, so they become strings. No string of a record contains these words.
        self.unwritten.append(re.sub(r"NaN|-?Infinity", r'"\g<0>"', json.dumps(record)) + "\n")
        try:
            with self.file.open("ab", buffering=0) as stream:
                end, lines = stream.tell(), "".join(self.unwritten).encode()
                if stream.write(lines) != len(lines):  # a full disk; the lines are written again
                    stream.truncate(end)
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:  # a failing log does not end the run
            log.warning("%s: cannot write: %s; trying again with the next line", self.file, error.strerror)
        else:
            self.unwritten.clear()
