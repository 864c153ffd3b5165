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
from tortures.children import Ended, Marks, begin, in_child, wait, wait_until
from tortures.training import Outcome, fit, result_of, sound

START, STEP, SAVE = "before the first new step", "after new steps", "inside a save"
SHARES = {START: 5, STEP: 60, SAVE: 35}  # where a kill is aimed at; the table tells where it hit


def kills_at_random(folder: Path, start: Path, kills: int, seed: int = 1) -> Outcome:
    """Die anywhere in training, and go on until the run is finished; it must then be like one that nobody
    killed, in its losses, its batches and its weights."""
    draw, marks = random.Random(seed), Marks()
    whole = Path(shutil.copytree(start, folder / "whole"))
    assert in_child(lambda: fit(whole, marks=marks)) == 0
    expected = result_of(whole)
    save_seconds = marks.save_nanoseconds / marks.saves / 1e9
    step_seconds = marks.train_nanoseconds / marks.new_steps / 1e9
    done = lost = corrupt = finished = 0
    hit, steps, new_steps = Counter[str](), Counter[int](), Counter[int]()
    while done < kills:
        run = Path(shutil.copytree(start, folder / "random"))
        pending = 0  # kills of this run
        while True:
            marks.clear()
            child = begin(lambda: fit(run, marks=marks))  # noqa: B023
            end = wait(child) if done == kills else _kill(child, draw, marks, save_seconds, step_seconds)
            if end.code == -signal.SIGKILL:
                done, pending = done + 1, pending + 1
                hit[SAVE if marks.saving else STEP if marks.new_steps else START] += 1
                new_steps[marks.new_steps] += 1
                steps[marks.step] += 1
                try:
                    corrupt += sound(run) == 0
                except ModelError:
                    corrupt += 1
                continue
            lost += 0 if end.code == 0 and result_of(run) == expected else max(1, pending)
            finished += 1
            break
        shutil.rmtree(run)
    shutil.rmtree(whole)
    where = ", ".join(f"{name}: {100 * hit[name] / done:.1f} %" for name in SHARES)
    told = f"{done - lost} of {done} resumed, {finished} runs finished; {where}"
    return Outcome("SIGKILL at random", done, lost, corrupt, f"{told}\n{_histograms(steps, new_steps)}")


def _kill(child: int, draw: random.Random, marks: Marks, save_seconds: float, step_seconds: float) -> Ended:
    """Kill a child somewhere, if it does not end before."""
    [aim] = draw.choices(list(SHARES), list(SHARES.values()))
    wanted = draw.randint(1, 9)
    reached = {STEP: lambda: marks.new_steps >= wanted, SAVE: lambda: marks.saving > 0, START: lambda: True}
    if end := wait_until(child, reached[aim]):
        return end
    time.sleep({STEP: step_seconds, SAVE: save_seconds, START: 0.3}[aim] * draw.random())
    os.kill(child, signal.SIGKILL)
    return wait(child)


def _histograms(steps: Counter[int], new_steps: Counter[int]) -> str:
    lines = []
    for title, counts, width in (("killed at step", steps, 5), ("after so many new steps", new_steps, 1)):
        bins = Counter[int]()
        for value, count in counts.items():
            bins[value - value % width] += count
        lines.append(f"    {title}:")
        for first, count in sorted(bins.items()):
            name = f"{first}-{first + width - 1}" if width > 1 else str(first)
            lines.append(f"    {name:>8} {count:>4} {'#' * (count // 2)}")
    return "\n".join(lines)


def terminations(folder: Path, start: Path, tries: int, seed: int = 3) -> Outcome:
    """SIGTERM at any moment of training: saved within a step, exit code 143."""
    draw, marks, lost = random.Random(seed), Marks(), 0
    for _ in range(tries):
        marks.clear()
        run = Path(shutil.copytree(start, folder / "signals"))
        child, wanted = begin(lambda: fit(run, 10**6, marks)), draw.randint(1, 9)  # noqa: B023
        wait_until(child, lambda: marks.new_steps >= wanted)  # noqa: B023
        time.sleep(0.02 * draw.random())
        before = marks.step
        os.kill(child, signal.SIGTERM)
        after = marks.step  # the signal was there by then
        end = wait(child)
        newest = int(checkpoint_folders(run)[-1].name[5:])
        lost += end.code != 143 or not before <= newest <= after + 1 or sound(run) == 0
        shutil.rmtree(run)
    return Outcome("SIGTERM: saved within a step, 143", tries, lost, 0)
