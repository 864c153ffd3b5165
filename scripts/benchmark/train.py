"""Training speed and memory: mtrain, other tools, and what the machine could do at best."""

import json
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import torch
from tqdm import tqdm

from benchmark import environment, products
from benchmark.job import Job, start
from benchmark.machine import BUSY, commit, device_name
from benchmark.report import row_of, spread
from mtrain import __version__
from mtrain.config.load import load_config
from mtrain.config.schema import Config, ModelConfig
from mtrain.data.batching import BatchPlan, plan_batches
from mtrain.data.encode import EncodedCorpus, check_corpora, prepare_data
from mtrain.device import resolve_device, resolve_precision
from mtrain.model.transformer import Transformer
from mtrain.tokenizer.tokenizer import model_config
from mtrain.training.init_from import resolved
from mtrain.training.run_folder import tokenize

PEERS = {"joeynmt": "joeynmt", "marian-hf": "marian_hf", "torch": "nn_transformer"}  # names and modules
# glibc returns blocks of over 32 MiB to the kernel at once and maps them afresh, which costs page faults.
KEPT = {"MALLOC_MMAP_THRESHOLD_": "4000000000", "MALLOC_TRIM_THRESHOLD_": "8000000000"}
BOUND = "bound"


class Options(NamedTuple):
    """What the command line asked for."""

    config: Path
    overrides: list[str]
    device: str
    seconds: float
    warmup: float
    repeats: int
    peers: list[str]
    peer_precisions: list[str]
    keep_memory: bool  # measure with KEPT as well
    peer_env: Path
    profile: bool


class Contestant(NamedTuple):
    """What takes its turn in each round."""

    tool: str
    precision: str
    malloc: str  # default or kept
    module: str
    python: str


def run(options: Options) -> dict[str, Any]:
    """Measure everything; returns one JSON object. Raises any of `mtrain.errors`, and JobFailed."""
    load = os.getloadavg()[0]  # before the work of preparing
    with TemporaryDirectory(prefix="mtrain-bench-") as folder:
        run_dir = f"run_dir={json.dumps(str(Path(folder) / 'run'))}"
        config = load_config(options.config, [*options.overrides, run_dir])
        device = resolve_device(options.device)
        check_corpora(config.data)
        peer_python = environment.peer_python(options.peer_env) if options.peers else ""
        network, job = _prepare(config, device, options, Path(folder) / "streams.npz")
        contestants = _contestants(options, job.precision, peer_python)
        if load > BUSY:
            print(f"warning: this machine is busy (load {load:.1f}); figures will be off", file=sys.stderr)
        runs = _take_turns(contestants, job, options.repeats)
        result = _describe(options, network, job, device) | _evaluate(runs, job)
        result["machine"]["load_before"] = load
        if options.profile:
            result["profile"] = start("benchmark.profile", job)
    return result


def _prepare(
    config: Config, device: torch.device, options: Options, streams: Path
) -> tuple[ModelConfig, Job]:
    """Tokenizer and encoded corpus in the run folder, the streams for the others, and the job of all."""
    config, _ = resolved(config)
    tokenizer = tokenize(config)
    network = model_config(config.model, tokenizer, config.data.max_length)
    corpus = prepare_data(config.data, tokenizer, Path(config.run_dir) / "data", config.seed).train.epoch(0)
    recipe, lengths = config.training, (corpus.source_lengths, corpus.target_lengths)
    sizes = (recipe.batch_tokens, recipe.micro_batch_limit, config.seed, 0)
    plan = plan_batches(*lengths, *sizes, weights=corpus.weights)
    _export(corpus, plan, streams)
    training = {**recipe.model_dump(mode="json"), "micro_batch_tokens": recipe.micro_batch_limit}
    job = Job(
        run_dir=config.run_dir,
        streams=str(streams),
        device=str(device),
        precision=resolve_precision(device, recipe.precision),
        warmup=options.warmup,
        seconds=options.seconds,
        seed=config.seed,
        shape=_mean_micro_batch(corpus, plan),
        model=network.model_dump(mode="json"),
        training=training,
    )
    return network, job


