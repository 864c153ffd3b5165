"""SIGKILLs of random ranks, which torchrun restarts."""

import os
import random
import shutil
import signal
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

from tests.support.faults.runs import STEPS, Outcome, result_of
from tests.support.torchrun import Command


def kill_ranks_at_random(folder: Path, kills: int, seed: int) -> Outcome:
    """SIGKILL a random rank of two at a random time, until runs are finished. Each must equal a run that was
    never killed, and no process may remain."""
    draw, whole = random.Random(seed), folder / "ranks"
    start = time.monotonic()
    assert Command(whole, STEPS).process.wait() == 0
    seconds, expected = time.monotonic() - start, result_of(whole)
    done = runs = 0
    faults = Counter[str]()
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
        if fault := _find_fault(command, run, expected):
            faults[fault] += 1
            print(f"{fault}:\n{command.log.read_text()}", file=sys.stderr)
        shutil.rmtree(run)
    shutil.rmtree(whole)
    summary = ", ".join([f"{runs} runs finished", *(f"{n} {fault}" for fault, n in faults.items())])
    return Outcome("SIGKILL of a rank, torchrun restarts", done, faults.total(), 0, summary)


def _find_fault(command: Command, run: Path, expected: tuple[object, object]) -> str | None:
    """What is wrong at the end of a run; None if nothing is."""
    if command.process.wait() != 0:
        return "failed"
    (files, losses), (expected_files, expected_losses) = result_of(run), expected
    if files != expected_files:
        return "with other weights"
    if losses != expected_losses:
        return "with other losses"
    return "with processes that remain" if command.has_orphans() else None
