"""What a measuring process is told, how it is started, and what it answers: JSON both ways."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

SCRIPTS = Path(__file__).parent.parent


@dataclass(frozen=True)
class Job:
    """One measurement. `benchmark.peers.batches` says what `streams` holds."""

    run_dir: str  # tokenizer and data of the run are there
    streams: str  # file of token streams and batches
    device: str  # cpu or cuda:N
    precision: str  # fp32, bf16 or fp16
    warmup: float  # seconds before the measured span
    seconds: float  # of the measured span, at least
    seed: int
    shape: tuple[int, int, int]  # of the mean batch: sentences, source tokens, target tokens
    model: dict[str, Any]  # the fields of ModelConfig
    training: dict[str, Any]  # the fields of TrainingConfig, with `micro_batch_tokens` resolved


class JobFailed(Exception):
    """A measuring process ended badly; the message is the last line it wrote."""


def start(module: str, job: Any, python: str = sys.executable, environment: Mapping[str, str] = {}) -> Any:
    """Run `python -m module` on a dataclass, with variables added to its environment; returns its answer.

    Raises JobFailed; all that the process wrote has then been passed on to stderr.
    """
    path = os.pathsep.join(filter(None, (str(SCRIPTS), os.environ.get("PYTHONPATH"))))
    with TemporaryDirectory(prefix="mtrain-bench-") as folder:
        question, answer = Path(folder) / "job.json", Path(folder) / "answer.json"
        question.write_text(json.dumps(asdict(job)), encoding="utf-8")
        ended = subprocess.run(
            [python, "-m", module, str(question), str(answer)],
            env={**os.environ, "PYTHONPATH": path, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
        )
        if ended.returncode:
            sys.stderr.write(ended.stdout)
            last = (ended.stdout.strip().splitlines() or [f"exit status {ended.returncode}"])[-1]
            raise JobFailed(f"{module}: {last}")
        return json.loads(answer.read_text(encoding="utf-8"))


def answer_with(work: Callable[[Any], Any], kind: type[Any] = Job) -> None:
    """The main function of such a module: read the job, of some dataclass, do the work, write the answer."""
    question, answer = map(Path, sys.argv[1:])
    job = kind(**json.loads(question.read_text(encoding="utf-8")))
    answer.write_text(json.dumps(work(job)), encoding="utf-8")
