"""Inject faults into mtrain and count what is lost: kills, full disks, flipped bytes, mutated folders.

    python -m tests.support.faults [--only kills ...] [--kills 500] [--flips 10000] [--minutes 60]

Each try runs in a process forked from one that has imported everything and computed nothing.
"""

import argparse
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.support.faults import damage, fuzz, ranks, saves, signals
from tests.support.faults.processes import run_in_child
from tests.support.faults.runs import CHECKPOINT_EVERY, Outcome, train

PARTS = ("flips", "operations", "disks", "signals", "kills", "ranks", "fuzz")


def inject(folder: Path, options: argparse.Namespace) -> Iterator[Outcome]:
    """Run the selected parts in an empty folder; yields an outcome for each kind of fault."""
    start, whole = folder / "start", folder / "finished"
    assert run_in_child(lambda: train(start, CHECKPOINT_EVERY)) == 0  # the others resume its checkpoint
    assert run_in_child(lambda: train(Path(shutil.copytree(start, whole)), 2 * CHECKPOINT_EVERY)) == 0
    parts: dict[str, list[Callable[[], Outcome]]] = {
        "flips": [lambda: damage.flip_bytes(start, options.flips)],
        "operations": [
            lambda: saves.kill_at_each_operation(folder, start),
            lambda: saves.fill_disk_at_each_operation(folder, start),
            lambda: saves.fail_each_operation(folder, start),
        ],
        "disks": [lambda: saves.limit_file_sizes(folder, start, options.disks)],
        "signals": [lambda: signals.terminate_at_random(folder, start, options.signals)],
        "kills": [lambda: signals.kill_at_random(folder, start, options.kills)],
        "ranks": [lambda: ranks.kill_ranks_at_random(folder, options.ranks, options.seed)],
        "fuzz": [lambda: fuzz.fuzz_loaders(folder, whole, options.minutes, options.seed)],
    }
    for name in options.only or PARTS:
        for part in parts[name]:
            yield part()


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=PARTS, help="run these parts only")
    parser.add_argument("--kills", type=int, default=500, help="SIGKILLs of a training run (500)")
    parser.add_argument("--flips", type=int, default=10_000, help="flipped bytes and cut files (10,000)")
    parser.add_argument("--ranks", type=int, default=100, help="SIGKILLs of ranks under torchrun (100)")
    parser.add_argument("--signals", type=int, default=100, help="SIGTERMs of a training run (100)")
    parser.add_argument("--disks", type=int, default=60, help="file size limits to try (60)")
    parser.add_argument("--minutes", type=float, default=60, help="minutes of fuzzing (60)")
    parser.add_argument("--seed", type=int, default=1, help="seed of fuzzing and of kills of ranks (1)")
    return parser.parse_args(arguments)


def main() -> int:
    """Print a table, each row as soon as it is known; the exit code is 1 if anything was lost or corrupt."""
    os.environ["OMP_NUM_THREADS"] = "1"
    code = 0
    with TemporaryDirectory(prefix="mtrain-faults-") as folder:
        print(f"{'fault':42}{'tries':>8}{'lost':>8}{'corrupt':>9}", flush=True)
        for row in inject(Path(folder).resolve(), parse_options()):
            line = f"{row.fault:42}{row.tries:>8,}{row.lost:>8,}{row.corrupt:>9,}  {row.remark}"
            print(line.rstrip(), flush=True)
            code |= bool(row.lost or row.corrupt)
    return code


if __name__ == "__main__":
    sys.exit(main())
