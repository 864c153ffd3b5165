"""Decoding speed, latency and memory of mtrain and other tools on the same sentences."""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from benchmark import peer_environment
from benchmark.job import DecodingJob, start
from benchmark.report import ratio_of_rounds, spread
from benchmark.rounds import Contestant, describe_run, take_turns
from mtrain.checkpoint.model_folder import load_model
from mtrain.data.reading.lines import read_text
from mtrain.device import resolve_device
from mtrain.errors import DataError

PEERS = {"joeynmt": "decode_joeynmt", "marian-hf": "decode_marian_hf", "ctranslate2": "decode_ctranslate2"}
SETTINGS = [(64, 1), (64, 5), (1, 1), (1, 5)]  # (batch size in sentences, beam size)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure all tools. Raises any of `mtrain.errors`, and JobFailed."""
    device = resolve_device(options.device)
    loaded = load_model(options.model)
    sentences = sorted(filter(None, loaded.tokenizer.encode_source(read_text(options.source))), key=len)[::-1]
    if not sentences:
        raise DataError(f"{options.source}: there is nothing to translate")
    python = peer_environment.peer_python(options.peer_env) if options.against else ""
    folder = options.model / "model" if (options.model / "model").is_dir() else options.model
    job = DecodingJob(
        model_dir=str(folder.resolve()),
        sentences=[ids[: loaded.config.max_length - 1] for ids in sentences],
        settings=SETTINGS,
        length=options.length,
        device=str(device),
        precision="auto",
        workers=0,
        model=loaded.config.model.model_dump(mode="json"),
    )
    description = describe_run(device)

    def run(each: Contestant) -> Any:
        return start(each.module, replace(job, precision=each.precision, workers=each.workers), each.python)

    results = take_turns(_contestants(options, python), options.repeats, run)
    return description | {
        "model": str(options.model),
        "source": str(options.source),
        "sentences": len(sentences),
        "length": options.length,
        "repeats": options.repeats,
        "rows": rows_of(results),
    }


def _contestants(options: argparse.Namespace, python: str) -> list[Contestant]:
    found = [Contestant("mtrain", each, "benchmark.mtrain_decoding") for each in options.precision]
    for peer in options.against:
        module = f"benchmark.peers.{PEERS[peer]}"
        if peer == "ctranslate2":  # its users choose between two ways to use the cores
            found += [
                Contestant(peer, precision, module, python, workers=workers)
                for precision in dict.fromkeys([*options.peer_precision, "int8"])
                for workers in dict.fromkeys([1, torch.get_num_threads()])
            ]
        else:
            found += [Contestant(peer, each, module, python) for each in options.peer_precision]
    return found


def rows_of(results: dict[Contestant, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """A row for each contestant: its speed in each setting, and the speed of the first row over it."""
    first = next(iter(results))
    rows = []
    for each, runs in results.items():
        cells = []
        for number, (batch, beams) in enumerate(SETTINGS):
            speeds = _speeds(runs, number)
            cell: dict[str, Any] = {"batch": batch, "beams": beams, "sentences_per_second": spread(speeds)}
            if each != first:
                cell["mtrain_ratio"] = ratio_of_rounds(_speeds(results[first], number), speeds)
            cells.append(cell)
        peaks = [run["peak_mib"] for run in runs if run["peak_mib"] is not None]
        names = {"tool": each.tool, "precision": each.precision, "workers": each.workers}
        rows.append({**names, "settings": cells, "peak_mib": spread(peaks) if peaks else None})
    return rows


def _speeds(runs: Sequence[dict[str, Any]], number: int) -> list[float]:
    return [run["settings"][number]["sentences_per_second"] for run in runs]
