"""Scalars for TensorBoard in `RUN/tensorboard`, if the `tensorboard` extra is installed."""

import logging
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

log = logging.getLogger(__name__)

FLUSH_EVERY = 30  # seconds after which TensorBoard sees new values
_HIDDEN = ("step", "seconds", "time")  # the axes of TensorBoard's charts


class TensorBoard:
    """Writes the records of metrics.jsonl as scalars. Without the extra, it does nothing but say so once."""

    def __init__(self, run_dir: Path):
        self.folder = run_dir / "tensorboard"
        self.writer: SummaryWriter | None = None
        self._is_missing = False

    def start(self, step: int) -> None:
        """Open a file for the steps after `step`. TensorBoard ignores older events of these steps, which an
        interrupted run has written and a resumed run writes again."""
        if find_spec("tensorboard") is None:
            if not self._is_missing:
                log.info(
                    "tensorboard: not installed, no events are written; pip install 'mtrain[tensorboard]'"
                )
            self._is_missing = True
            return
        from torch.utils.tensorboard import SummaryWriter

        try:
            # A purge is only needed, and only correct, after earlier events.
            purge = step + 1 if self.folder.exists() else None
            self.writer = SummaryWriter(str(self.folder), purge_step=purge, flush_secs=FLUSH_EVERY)
        except OSError as error:
            self._give_up(error)

    def write(self, step: int, time: float, record: Mapping[str, Any]) -> None:
        """Add the numbers of a record, as `train/NAME` for training steps and as `validation/NAME` for
        validations."""
        if self.writer is None:
            return
        group, values = "train", record
        if "validation" in record:
            group, values = "validation", record["validation"]
        try:
            for name, value in values.items():
                if name not in _HIDDEN:
                    self.writer.add_scalar(f"{group}/{name}", value, step, walltime=time)
        except OSError as error:  # of the thread that writes; it does not end the run
            self._give_up(error)

    def close(self) -> None:
        """Write the remaining events."""
        writer, self.writer = self.writer, None
        try:
            if writer is not None:
                writer.close()
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        self.writer = None
        log.warning("%s: cannot write: %s; no more events are written", self.folder, error.strerror or error)
