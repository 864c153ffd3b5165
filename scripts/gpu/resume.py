"""Whether a run that was killed resumes to the same losses and weights, bit for bit.

Three runs train on the toy corpus at the same time: one without interruption, the same again, and one that is
killed between two checkpoints.
"""

import hashlib
import json
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import mkdtemp

from gpu.scale import CheckFailed, Scale
from mtrain.runs.metrics import read_metrics

CONFIG = "configs/toy-en-fr.yaml"
SETTINGS = {
    "model.preset": "tiny",
    "model.dropout": 0.1,
    "tokenizer.vocab_size": 480,
    "training.max_epochs": "null",
    "training.batch_tokens": 1024,
    "training.learning_rate": 0.002,
    "training.warmup_steps": 50,
    "training.validate_every": 200,
    "decoding.max_length_ratio": 0.3,
    "decoding.max_length_offset": 2,
}


def check(scale: Scale, work: Path, python: Sequence[str]) -> None:
    """Train in a new folder in `work` and compare. `python` starts the interpreter.

    Raises CheckFailed if a run fails, or losses or weights differ.
    """
    work.mkdir(parents=True, exist_ok=True)
    folder = Path(mkdtemp(prefix="runs-", dir=work))
    every = 10 if scale.tiny else 100  # steps between checkpoints
    once, again, killed = folders = [folder / name for name in ("once", "again", "killed")]
    runs = {folder: _start(scale, folder, every, python) for folder in folders}
    try:
        _kill_after(every + every // 2, runs[killed], killed)
        runs[killed] = _start(scale, killed, every, python)
        for folder, run in runs.items():
            _require_success(folder, run)
    finally:
        for run in runs.values():
            run.kill()
            run.wait()
    for line in _lines(killed):
        if "resum" in line or "bit-identical" in line:
            print(line)
    worst = max(_compare(once, again), _compare(once, killed))
    weights = {folder.name: _weights(folder) for folder in folders}
    for name, digest in weights.items():
        print(f"{name}: SHA-256 of the last weights {digest}")
    if worst or len(set(weights.values())) > 1:
        message = "the weights of the same run differ, and losses by up to"
        raise CheckFailed(f"{message} {worst:.5f} nats per token")


def _start(scale: Scale, folder: Path, every: int, python: Sequence[str]) -> "subprocess.Popen[bytes]":
    """Start or resume a run; its output is appended to a log file beside its folder."""
    settings = {**SETTINGS, "training.max_steps": (3 if scale.tiny else 6) * every}
    settings |= {"training.checkpoint_every": every, "training.log_every": every // 10}
    if scale.tiny:
        settings |= {"model.preset": "micro", "training.batch_tokens": 256}
    command = [*python, "-m", "mtrain", "fit", CONFIG, "--run-dir", str(folder)]
    command += ["--device", str(scale.device)]
    for key, value in settings.items():
        command += ["--set", f"{key}={value}"]
    with _log(folder).open("ab") as log:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)


def _log(folder: Path) -> Path:
    return folder.with_suffix(".log")


def _lines(folder: Path) -> list[str]:
    """The lines of a run's log."""
    return _log(folder).read_text(encoding="utf-8", errors="replace").splitlines()


def _require_success(folder: Path, run: "subprocess.Popen[bytes]") -> None:
    if code := run.wait():
        raise CheckFailed(f"{folder.name}: exit {code}: {' '.join(_lines(folder)[-1:])}")


def _kill_after(step: int, run: "subprocess.Popen[bytes]", folder: Path) -> None:
    """Kill a run once it has logged a step. Raises CheckFailed if it ends earlier."""
    while max(_losses(folder), default=0) < step:
        if run.poll() is not None:
            last = " ".join(_lines(folder)[-1:])
            raise CheckFailed(f"{folder.name}: exit {run.returncode} before it could be killed: {last}")
        time.sleep(0.05)
    run.kill()
    run.wait()
    print(f"killed after step {max(_losses(folder))}")


def _losses(folder: Path) -> dict[int, float]:
    """The losses in a run's metrics.jsonl by step, without an incomplete last line."""
    return {record["step"]: record["loss"] for record in read_metrics(folder) if "loss" in record}


def _weights(folder: Path) -> str:
    """The SHA-256 of the weights in a run's last checkpoint."""
    checkpoints = folder / "checkpoints"
    last = json.loads((checkpoints / "index.json").read_text())["last"]
    return hashlib.sha256((checkpoints / last / "model.safetensors").read_bytes()).hexdigest()


def _compare(folder: Path, other: Path) -> float:
    """The largest difference between the losses of two runs; infinite if they logged different steps."""
    ours, theirs = _losses(folder), _losses(other)
    if not ours or ours.keys() != theirs.keys():
        print(f"{folder.name} and {other.name} logged other steps")
        return float("inf")
    worst = max(abs(ours[step] - theirs[step]) for step in ours)
    last = max(ours)
    print(
        f"{folder.name} and {other.name}: losses differ by {worst:.5f} at most in {len(ours)} lines; "
        f"in step {last} {ours[last]:.4f} and {theirs[last]:.4f}"
    )
    return worst
