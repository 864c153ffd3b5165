"""Try to make mtrain lose something: kills, full disks, flipped bits. Prints what was tried and what it cost.

    python scripts/torture.py [--kills 500] [--flips 10000] [--signals 100]

Every try is a process of its own, forked from one that has imported everything and done nothing.
"""

import argparse
import os
import random
import resource
import shutil
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import datasets  # noqa: F401  (imported here once, not in each process)
import torch

from mtrain.checkpoint import CHECKPOINT_FILES, checkpoint_folders
from mtrain.config import validate
from mtrain.errors import ModelError, MtrainError
from mtrain.schema import Config
from mtrain.storage import verify_folder
from mtrain.training import loop

STEPS = 40
EVERY = 5  # steps between checkpoints
TIMEOUT = 120  # seconds, of a process that was not killed


class Outcome(NamedTuple):
    """A row of the table."""

    fault: str
    tries: int
    lost: int  # what should have been there, or the same, was not
    corrupt: int  # damage that was taken for sound
    remark: str = ""


def config_of(run_dir: Path, steps: int = STEPS) -> Config:
    """A small run with what makes resuming hard: dropout, accumulation, averages, sampled segmentation."""
    raw = {
        "run_dir": str(run_dir),
        "data": {
            "source_lang": "en",
            "target_lang": "fr",
            "train": {"toy": "validation"},
            "validation": {"holdout": 8},
            "subword_sampling": 0.3,
        },
        "tokenizer": {"vocab_size": 330},
        "model": {"d_model": 16, "ffn_dim": 32, "heads": 2, "encoder_layers": 1, "decoder_layers": 1},
        "training": {
            "max_steps": steps,
            "batch_tokens": 512,
            "micro_batch_tokens": 256,
            "warmup_steps": 5,
            "validate_every": 20,
            "checkpoint_every": EVERY,
            "keep_checkpoints": 2,
            "log_every": 1,
            "ema_decay": 0.9,
            "precision": "fp32",
        },
        "decoding": {"beam_size": 1, "max_length_ratio": 0.5, "max_length_offset": 2, "precision": "fp32"},
    }
    return validate(Config, raw, "torture")