def _export(corpus: EncodedCorpus, plan: BatchPlan, file: Path) -> None:
    """Write the streams that `benchmark.peers.batches` reads."""
    micro_batches = [rows for step in plan.steps for rows in step]
    source, target = corpus.fetch(list(range(len(corpus))))
    np.savez(
        file,
        source_ids=source.flatten().to_numpy(),
        source_lengths=corpus.source_lengths,
        target_ids=target.flatten().to_numpy(),
        target_lengths=corpus.target_lengths,
        rows=np.concatenate(micro_batches),
        micro_batch_sizes=[len(rows) for rows in micro_batches],
        step_micro_batches=[len(step) for step in plan.steps],
    )


def _mean_micro_batch(corpus: EncodedCorpus, plan: BatchPlan) -> tuple[int, int, int]:
    """Sentences, source tokens and target tokens of a micro-batch, on average, without padding."""
    micro_batches = [rows for step in plan.steps for rows in step]
    rows = np.concatenate(micro_batches)
    totals = len(rows), corpus.source_lengths[rows].sum(), corpus.target_lengths[rows].sum()
    sentences, source, target = (max(1, round(total / len(micro_batches))) for total in totals)
    return sentences, source, target


def _contestants(options: Options, precision: str, peer_python: str) -> list[Contestant]:
    contestants = []
    for malloc in ["default"] + ["kept"] * options.keep_memory:
        contestants.append(Contestant("mtrain", precision, malloc, "benchmark.product", sys.executable))
        for peer in options.peers:
            module = f"benchmark.peers.{PEERS[peer]}"
            for peer_precision in options.peer_precisions:
                contestants.append(Contestant(peer, peer_precision, malloc, module, peer_python))
    for each in sorted({contestant.precision for contestant in contestants}):
        contestants.append(Contestant(BOUND, each, "default", "benchmark.products", sys.executable))
    return contestants


def _take_turns(
    contestants: Sequence[Contestant], job: Job, repeats: int
) -> dict[Contestant, list[dict[str, float]]]:
    """A B C A B C: a slow spell of the machine then falls on all alike."""
    runs: dict[Contestant, list[dict[str, float]]] = {each: [] for each in contestants}
    with tqdm(total=repeats * len(contestants), unit="run", disable=None) as bar:
        for _ in range(repeats):
            for each in contestants:
                bar.set_description(" ".join(each[:3]))
                variables = KEPT if each.malloc == "kept" else {}
                told = replace(job, precision=each.precision)
                runs[each].append(start(each.module, told, each.python, variables))
                bar.update()
    return runs


def _evaluate(runs: dict[Contestant, list[dict[str, float]]], job: Job) -> dict[str, Any]:
    """The rows of the table, and the bounds."""
    flops = products.flops_of(products.products_of_job(job))
    target_tokens = job.shape[2]
    bounds = {
        each.precision: [target_tokens / run["seconds"] for run in results]
        for each, results in runs.items()
        if each.tool == BOUND
    }
    ours = {
        each.malloc: [run["target_tokens_per_second"] for run in results]
        for each, results in runs.items()
        if each.tool == "mtrain"
    }
    rows = []
    for each, results in runs.items():
        if each.tool != BOUND:
            mtrain = None if each.tool == "mtrain" else ours[each.malloc]
            figures = row_of(results, flops / target_tokens, bounds[each.precision], mtrain)
            rows.append(each._asdict() | figures)
    speeds = [
        {
            "precision": precision,
            "target_tokens_per_second": spread(values),
            "gflops": spread([value * flops / target_tokens / 1e9 for value in values]),
        }
        for precision, values in bounds.items()
    ]
    return {"mflop_per_target_token": flops / target_tokens / 1e6, "rows": rows, "bounds": speeds}


def _describe(options: Options, network: ModelConfig, job: Job, device: torch.device) -> dict[str, Any]:
    """What was measured, where, and when."""
    kept = {"kept": " ".join(f"{name}={value}" for name, value in KEPT.items())}
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "mtrain": __version__,
        "commit": commit(),
        "config": str(options.config),
        "overrides": options.overrides,
        "seconds": options.seconds,
        "warmup": options.warmup,
        "repeats": options.repeats,
        "machine": {
            "torch": torch.__version__,
            "python": platform.python_version(),
            "device": job.device,
            "device_name": device_name(device),
            "threads": torch.get_num_threads(),
        },
        "parameters": sum(parameter.numel() for parameter in Transformer(network).parameters()),
        "batch": dict(zip(("sentences", "source_tokens", "target_tokens"), job.shape, strict=True)),
        "malloc": {"default": "the environment as it is"} | (kept if options.keep_memory else {}),
    }
