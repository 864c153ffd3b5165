"""SIGKILLs of random ranks, which torchrun restarts."""

import os
import random
import shutil
import signal
import time
from contextlib import suppress
from pathlib import Path

from tests.support.faults.runs import STEPS, Outcome, result_of
from tests.support.torchrun import Command


def kill_ranks_at_random(folder: Path, kills: int, seed: int = 4) -> Outcome:
    """SIGKILL a random rank of two at a random time, until runs are finished. Each must equal a run that was
    never killed, and no process may remain."""
    draw, whole = random.Random(seed), folder / "ranks"
    start = time.monotonic()
    assert Command(whole, STEPS).process.wait() == 0
    seconds, expected = time.monotonic() - start, result_of(whole)
    done = lost = runs = 0
    while done < kills:
        run = folder / f"ranks-{runs}"
        runs += 1
        command = Command(run, STEPS, "--max-restarts", str(kills))
        while done < kills and command.process.poll() is None:
            time.sleep(seconds * draw.random())
            if victim := command.ranks().get(draw.randrange(2)):
                with suppress(ProcessLookupError):
                    os.kill(victim, signal.SIGKILL)
                    done += 1
        ended = command.process.wait() == 0
        lost += not ended or result_of(run) != expected or bool(list(command.environments()))
        shutil.rmtree(run)
    shutil.rmtree(whole)
    return Outcome("SIGKILL of a rank, torchrun restarts", done, lost, 0, f"{runs} runs finished")