def in_child(work: Callable[[], object]) -> int:
    """Run `work` in a forked process; its exit code, or minus the signal that ended it."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            null = os.open(os.devnull, os.O_RDWR)
            for stream in (1, 2):
                os.dup2(null, stream)
            torch.set_num_threads(1)
            work()
            code = 0
        except MtrainError as error:
            code = error.exit_code
        finally:
            os._exit(code)
    return _waited(child)


def _waited(child: int) -> int:
    end = time.monotonic() + TIMEOUT
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    raise RuntimeError(f"a process hung for {TIMEOUT} s")


def fit(run_dir: Path, steps: int = STEPS) -> None:
    """Train, or go on."""
    loop.fit(config_of(run_dir, steps), device="cpu", quiet=True)


def weights_of(run_dir: Path) -> bytes:
    """All that the last checkpoint has of the model and the optimizer."""
    newest = checkpoint_folders(run_dir)[-1]
    return b"".join((newest / name).read_bytes() for name in sorted(CHECKPOINT_FILES[:2]))


def sound(run_dir: Path) -> int:
    """How many checkpoints of a run are sound; raises ModelError if one that is in its place is not."""
    folders = checkpoint_folders(run_dir)
    for folder in folders:
        verify_folder(folder, CHECKPOINT_FILES)
    return len(folders)


def die_soon(seconds: float) -> None:
    """Kill this process after so long, whatever it is doing then."""
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL))
    timer.daemon = True
    timer.start()


# ------------------------------------------------------------------------------------------------- kills


def kills_at_every_operation(folder: Path, start: Path) -> Outcome:
    """Die at each file operation of a save in turn: opening, making, renaming, removing, flushing."""
    tries = lost = corrupt = 0
    while True:
        run = Path(shutil.copytree(start, folder / "operations", dirs_exist_ok=True))
        code = in_child(lambda: _fit_dying_at(run, tries))  # noqa: B023
        if code == 0:
            break
        tries += 1
        try:
            lost += sound(run) == 0
        except ModelError:
            corrupt += 1
        lost += in_child(lambda: fit(run, 2 * EVERY)) != 0  # noqa: B023
        shutil.rmtree(run)
    return Outcome("killed at each file operation of a save", tries, lost, corrupt)


def _fit_dying_at(run: Path, number: int) -> None:
    seen, saving = 0, False

    def operation(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal seen
        if saving and event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.fsync"):
            if seen == number:
                os.kill(os.getpid(), signal.SIGKILL)
            seen += 1

    real_save, real_sync = loop.save_checkpoint, os.fsync

    def save(*arguments: object, **keywords: object) -> object:
        nonlocal saving
        saving = True
        try:
            return real_save(*arguments, **keywords)  # type: ignore[arg-type]
        finally:
            saving = False

    def fsync(descriptor: int) -> None:
        operation("os.fsync", ())
        real_sync(descriptor)

    loop.save_checkpoint, os.fsync = save, fsync  # type: ignore[assignment]
    sys.addaudithook(operation)
    fit(run, 2 * EVERY)


def kills_at_random(folder: Path, reference: bytes, start: Path, kills: int, seed: int = 1) -> Outcome:
    """Die anywhere in training, a fifth of the times inside a save, and go on until the run is finished."""
    draw, done, lost, corrupt, histogram = random.Random(seed), 0, 0, 0, Counter[str]()
    finished = 0
    while done < kills:
        run = Path(shutil.copytree(start, folder / "random"))
        while True:
            step = None
            if done < kills:
                step = draw.randint(1, 8) if draw.random() < 0.95 else 0  # new steps before it; 0: starting
            inside = step is not None and draw.random() < 0.2
            code = in_child(lambda: _fit_dying_after(run, step, inside, draw.random()))  # noqa: B023
            if code == -signal.SIGKILL:
                done += 1
                histogram["in a save" if inside else f"{step} new steps"] += 1
                try:
                    sound(run)
                except ModelError:
                    corrupt += 1
                continue
            lost += code != 0 or weights_of(run) != reference
            finished += 1
            break
        shutil.rmtree(run)
    spread = ", ".join(f"{name}: {count}" for name, count in sorted(histogram.items()))
    return Outcome("killed at random", done, lost, corrupt, f"{finished} runs finished alike; {spread}")


def _fit_dying_after(run: Path, steps: int | None, inside: bool, when: float) -> None:
    if steps is not None:
        new, started = 0, time.monotonic()
        real_train, real_save = loop.Trainer.train_on, loop.save_checkpoint

        def train_on(self: loop.Trainer, step: object) -> object:
            nonlocal new
            sums = real_train(self, step)  # type: ignore[arg-type]
            new += 1
            if new == steps and not inside:
                die_soon(when * 0.02)
            return sums

        def save(*arguments: object, **keywords: object) -> object:
            if inside:
                die_soon(when * 0.02)
            return real_save(*arguments, **keywords)  # type: ignore[arg-type]

        loop.Trainer.train_on, loop.save_checkpoint = train_on, save  # type: ignore[assignment, method-assign]
        if steps == 0 and not inside:
            die_soon(when * 0.3 + 0 * started)
    fit(run)


# ------------------------------------------------------------------------------------- disks, bits, signals


def full_disks(folder: Path, start: Path, tries: int = 60) -> Outcome:
    """Let no file grow beyond a size, smaller than what a save writes, then let the run go on."""
    lost = corrupt = 0
    largest = max(file.stat().st_size for file in checkpoint_folders(start)[-1].iterdir())
    for number in range(tries):
        run = Path(shutil.copytree(start, folder / "full"))
        before = {path: path.read_bytes() for path in checkpoint_folders(run)[-1].iterdir()}
        code = in_child(lambda: _fit_within(run, largest * number // tries))  # noqa: B023
        lost += code not in (6, 0)
        try:
            lost += sound(run) == 0 or any(path.read_bytes() != old for path, old in before.items())
        except (ModelError, OSError):
            corrupt += 1
        lost += in_child(lambda: fit(run, 2 * EVERY)) != 0  # noqa: B023
        shutil.rmtree(run)
    return Outcome("disk full while saving", tries, lost, corrupt)


def _fit_within(run: Path, size: int) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # then writing fails with an error
    real = loop.save_checkpoint

    def save(*arguments: object, **keywords: object) -> object:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
        try:
            return real(*arguments, **keywords)  # type: ignore[arg-type]
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

    loop.save_checkpoint = save  # type: ignore[assignment]
    fit(run, 2 * EVERY)


def flipped_bits(start: Path, tries: int, seed: int = 2) -> Outcome:
    """Flip a byte of any file of a checkpoint, or cut the file there; each must be noticed."""
    draw, corrupt = random.Random(seed), 0
    checkpoint = checkpoint_folders(start)[-1]
    files = sorted(checkpoint.iterdir())
    for number in range(tries):
        file = files[number % len(files)]
        before = file.read_bytes()
        at = draw.randrange(len(before))
        rest = b"" if draw.random() < 0.3 else bytes([before[at] ^ draw.randint(1, 255)]) + before[at + 1 :]
        after = before[:at] + rest
        file.write_bytes(after)
        try:
            verify_folder(checkpoint, CHECKPOINT_FILES)
            corrupt += 1
        except ModelError:
            pass
        file.write_bytes(before)
    return Outcome("bytes flipped, files cut", tries, 0, corrupt)


def signals(folder: Path, start: Path, tries: int, seed: int = 3) -> Outcome:
    """SIGTERM at any moment of training: saved within a step, exit code 143."""
    draw, lost = random.Random(seed), 0
    for _ in range(tries):
        run = Path(shutil.copytree(start, folder / "signals"))
        code = in_child(lambda: _fit_until_asked(run, draw.randint(1, 9), draw.random()))  # noqa: B023
        newest = int(checkpoint_folders(run)[-1].name[5:])
        asked = int((run / "asked").read_text())
        lost += code != 143 or not asked <= newest <= asked + 1
        shutil.rmtree(run)
    return Outcome("SIGTERM", tries, lost, 0)


def _fit_until_asked(run: Path, steps: int, when: float) -> None:
    new = 0
    real = loop.Trainer.train_on

    def ask(trainer: loop.Trainer) -> None:
        time.sleep(when * 0.02)
        (run / "asked").write_text(str(trainer.state.step))
        os.kill(os.getpid(), signal.SIGTERM)

    def train_on(self: loop.Trainer, step: object) -> object:
        nonlocal new
        new += 1
        if new == steps:
            threading.Thread(target=ask, args=(self,), daemon=True).start()
        return real(self, step)  # type: ignore[arg-type]

    loop.Trainer.train_on = train_on  # type: ignore[assignment, method-assign]
    loop.fit(config_of(run, 10**6), device="cpu", quiet=True)


# -------------------------------------------------------------------------------------------------- table


def torture(folder: Path, kills: int, flips: int, terms: int, fulls: int) -> list[Outcome]:
    """Everything, in a folder that is there for it."""
    start, whole = folder / "start", folder / "whole"
    assert in_child(lambda: fit(start, EVERY)) == 0  # a run with a checkpoint, from which the others start
    assert in_child(lambda: fit(Path(shutil.copytree(start, whole)))) == 0
    reference = weights_of(whole)
    return [
        kills_at_every_operation(folder, start),
        kills_at_random(folder, reference, start, kills),
        full_disks(folder, start, fulls),
        flipped_bits(start, flips),
        signals(folder, start, terms),
    ]


def main() -> int:
    """Print the table; the exit code is 1 if anything was lost or corrupt."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--flips", type=int, default=10_000)
    parser.add_argument("--signals", type=int, default=100)
    parser.add_argument("--full-disks", type=int, default=60)
    asked = parser.parse_args()
    with TemporaryDirectory(prefix="mtrain-torture-") as folder:
        rows = torture(Path(folder), asked.kills, asked.flips, asked.signals, asked.full_disks)
    print(f"{'fault':42}{'tries':>8}{'lost':>8}{'corrupt':>9}")
    for row in rows:
        print(f"{row.fault:42}{row.tries:>8,}{row.lost:>8,}{row.corrupt:>9,}  {row.remark}".rstrip())
    return int(any(row.lost or row.corrupt for row in rows))


if __name__ == "__main__":
    sys.exit(main())
