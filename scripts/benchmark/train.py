"""Training speed and memory: mtrain, other tools, and the bound that the machine sets."""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from benchmark import matrix_products, peer_environment
from benchmark.job import TrainingJob, start
from benchmark.report import row_of, spread
from benchmark.rounds import Contestant, describe_run, take_turns
from mtrain.config.load import load_config
from mtrain.config.schema import Config
from mtrain.config.sections.model import ModelConfig
from mtrain.data.epochs.batching import BatchPlan, Division, plan_batches
from mtrain.data.epochs.schedule import Position
from mtrain.data.prepare import make_scanner, prepare_data
from mtrain.data.preparing.inputs import check_corpora
from mtrain.data.store.folder import DataFolder
from mtrain.data.store.shards import EncodedCorpus
from mtrain.device import resolve_device, resolve_precision
from mtrain.distributed.ranks import Ranks
from mtrain.errors import UsageError
from mtrain.planning.cost import count_parameters, flops_of
from mtrain.tokenizer.tokenizer import model_config
from mtrain.training.setup.complete import complete_config, is_incomplete
from mtrain.training.setup.run_folder import write_config
from mtrain.training.setup.tokenizer import tokenize

# Names of the other tools and the modules that measure them.
PEERS = {"joeynmt": "joeynmt", "marian-hf": "marian_hf", "torch": "nn_transformer"}
# glibc returns blocks of over 32 MiB to the kernel at once and maps them again, which costs page faults.
KEEP_FREED_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "4000000000", "MALLOC_TRIM_THRESHOLD_": "8000000000"}
BOUND = "bound"


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure all tools. Raises any of `mtrain.errors`, and JobFailed."""
    with TemporaryDirectory(prefix="mtrain-bench-") as folder:
        run_dir = f"run_dir={json.dumps(str(Path(folder) / 'run'))}"
        config = load_config(options.config, [*options.set, run_dir])
        if options.against and config.training.r_drop:
            raise UsageError("training.r_drop: the other tools train without R-Drop; set it to 0")
        device = resolve_device(options.device)
        check_corpora(config.data)
        python = peer_environment.peer_python(options.peer_env) if options.against else ""
        description = describe_run(device)
        job = prepare(config, device, options, Path(folder) / "streams.npz")

        def run(each: Contestant) -> Any:
            variables = KEEP_FREED_MEMORY if each.malloc == "kept" else {}
            return start(each.module, replace(job, precision=each.precision), each.python, variables)

        results = take_turns(_contestants(options, job.precision, python), options.repeats, run)
        result = description | _describe(options, job) | _evaluate(results, job)
        if options.profile:
            result["profile"] = start("benchmark.profile", job)
    return result


def prepare(config: Config, device: torch.device, options: argparse.Namespace, streams: Path) -> TrainingJob:
    """Make the tokenizer, the encoded corpus and the file of streams, and return the job of all tools."""
    tokenizer, run_dir = tokenize(config), Path(config.run_dir)
    config = load_config(run_dir / "config.yaml")
    folder = DataFolder(run_dir / "data", run_dir)
    scanner = make_scanner(config.data, folder, config.seed)
    data = prepare_data(config.data, tokenizer, folder, scanner, config.seed)
    if is_incomplete(config):
        config = complete_config(config, tokenizer, data, Ranks(device))
        write_config(config)
    architecture = model_config(config.model, tokenizer, config.data.max_length)
    corpus = data.train.open(Position())
    recipe, lengths = config.training, (corpus.source_lengths, corpus.target_lengths)
    division, key = Division(recipe.micro_batch_limit), (config.seed, *data.train.key(Position()))
    plan = plan_batches(lengths, recipe.batch_tokens, division, key, corpus.weights)
    _export(corpus, plan, streams)
    training = {**recipe.model_dump(mode="json"), "micro_batch_tokens": recipe.micro_batch_limit}
    return TrainingJob(
        run_dir=config.run_dir,
        streams=str(streams),
        device=str(device),
        precision=resolve_precision(device, recipe.precision),
        warmup=options.warmup,
        seconds=options.seconds,
        seed=config.seed,
        shape=_mean_micro_batch(corpus, plan),
        model=architecture.model_dump(mode="json"),
        training=training,
    )


def _export(corpus: EncodedCorpus, plan: BatchPlan, file: Path) -> None:
    """Write the streams that `benchmark.peers.batches` reads."""
    micro_batches = [rows for step in plan.steps for rows in step]
    source, target = corpus.fetch(list(range(len(corpus))))
    np.savez(
        file,
        source_ids=source.ids,
        source_lengths=corpus.source_lengths,
        target_ids=target.ids,
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


def _contestants(options: argparse.Namespace, precision: str, python: str) -> list[Contestant]:
    contestants = []
    for malloc in ["default"] + ["kept"] * (options.malloc == "kept"):
        contestants.append(Contestant("mtrain", precision, "benchmark.mtrain_training", malloc=malloc))
        for peer in options.against:
            module = f"benchmark.peers.{PEERS[peer]}"
            precisions = options.peer_precision
            contestants += [Contestant(peer, each, module, python, malloc) for each in precisions]
    measured = sorted({contestant.precision for contestant in contestants})
    return contestants + [Contestant(BOUND, each, "benchmark.matrix_products") for each in measured]


def _evaluate(results: dict[Contestant, list[dict[str, Any]]], job: TrainingJob) -> dict[str, Any]:
    """The rows of the table, and the bounds."""
    flops = flops_of(ModelConfig(**job.model), matrix_products.shape_of_job(job))
    target_tokens = job.shape[2]
    bounds = {
        each.precision: [target_tokens / run["seconds"] for run in runs]
        for each, runs in results.items()
        if each.tool == BOUND
    }
    ours = {
        each.malloc: [run["target_tokens_per_second"] for run in runs]
        for each, runs in results.items()
        if each.tool == "mtrain"
    }
    rows = []
    for each, runs in results.items():
        if each.tool != BOUND:
            mtrain = None if each.tool == "mtrain" else ours[each.malloc]
            figures = row_of(runs, flops / target_tokens, bounds[each.precision], mtrain)
            names = {"tool": each.tool, "precision": each.precision, "malloc": each.malloc}
            rows.append(names | figures)
    speeds = [
        {
            "precision": precision,
            "target_tokens_per_second": spread(values),
            "gflops": spread([value * flops / target_tokens / 1e9 for value in values]),
        }
        for precision, values in bounds.items()
    ]
    return {"mflop_per_target_token": flops / target_tokens / 1e6, "rows": rows, "bounds": speeds}


def _describe(options: argparse.Namespace, job: TrainingJob) -> dict[str, Any]:
    """What is measured."""
    kept = {"kept": " ".join(f"{name}={value}" for name, value in KEEP_FREED_MEMORY.items())}
    return {
        "config": str(options.config),
        "overrides": options.set,
        "seconds": options.seconds,
        "warmup": options.warmup,
        "repeats": options.repeats,
        "parameters": count_parameters(ModelConfig(**job.model))["total"],
        "batch": dict(zip(("sentences", "source_tokens", "target_tokens"), job.shape, strict=True)),
        "malloc": {"default": "the environment is unchanged"} | (kept if options.malloc == "kept" else {}),
    }
