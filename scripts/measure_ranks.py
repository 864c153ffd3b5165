"""Compare two training processes with one: `python scripts/measure_ranks.py SOURCE TARGET`.

Prints a Markdown table for two ranks of one CPU thread each, started by torchrun, and one rank of one thread.
Each rank has the same number of tokens in a step, so two ranks take steps of twice as many tokens (weak
scaling). All numbers are medians of rounds that take turns on the same batches. Run it on an idle machine
with at least two cores.
"""

import argparse
import copy
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
import yaml
from generate_docs import table

from mtrain.config.load import load_config
from mtrain.data.epochs.batching import Batch
from mtrain.data.epochs.loader import StepInput
from mtrain.device import resolve_precision
from mtrain.distributed.many_ranks import joined_ranks
from mtrain.distributed.ranks import Ranks
from mtrain.training.fit import make_trainer
from mtrain.training.step.ddp import ParallelLearner
from mtrain.training.step.learner import Learner

CPU = torch.device("cpu")
RATE = 1e-4
EXCHANGES = 300  # between the hosts, to be timed
COLUMNS = (
    "preset",
    "precision",
    "tokens a rank",
    "step of one rank",
    "with DDP, alone",
    "two at once, apart",
    "two ranks",
    "throughput ratio",
    "communication",
)


def write_config(folder: Path, options: argparse.Namespace, preset: str, tokens: int) -> Path:
    """The config of a run with steps of `tokens` in each of `options.ranks` ranks."""
    corpus = {"source": str(options.source.resolve()), "target": str(options.target.resolve())}
    config = {
        "run_dir": str(folder / f"{preset}-{tokens}-{options.size}"),
        "data": {
            "source_lang": "en",
            "target_lang": "de",
            "train": corpus,
            "validation": {"holdout": 100},
            "folder": str(folder / "data"),
            "check": False,
        },
        "tokenizer": {"vocab_size": 8000},
        "model": {"preset": preset, "dropout": 0.1},
        "training": {
            "max_steps": 1000,
            "batch_tokens": tokens * options.size,
            "micro_batch_tokens": tokens,
            "learning_rate": RATE,
            "warmup_steps": 1,
            "precision": options.precision,
        },
    }
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(config))
    return file


def seconds_of(learner: Learner, steps: Sequence[StepInput], alone: bool) -> float:
    """The time of a step, on average. A rank that is `alone` takes its share of it as a whole step."""
    start = time.perf_counter()
    for step in steps:
        batches = list(step.batches) or [Batch.without_pairs()]
        tokens = max(1, sum(batch.target_tokens for batch in batches)) if alone else step.tokens
        learner.step(batches, tokens, RATE).values.tolist()
    return (time.perf_counter() - start) / len(steps)


def measure_wrapping(config: Path, options: argparse.Namespace) -> list[float]:
    """The seconds of a step of one process, without DDP, and with DDP that has no other process."""
    trainer = make_trainer(load_config(config), device="cpu")
    steps = list(islice(trainer.steps(), options.steps))
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    wrapped = ParallelLearner(
        copy.deepcopy(trainer.model), trainer.config.training, Ranks(trainer.ranks.device)
    )
    plain = Learner(trainer.model, trainer.config.training)
    learners = plain, wrapped
    times = [
        [seconds_of(learner, steps, alone=True) for learner in learners] for _ in range(options.rounds + 1)
    ]
    dist.destroy_process_group()
    return [median(column) for column in zip(*times[1:], strict=True)]


def measure_ranks(config: Path, options: argparse.Namespace, ranks: Ranks) -> list[float]:
    """The seconds of a step of rank 0 alone, of both ranks at once without communication, and of both ranks
    together; the target tokens of all ranks relative to rank 0; the seconds of an exchange."""
    trainer = make_trainer(load_config(config), device="cpu", ranks=ranks)
    plain = Learner(copy.deepcopy(trainer.model), trainer.config.training)
    steps = list(islice(trainer.steps(), options.steps))

    def timed(work: Callable[[], object]) -> float:
        ranks.barrier()
        start = time.perf_counter()
        work()
        ranks.barrier()  # the slower rank counts
        return (time.perf_counter() - start) / len(steps)

    rounds = [
        [
            timed(lambda: ranks.is_first and seconds_of(plain, steps, alone=True)),
            timed(lambda: seconds_of(plain, steps, alone=True)),
            timed(lambda: seconds_of(trainer.learner, steps, alone=False)),
        ]
        for _ in range(options.rounds + 1)
    ]
    start = time.perf_counter()
    for _ in range(EXCHANGES):
        ranks.all_reduce_max(0.0, 1.0)
    exchange = (time.perf_counter() - start) / EXCHANGES
    own = sum(batch.target_tokens for step in steps for batch in step.batches)
    total = sum(step.tokens for step in steps)
    return [*(median(column) for column in zip(*rounds[1:], strict=True)), total / own, exchange]


def in_new_processes(config: Path, options: argparse.Namespace) -> list[float]:
    """What `measure_wrapping` or `measure_ranks` returns in processes of its own, with one thread each."""
    sizes = ["--rounds", str(options.rounds), "--steps", str(options.steps)]
    arguments = [__file__, str(options.source), str(options.target), "--config", str(config), *sizes]
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2"] if options.size > 1 else []
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *launcher, *arguments]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    return list(json.loads(done.stdout))


def row(folder: Path, options: argparse.Namespace, preset: str, tokens: int) -> list[str]:
    """A row of the table."""
    options.size = 1
    plain, wrapped = in_new_processes(write_config(folder, options, preset, tokens), options)
    options.size = 2
    found = in_new_processes(write_config(folder, options, preset, tokens), options)
    alone, apart, together, tokens_ratio, exchange = found
    print(f"{preset}, {tokens} tokens: an exchange takes {exchange * 1e6:.0f} us", file=sys.stderr)
    times = (f"{seconds * 1e3:,.1f} ms" for seconds in (alone, apart, together))
    first, *others = times
    ratio, share = tokens_ratio * alone / together, 1 - apart / together
    wrapping, precision = f"{wrapped / plain - 1:+.1%}", resolve_precision(CPU, options.precision)
    return [preset, precision, f"{tokens:,}", first, wrapping, *others, f"{ratio:.2f}", f"{share:.1%}"]


def main() -> None:
    """Print the table, or measure in this process."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("source", type=Path, help="source side of the training pairs")
    parser.add_argument("target", type=Path, help="target side")
    parser.add_argument("--presets", nargs="+", default=["tiny", "small"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[4096], help="of each rank in a step (4096)")
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=6, help="of each round (6)")
    parser.add_argument("--config", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.config is None:
        with TemporaryDirectory() as folder:
            pairs = [(preset, tokens) for preset in options.presets for tokens in options.tokens]
            print(table(COLUMNS, [row(Path(folder), options, *pair) for pair in pairs]))
    elif "RANK" in os.environ:
        with joined_ranks("cpu") as ranks:
            found = measure_ranks(options.config, options, ranks)
            if ranks.is_first:
                print(json.dumps(found))
    else:
        torch.set_num_threads(1)
        print(json.dumps(measure_wrapping(options.config, options)))


if __name__ == "__main__":
    main()
