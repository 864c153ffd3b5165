"""`torchrun`, and the processes that it starts."""

import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mtrain.config.yaml_io import to_yaml
from tests.support.faults.runs import make_run_config

MARK = "MTRAIN_TEST"  # variable in the environment of all processes of a command


class Torchrun:
    """A running `torchrun -m mtrain` with two ranks on the CPU."""

    def __init__(self, log: Path, options: Sequence[str], arguments: Sequence[str | Path], **streams: Any):
        """Run mtrain with the arguments. `options` are passed to torchrun, `streams` to `Popen`."""
        self.mark, self.log = f"{MARK}={uuid.uuid4()}", log
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *options]
        command = [*torchrun, "-m", "mtrain", *map(str, arguments), "--device", "cpu", "--quiet"]
        environment = {**os.environ, **dict([self.mark.split("=")]), "OMP_NUM_THREADS": "1"}
        with self.log.open("w") as stderr:
            self.process = subprocess.Popen(command, stderr=stderr, env=environment, **streams)

    def ranks(self) -> dict[int, int]:
        """The process of each rank."""
        return {int(values["RANK"]): pid for pid, values in self.environments() if "RANK" in values}

    def has_orphans(self, seconds: float = 30.0) -> bool:
        """Whether processes remain some time after the end of torchrun."""
        deadline = time.monotonic() + seconds
        while list(self.environments()):
            if time.monotonic() > deadline:
                return True
            time.sleep(0.1)
        return False

    def environments(self) -> Iterator[tuple[int, dict[str, str]]]:
        """The processes of the command, and the environment that each was started with."""
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                lines = (folder / "environ").read_text(errors="replace").split("\0")
                is_alive = " Z " not in (folder / "stat").read_text()
            except OSError:
                continue
            if self.mark in lines and is_alive:
                yield int(folder.name), dict(line.split("=", 1) for line in lines if "=" in line)


class Command(Torchrun):
    """A running `torchrun -m mtrain fit`."""

    def __init__(self, run: Path, steps: int, *options: str, fit: Sequence[str] = ()):
        """Train in a run folder until `steps`. The options are passed to torchrun and to `fit`."""
        config = run.with_suffix(".yaml")
        config.write_text(to_yaml(make_run_config(run, steps), exclude_unset=True))
        super().__init__(run.with_suffix(".log"), options, ["fit", config, *fit])
