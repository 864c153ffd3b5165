"""SIGKILL and SIGTERM while a run trains, sent by another process."""

import os
import random
import shutil
import signal
import time
from collections import Counter
from pathlib import Path

from mtrain.checkpoint.checkpoint import checkpoint_folders
from mtrain.errors import ModelError
from tests.support.faults.file_operations import Operation, is_save, on_file_operation
from tests.support.faults.processes import Counters, ProcessEnd, run_in_child, start, wait, wait_until
from tests.support.faults.runs import Outcome, count_valid_checkpoints, result_of, train

START, STEP, SAVE = "before the first new step", "after new steps", "inside a save"
SHARES = {START: 5, STEP: 60, SAVE: 35}  # percent of the kills aimed at each; the table says where they hit


def kill_at_random(folder: Path, origin: Path, kills: int, seed: int = 1) -> Outcome:
    """SIGKILL anywhere in training, then resume, until the run is finished. It must then equal a run that was
    never killed in its losses, its batches and its weights."""
    draw, counters = random.Random(seed), Counters()
    whole = Path(shutil.copytree(origin, folder / "whole"))
    assert run_in_child(lambda: _train(whole, counters)) == 0
    expected = result_of(whole)
    operations = counters.operations
    step_seconds = counters.step_nanoseconds / counters.new_steps / 1e9
    done = lost = corrupt = finished = 0
    places, steps, new_steps = Counter[str](), Counter[int](), Counter[int]()
    while done < kills:
        run = Path(shutil.copytree(origin, folder / "random"))
        pending = 0  # kills of this run
        while True:
            counters.clear()
            child = start(lambda: _train(run, counters))  # noqa: B023
            end = wait(child) if done == kills else _kill(child, draw, counters, operations, step_seconds)
            if end.exit_code != -signal.SIGKILL:
                break
            done, pending = done + 1, pending + 1
            inside = any((run / "checkpoints").glob(".step-*"))
            places[SAVE if inside else STEP if counters.new_steps else START] += 1
            new_steps[counters.new_steps] += 1
            steps[counters.step] += 1
            try:
                corrupt += count_valid_checkpoints(run) == 0
            except ModelError:
                corrupt += 1
        lost += 0 if end.exit_code == 0 and result_of(run) == expected else max(1, pending)
        finished += 1
        shutil.rmtree(run)
    shutil.rmtree(whole)
    where = ", ".join(f"{name}: {100 * places[name] / done:.1f} %" for name in SHARES)
    summary = f"{done - lost} of {done} resumed, {finished} runs finished; {where}"
    return Outcome("SIGKILL at random", done, lost, corrupt, f"{summary}\n{_histograms(steps, new_steps)}")


def _train(run: Path, counters: Counters) -> None:
    """Train, and count the file operations of saves."""

    def count(operation: Operation) -> None:
        counters.operations += is_save(operation, run)

    with on_file_operation(count):
        train(run, counters=counters)


def _kill(
    child: int, draw: random.Random, counters: Counters, operations: int, step_seconds: float
) -> ProcessEnd:
    """Kill a child somewhere, unless it ends before."""
    [target] = draw.choices(list(SHARES), list(SHARES.values()))
    steps, saved = draw.randint(1, 9), draw.randint(1, operations // 2)
    reached = {
        START: lambda: True,
        STEP: lambda: counters.new_steps >= steps,
        SAVE: lambda: counters.operations >= saved,
    }
    if end := wait_until(child, reached[target]):
        return end
    time.sleep({START: 0.3, STEP: step_seconds, SAVE: 0.001}[target] * draw.random())
    os.kill(child, signal.SIGKILL)
    return wait(child)


def _histograms(steps: Counter[int], new_steps: Counter[int]) -> str:
    lines = []
    for title, counts, width in (("killed at step", steps, 5), ("after this many new steps", new_steps, 1)):
        bins = Counter[int]()
        for value, count in counts.items():
            bins[value - value % width] += count
        lines.append(f"    {title}:")
        for first, count in sorted(bins.items()):
            name = f"{first}-{first + width - 1}" if width > 1 else str(first)
            lines.append(f"    {name:>8} {count:>4} {'#' * (count // 2)}")
    return "\n".join(lines)


def terminate_at_random(folder: Path, origin: Path, tries: int, seed: int = 3) -> Outcome:
    """SIGTERM anywhere in training: the state is saved within a step, and the exit code is 143."""
    draw, counters, lost = random.Random(seed), Counters(), 0
    for _ in range(tries):
        counters.clear()
        run = Path(shutil.copytree(origin, folder / "signals"))
        child, steps = start(lambda: train(run, 10**6, counters)), draw.randint(1, 9)  # noqa: B023
        wait_until(child, lambda: counters.new_steps >= steps)  # noqa: B023
        time.sleep(0.02 * draw.random())
        before = counters.step
        os.kill(child, signal.SIGTERM)
        after = counters.step  # the process had received the signal by then
        end = wait(child)
        newest = int(checkpoint_folders(run)[-1].name[5:])
        lost += end.exit_code != 143 or not before <= newest <= after + 1 or count_valid_checkpoints(run) == 0
        shutil.rmtree(run)
    return Outcome("SIGTERM: saved within a step, 143", tries, lost, 0)
