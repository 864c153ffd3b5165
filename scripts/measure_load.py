"""Train by the clock on a busy machine: `python scripts/measure_load.py CONFIG`, or `... SOURCE TARGET`.

CONFIG should leave the recipe to `model.preset: auto`. For two text files, `mtrain init` writes a config.
Prints a Markdown table of runs with `training.max_minutes` under several loads. Run it on an idle machine.

- N busy: N other processes compute all the time.
- quota: a control group limits the run to one core. Only root can make one; without it, the run gets the
  environment variables for such a quota, found from stand-ins for the files of a control group.
- slower: from the middle of the run on, three other processes for each core compute all the time, so that a
  quarter of the CPU is left for the run and its worker processes.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from generate_docs import table

from mtrain.processes.cores import count_cores, openmp_settings
from mtrain.runs.metrics import read_metrics
from mtrain.runs.summary import read_progress

BUSY = {"0 busy": 0, "2 busy": 2, "6 busy": 6}
QUOTA, SLOWER = "quota", "slower"
COLUMNS = ["load", "fit took", "training took", "beyond max_minutes", "share spent on steps"]
COLUMNS += ["final rate / peak", "steps", "validation BLEU"]
MTRAIN = [sys.executable, "-m", "mtrain"]
# Ends if this script is killed.
LOOP = "import os\nparent = os.getppid()\nwhile os.getppid() == parent:\n    sum(range(100_000))"
IN_GROUP = ["sh", "-c", 'echo $$ > "$0/cgroup.procs" && exec "$@"']
GROUPS = [("/sys/fs/cgroup/cpu", "cpu.cfs_quota_us", "100000")]  # versions 1 and 2
GROUPS += [("/sys/fs/cgroup", "cpu.max", "100000 100000")]


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Processes that compute while the block runs."""
    processes = [subprocess.Popen([sys.executable, "-c", LOOP]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def make_group_of_one_core() -> Path | None:
    """A control group whose processes may use one core; None if none can be made."""
    for top, file, quota in GROUPS:
        group = Path(top) / f"mtrain-{os.getpid()}"
        with suppress(OSError):
            group.mkdir()
            if (group / file).exists():  # else the folder is not a control group, or has no quotas
                (group / file).write_text(quota)
                return group
            group.rmdir()
    return None


def remove_group(group: Path) -> None:
    """Remove a control group once its processes have ended."""
    while (group / "cgroup.procs").read_text():
        time.sleep(0.1)
    group.rmdir()


def settings_for_one_core(folder: Path) -> dict[str, str]:
    """What mtrain adds to the environment of a run that has a quota of one core."""
    for name, text in (("proc/self/cgroup", "0::/\n"), ("sys/fs/cgroup/cpu.max", "100000 100000\n")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return openmp_settings(os.environ, folder)


def mtrain(command: str, config: Path, run: Path, data: Path, *settings: str) -> list[str]:
    """A command line of mtrain."""
    options = [each for setting in (f"data.folder={data}", *settings) for each in ("--set", setting)]
    return [*MTRAIN, command, str(config), "--run-dir", str(run), *options, "--quiet"]


def train(run: Path, command: Sequence[str], environment: Mapping[str, str], slower_after: float) -> float:
    """Train in a run folder, on a machine that becomes four times slower after `slower_after` seconds of
    training. Returns the time at which the process ended."""
    with ExitStack() as stack:
        process = subprocess.Popen(command, env={**os.environ, **environment})
        stack.callback(process.wait)
        stack.callback(process.terminate)
        while process.poll() is None:
            time.sleep(0.2)
            first = next(read_metrics(run), None)
            if first is not None and time.time() > first["time"] - first["seconds"] + slower_after:
                stack.enter_context(busy_processes(3 * count_cores()))
                process.wait()
    if process.returncode:
        sys.exit(process.returncode)
    return time.time()


def measure(folder: Path, load: str, config: Path, minutes: float) -> list[str]:
    """A row of the table."""
    run, budget = folder / load.replace(" ", "-"), 60 * minutes
    settings = f"training.max_minutes={minutes}", "training.log_every=1", "data.test={}"
    command, environment = mtrain("fit", config, run, folder / "data", *settings), dict[str, str]()
    with ExitStack() as stack:
        stack.enter_context(busy_processes(BUSY.get(load, 0)))
        if load == QUOTA:
            if group := make_group_of_one_core():
                stack.callback(remove_group, group)
                command = [*IN_GROUP, str(group), *command]
            else:
                environment = settings_for_one_core(folder)
            load += " (control group)" if group else " (threads only)"
        began = time.time()
        ended = train(run, command, environment, budget / 2 if load == SLOWER else float("inf"))
    records = list(read_metrics(run))
    steps = [record for record in records if "loss" in record]
    seconds = ended - (records[0]["time"] - records[0]["seconds"])  # of training and validation
    tokens = [0, *(record["target_tokens"] for record in steps)]
    speeds = [record["target_tokens_per_second"] for record in steps]
    of_steps = sum((b - a) / speed for a, b, speed in zip(tokens, tokens[1:], speeds, strict=False))
    rates = [record["learning_rate"] for record in steps]
    best = read_progress(run, None).best
    bleu = [f"{score.value:.2f}" for score in (best.scores if best else []) if score.metric == "bleu"]
    took = (
        f"{ended - began:.0f} s",
        f"{seconds:.0f} s",
        f"{seconds - budget:+.0f} s ({seconds / budget - 1:+.1%})",
    )
    reached = f"{of_steps / budget:.0%}", f"{rates[-1] / max(rates):.3f}", f"{steps[-1]['step']:,}"
    return [load, *took, *reached, *(bleu or ["none"])]


def main() -> None:
    """Print the table."""
    loads = [*BUSY, QUOTA, SLOWER]
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE", help="a config, or two text files")
    parser.add_argument("--minutes", type=float, default=5.0, help="training.max_minutes (5)")
    parser.add_argument("--loads", nargs="+", choices=loads, default=loads, help="some of the loads (all)")
    options = parser.parse_args()
    with TemporaryDirectory() as name:
        folder, config = Path(name), options.files[0]
        if len(options.files) > 1:
            config = folder / "config.yaml"
            init = [*MTRAIN, "init", *options.files, "--output", config, "--yes"]
            subprocess.run(init, stdout=subprocess.DEVNULL, check=True)
        prepare = mtrain("prepare", config, folder / "prepared", folder / "data")
        subprocess.run(prepare, stdout=subprocess.DEVNULL, check=True)
        rows = [measure(folder, load, config, options.minutes) for load in options.loads]
    print(table(COLUMNS, rows))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the other processes
    main()
