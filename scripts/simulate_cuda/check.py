"""Run the tests marked `gpu` and whole commands on the simulated device, and count what a step does."""

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

from simulate_cuda import build

ROOT = Path(__file__).parents[2]
PYTHON = [sys.executable, str(Path(__file__).parent)]
RUN = [*PYTHON, "run"]
# The demo's model stays useless, but uses every kind of work that a run does.
SHORT = {
    "training.max_steps": 4,
    "training.validate_every": 4,
    "decoding.max_length_ratio": 0.3,
    "decoding.max_length_offset": 2,
}
SENTENCES = ["I like oranges.", "Does she eat red apples?", "They don't like pears and apples."]


def commands(work: Path) -> dict[str, dict[str, list[str]]]:
    """The commands of each part by name, which run in this order. Their files are in the folder `work`."""
    files = [
        str(file) for file in (ROOT / "tests").rglob("test_*.py") if "mark.gpu" in file.read_text("utf-8")
    ]
    tests = [*RUN, "-m", "pytest", "-p", "no:cacheprovider", *files, "-m"]
    mtrain, run, device = [*RUN, "-m", "mtrain"], str(work / "toy"), ["--device", "cuda"]
    short = [word for key, value in SHORT.items() for word in ("--set", f"{key}={value}")]
    translate = [*mtrain, "translate", run, *SENTENCES, *device, "--set"]
    resume = ["resume", str(work / "resume"), "--python", *RUN]
    return {
        "tests": {"tests": [*tests, "gpu and not slow"]},
        "slow": {"tests, slow": [*tests, "gpu and slow"]},
        "commands": {
            "demo": [*mtrain, "demo", *device, "--run-dir", run, *short],
            "translate, greedy": [*translate, "decoding.beam_size=1"],
            "translate, beam 5": [*translate, "decoding.beam_size=5"],
            "score": [*mtrain, "score", run, *device, "--tsv", "mtrain/data/toy/test.tsv"],
        },
        "resume": {"resume": [*RUN, "-m", "gpu", *device, "--tiny", *resume]},
        "counts": {"counts": [*PYTHON, "counts"]},
        "others": {"counts, others": [*PYTHON, "counts", "others"]},
    }


def main(names: Sequence[str] = ()) -> int:
    """Run the parts with these names, or all of them, two at a time. Returns 1 if a command has failed."""
    with TemporaryDirectory() as work, ThreadPoolExecutor(2) as pool:
        parts = commands(Path(work))
        if unknown := set(names) - set(parts):
            print(f"unknown part {unknown.pop()}; the parts are {', '.join(parts)}", file=sys.stderr)
            return 2
        build.build()
        failed = list(pool.map(_fails, (parts[name] for name in names or parts)))
    return int(any(failed))


def _fails(part: dict[str, list[str]]) -> bool:
    """Run the commands of a part until one fails. Prints a line for each, and the output of `counts` and of
    the command that fails."""
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    for name, command in part.items():
        start = time.monotonic()
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        line = f"{name}: exit {done.returncode}, {time.monotonic() - start:.0f} s\n"
        shown = done.stdout if done.returncode or name.startswith("counts") else ""
        print(shown + line, end="", flush=True)
        # Tests are skipped, which is no failure of pytest, where PyTorch finds no device.
        if done.returncode or (name.startswith("tests") and " passed" not in done.stdout):
            return True
    return False
