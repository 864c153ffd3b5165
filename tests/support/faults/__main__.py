"""Try to make mtrain lose something: kills, full disks, flipped bits. Prints what was tried and what it cost.

    python scripts/torture.py [--only kills ...] [--kills 500] [--flips 10000] [--signals 100] [--minutes 60]

Every try is a process of its own, forked from one that has imported everything and done nothing.
"""

import argparse
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from tortures import damage, fuzz, saves, signals
from tortures.children import in_child
from tortures.training import EVERY, Outcome, fit


def torture(folder: Path, asked: argparse.Namespace) -> Iterator[Outcome]:
    """What was asked for, in a folder that is there for it."""
    start, whole = folder / "start", folder / "fuzzed"
    assert in_child(lambda: fit(start, EVERY)) == 0  # a run with a checkpoint, from which the others start
    assert in_child(lambda: fit(Path(shutil.copytree(start, whole)), 2 * EVERY)) == 0
    parts: dict[str, Callable[[], Iterable[Outcome]]] = {
        "flips": lambda: [damage.flipped_bytes(start, asked.flips)],
        "operations": lambda: (
            part(folder, start)
            for part in (
                saves.kills_at_every_operation,
                saves.full_at_every_operation,
                saves.failures_at_every_operation,
            )
        ),
        "disks": lambda: [saves.full_disks(folder, start, asked.disks)],
        "signals": lambda: [signals.terminations(folder, start, asked.signals)],
        "kills": lambda: [signals.kills_at_random(folder, start, asked.kills)],
        "fuzz": lambda: [fuzz.fuzzed(folder, whole, asked.minutes, asked.seed)],
    }
    for name in asked.only or parts:
        yield from parts[name]()


def options(arguments: list[str] | None = None) -> argparse.Namespace:
    """What the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    names = ("flips", "operations", "disks", "signals", "kills", "fuzz")
    parser.add_argument("--only", nargs="+", choices=names, help="not everything")
    parser.add_argument("--kills", type=int, default=500, help="SIGKILLs of a training run")
    parser.add_argument("--flips", type=int, default=10_000, help="flipped bytes and cut files")
    parser.add_argument("--signals", type=int, default=100, help="SIGTERMs")
    parser.add_argument("--disks", type=int, default=60, help="sizes that no file grows beyond")
    parser.add_argument("--minutes", type=float, default=60, help="of damaged folders given to loaders")
    parser.add_argument("--seed", type=int, default=1, help="of those")
    return parser.parse_args(arguments)


def main() -> int:
    """Print the table, a row as soon as it is known; the exit code is 1 if anything was lost or corrupt."""
    os.environ["OMP_NUM_THREADS"] = "1"
    code = 0
    with TemporaryDirectory(prefix="mtrain-torture-") as folder:
        print(f"{'fault':42}{'tries':>8}{'lost':>8}{'corrupt':>9}", flush=True)
        for row in torture(Path(folder), options()):
            line = f"{row.fault:42}{row.tries:>8,}{row.lost:>8,}{row.corrupt:>9,}  {row.remark}"
            print(line.rstrip(), flush=True)
            code |= bool(row.lost or row.corrupt)
    return code


if __name__ == "__main__":
    sys.exit(main())
