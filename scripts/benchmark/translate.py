"""Decoding speed, latency and memory: mtrain and other tools, on the same sentences."""

import os
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from benchmark import environment
from benchmark.decoding import DecodingJob
from benchmark.job import start
from benchmark.machine import BUSY, commit, device_name
from benchmark.report import neighbour_ratio, spread
from mtrain import __version__
from mtrain.checkpoint.model_folder import load_model
from mtrain.data.corpus import read_text
from mtrain.device import resolve_device
from mtrain.errors import DataError

PEERS = {"joeynmt": "decode_joeynmt", "marian-hf": "decode_marian_hf", "ctranslate2": "decode_ctranslate2"}
SETTINGS = [(64, 1), (64, 5), (1, 1), (1, 5)]  # sentences in a batch, beams


class Options(NamedTuple):
    """What the command line asked for."""

    model: Path
    source: Path
    device: str
    length: int  # tokens of each translation
    repeats: int
    precisions: list[str]
    peers: list[str]
    peer_precisions: list[str]
    peer_env: Path


class Contestant(NamedTuple):
    """What takes its turn in each round."""

    tool: str
    precision: str
    workers: int  # 0: the tool's own choice
    module: str
    python: str


def run(options: Options) -> dict[str, Any]:
    """Measure everything; returns one JSON object. Raises any of `mtrain.errors`, and JobFailed."""
    load = os.getloadavg()[0]
    device = resolve_device(options.device)
    loaded = load_model(options.model)
    sentences = sorted(filter(None, loaded.tokenizer.encode_source(read_text(options.source))), key=len)[::-1]
    if not sentences:
        raise DataError(f"{options.source}: there is nothing to translate")
    sentences = [ids[: loaded.config.max_length - 1] for ids in sentences]
    folder = options.model / "model" if (options.model / "model").is_dir() else options.model
    job = DecodingJob(
        model_dir=str(folder.resolve()),
        sentences=sentences,
        settings=SETTINGS,
        length=options.length,
        device=str(device),
        precision="auto",
        workers=0,
        model=loaded.config.model.model_dump(mode="json"),
    )
    python = environment.peer_python(options.peer_env) if options.peers else ""
    contestants = _contestants(options, python)
    if load > BUSY:
        print(f"warning: this machine is busy (load {load:.1f}); figures will be off", file=sys.stderr)
    runs: dict[Contestant, list[dict[str, Any]]] = {each: [] for each in contestants}
    with tqdm(total=options.repeats * len(contestants), unit="run", disable=None) as bar:
        for _ in range(options.repeats):
            for each in contestants:
                bar.set_description(f"{each.tool} {each.precision}")
                told = DecodingJob(**{**vars(job), "precision": each.precision, "workers": each.workers})
                runs[each].append(start(each.module, told, each.python))
                bar.update()
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "mtrain": __version__,
        "commit": commit(),
        "model": str(options.model),
        "source": str(options.source),
        "sentences": len(sentences),
        "length": options.length,
        "repeats": options.repeats,
        "machine": {
            "torch": torch.__version__,
            "device": str(device),
            "device_name": device_name(device),
            "threads": torch.get_num_threads(),
            "load_before": load,
        },
        "rows": _rows(runs),
    }


def _contestants(options: Options, python: str) -> list[Contestant]:
    found = [
        Contestant("mtrain", each, 0, "benchmark.decoder", sys.executable) for each in options.precisions
    ]
    for peer in options.peers:
        module = f"benchmark.peers.{PEERS[peer]}"
        if peer == "ctranslate2":  # whose users choose between two ways to use the cores
            cores = torch.get_num_threads()
            for precision in dict.fromkeys([*options.peer_precisions, "int8"]):
                ways = dict.fromkeys([1, cores])
                found += [Contestant(peer, precision, workers, module, python) for workers in ways]
        else:
            found += [Contestant(peer, each, 0, module, python) for each in options.peer_precisions]
    return found


def _rows(runs: dict[Contestant, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """A row for each contestant: a figure for each setting, and mtrain's (its first precision) over it."""
    first = next(iter(runs))
    rows = []
    for each, results in runs.items():
        cells = []
        for number, (batch, beams) in enumerate(SETTINGS):
            speeds = _speeds(results, number)
            cell: dict[str, Any] = {"batch": batch, "beams": beams, "sentences_per_second": spread(speeds)}
            if each != first:
                cell["mtrain_ratio"] = neighbour_ratio(_speeds(runs[first], number), speeds)
            cells.append(cell)
        peaks = [result["peak_mib"] for result in results if result["peak_mib"] is not None]
        names = {"tool": each.tool, "precision": each.precision, "workers": each.workers}
        rows.append({**names, "settings": cells, "peak_mib": spread(peaks) if peaks else None})
    return rows


def _speeds(results: Sequence[dict[str, Any]], number: int) -> list[float]:
    return [result["settings"][number]["sentences_per_second"] for result in results]
