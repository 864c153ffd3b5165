"""A measuring process: the job that it gets, how it is started, and its answer. Both travel as JSON files."""

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
class TrainingJob:
    """A measurement of training. `benchmark.peers.batches` describes the file `streams`."""

    run_dir: str  # a run folder with the tokenizer and the encoded corpus
    streams: str  # file of token streams and batches
    device: str  # cpu or cuda:N
    precision: str  # fp32, bf16 or fp16
    warmup: float  # seconds before the measured span
    seconds: float  # least length of the measured span
    seed: int
    shape: tuple[int, int, int]  # of the mean micro-batch: sentences, source tokens, target tokens
    model: dict[str, Any]  # the fields of ModelConfig
    training: dict[str, Any]  # the fields of TrainingConfig, with `micro_batch_tokens` resolved


@dataclass(frozen=True)
class DecodingJob:
    """A measurement of decoding: sentences of source ids, each translated into exactly `length` tokens, so
    that all tools take the same number of steps whatever their weights."""

    model_dir: str  # mtrain's model; the other tools use random weights of the same sizes
    sentences: list[list[int]]  # source ids without EOS, the longest sentence first
    settings: list[tuple[int, int]]  # (batch size in sentences, beam size); batch size 1 measures latency
    length: int  # tokens of each translation
    device: str  # cpu or cuda:N
    precision: str  # auto, fp32, bf16 or int8
    workers: int  # threads or processes that translate at the same time; 0: the tool's default
    model: dict[str, Any]  # the fields of ModelConfig


class JobFailed(Exception):
    """A measuring process failed; the message is the last line that it wrote."""


def start(
    module: str,
    job: TrainingJob | DecodingJob,
    python: str = sys.executable,
    environment: Mapping[str, str] = {},
) -> Any:
    """Run `python -m module` on a job, with additional environment variables, and return its answer.

    Raises JobFailed after passing on the output of the process to stderr.
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


def answer_with(
    work: Callable[[Any], Any], kind: type[TrainingJob] | type[DecodingJob] = TrainingJob
) -> None:
    """The main function of a measuring module: read the job, do the work, write the answer."""
    question, answer = map(Path, sys.argv[1:])
    job = kind(**json.loads(question.read_text(encoding="utf-8")))
    answer.write_text(json.dumps(work(job)), encoding="utf-8")
