"""Mutated folders given to the functions that load them.

Loading must succeed or raise an error; it must never crash, hang, use much memory, or execute what it reads.
"""

import os
import random
import re
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch

from mtrain.checkpoint.checkpoint import checkpoint_folders, load_checkpoint, open_checkpoint
from mtrain.checkpoint.model_folder import load_model
from mtrain.config.load import load_config, validate
from mtrain.config.schema import ModelFolderConfig
from mtrain.config.sections.training import TrainingConfig
from mtrain.config.yaml_io import read_yaml_file
from mtrain.model.transformer import Transformer
from mtrain.training.step.optimizer import make_optimizer
from tests.support.faults.damage import mutate_file, mutate_folder
from tests.support.faults.processes import start, wait
from tests.support.faults.runs import Outcome

SECONDS, BYTES = 5, 2**30  # that loading may take
EXECUTED = 99  # exit code of a process that did something that loading must not do
FORBIDDEN_EVENTS = re.compile(
    r"os\.(system|exec|spawn|posix_spawn|fork|remove|rename|mkdir|rmdir|kill)|subprocess\.Popen|socket\.connect"
    r"|pickle\.find_class"
)


def _load_and_use_model(path: Path) -> None:
    """Load a model and run it on a sentence."""
    model, tokenizer, config, _ = load_model(path)
    ids = [*tokenizer.encode_source(["It is a \u2581 test."])[0][:9], tokenizer.special.eos]
    source = torch.tensor([ids])
    with torch.no_grad():
        keep = torch.ones_like(source, dtype=torch.bool)
        model.decode(torch.tensor([[config.model.bos_id]]), model.encode(source, keep), keep)
    tokenizer.word_starts(ids)
    tokenizer.decode([list(range(min(50, tokenizer.target_vocab_size)))])


def _load_checkpoints(path: Path, original: Path) -> None:
    """Open and load each checkpoint of a run, as training does when it resumes."""
    config = validate(ModelFolderConfig, read_yaml_file(original / "model/config.yaml"), "fuzz")
    model = Transformer(config.model)
    for folder in checkpoint_folders(path):
        load_checkpoint(open_checkpoint(folder), model, make_optimizer(model, TrainingConfig(max_steps=1)))


# Loaders by what they load, each called with a mutated copy of a run and the original.
LOADERS: dict[str, Callable[[Path, Path], object]] = {
    "model folder": lambda path, _: _load_and_use_model(path / "model"),
    "run folder": lambda path, _: _load_and_use_model(path),
    "checkpoint": _load_checkpoints,
    "config": lambda path, _: load_config(path / "config.yaml"),
}


def mutate_for(kind: str, copy: Path, draw: random.Random) -> str:
    """Mutate what a loader reads from a copy of a run; returns a description."""
    if kind == "config":
        return mutate_file(copy / "config.yaml", draw)
    if kind == "run folder":
        shutil.rmtree(copy / "data")  # never loaded with a model
        shutil.rmtree(copy / "model")  # without it, the best checkpoint is loaded
    part = {"model folder": "model", "run folder": ".", "checkpoint": "checkpoints"}[kind]
    return mutate_folder(copy / part, draw)


def _guarded(load: Callable[[], object]) -> None:
    """Load, and exit at once if that executes, writes, removes or connects to anything."""

    def watch(event: str, arguments: tuple[object, ...]) -> None:
        writes = event == "open" and int(arguments[2]) & (os.O_WRONLY | os.O_RDWR)  # type: ignore[call-overload]
        if writes or FORBIDDEN_EVENTS.match(event):
            os.write(2, f"EXECUTED {event} {arguments}".encode())
            os._exit(EXECUTED)

    time.sleep = lambda _: None  # a model folder that cannot be read is tried again a little later
    sys.addaudithook(watch)
    load()


def fuzz_loaders(folder: Path, run: Path, minutes: float, seed: int) -> Outcome:
    """Give mutated copies of a run to random loaders for some minutes."""
    end, tries, lost, corrupt = time.monotonic() + 60 * minutes, 0, 0, 0
    failures: list[str] = []
    codes, slowest, largest, stderr = Counter[str](), 0.0, 0, folder / "stderr"
    baseline = wait(start(lambda: None)).peak_bytes
    while time.monotonic() < end:
        draw = random.Random(f"{seed} {tries}")
        copy = Path(shutil.copytree(run, folder / "mutated"))
        kind = draw.choice(list(LOADERS))
        changes = mutate_for(kind, copy, draw)
        found = wait(start(lambda: _guarded(lambda: LOADERS[kind](copy, run)), stderr))  # noqa: B023
        grown = found.peak_bytes - baseline
        slowest, largest = max(slowest, found.cpu_seconds), max(largest, grown)
        codes[f"{kind}: {found.exit_code}"] += 1
        if found.exit_code == EXECUTED:
            corrupt += 1
        elif (
            found.exit_code not in (0, 2 if kind == "config" else 4)
            or found.cpu_seconds > SECONDS
            or grown > BYTES
        ):
            lost += 1
        if lost + corrupt > len(failures):
            failures.append(f"    try {tries}: {kind}, {changes}: {found}")
            print(failures[-1], stderr.read_text(errors="replace")[-1500:], flush=True)
        shutil.rmtree(copy)
        tries += 1
    ends = ", ".join(f"{name}: {count}" for name, count in sorted(codes.items()))
    remark = f"{minutes:g} minutes; at most {slowest:.1f} s and {largest / 2**20:.0f} MiB; {ends}"
    return Outcome("damaged folders given to loaders", tries, lost, corrupt, remark)
