"""Compare what `mtrain plan` predicts with real training: `python scripts/measure_costs.py`.

Prints a Markdown table with the FLOPs that PyTorch counts in a step, the peak memory of all tensors, and the
peak resident memory of the process above that before the model is made, with two ways of allocating memory.
The model trains on one CPU thread. With `--fit`, the table has the peak resident memory of `mtrain fit`.
"""

import argparse
import gc
import json
import os
import subprocess
import sys
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import torch
import yaml
from generate_docs import table
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from mtrain.config.load import validate
from mtrain.config.model import ModelConfig
from mtrain.config.schema import Config
from mtrain.data.epochs.batch import Batch
from mtrain.device import keep_freed_memory, limit_onednn_cache
from mtrain.model.transformer import Transformer
from mtrain.planning.cost import Device
from mtrain.planning.estimate import Estimator
from mtrain.planning.hardware import find_hardware
from mtrain.training.setup.lengths import TrainingLengths
from mtrain.training.step.average import WeightAverage
from mtrain.training.step.learner import Learner

VOCABULARIES = {"micro": 1_000, "tiny": 8_000, "small": 8_000, "base": 32_000}
PAIRS, LENGTH = 128, 32  # of each step, which is one micro-batch
PRESETS = ("tiny", "small", "base")
# How the C library allocates: one block of the operating system for each large tensor, which is returned when
# the tensor is freed; or, as in `fit`, a heap that is kept.
MALLOC = ("single blocks", "heap")
_SINGLE_BLOCKS = {"MALLOC_MMAP_THRESHOLD_": "65536"}  # of glibc, in bytes


class Costs(NamedTuple):
    """The costs of training: FLOPs of a step, and bytes at peak."""

    flops: float
    memory: int


class PeakMemory(TorchDispatchMode):
    """Tracks the memory of the tensors that operations return, until the end of the block.

    It does not see memory that an operation allocates and frees itself.
    """

    def __init__(self) -> None:
        super().__init__()
        self.current = self.peak = 0
        self._known: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._add(tensor.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        if storage in self._known:
            return
        self._known.add(storage)
        size = storage.nbytes()
        self.current += size
        self.peak = max(self.peak, self.current)
        weakref.finalize(storage, self._remove, size)

    def _remove(self, size: int) -> None:
        self.current -= size


def make_config(preset: str, **sections: Mapping[str, object]) -> tuple[Config, ModelConfig]:
    """A config of a preset, with changed sections, and its architecture."""
    corpus = {
        "source_lang": "en",
        "target_lang": "de",
        "train": {"toy": "train"},
        "validation": {"holdout": 1},
    }
    raw: dict[str, Any] = {"run_dir": "unused", "data": {**corpus, "max_length": LENGTH}}
    raw["model"] = {"preset": preset, **sections.get("model", {})}
    recipe = {"batch_tokens": PAIRS * LENGTH, "max_steps": 2, "learning_rate": 1e-3, "warmup_steps": 1}
    raw["training"] = {**recipe, **sections.get("training", {})}
    config = validate(Config, raw, "the measurement")
    size = VOCABULARIES[preset]
    words = {"source_vocab_size": size, "target_vocab_size": size, "max_positions": LENGTH}
    return config, ModelConfig(**config.model.model_dump(), **words)


def predict(config: Config, architecture: ModelConfig) -> Costs:
    """The costs by the formulas of `mtrain plan`."""
    lengths = np.full(PAIRS * 2, LENGTH)
    pairs = TrainingLengths(lengths, lengths, np.ones(len(lengths)), 1.0, True, 1, 1, (0,), "measurement")
    device = Device(find_hardware("cpu"), config.training.precision)
    estimator = Estimator(config, architecture, pairs, device)
    return Costs(estimator.step().flops, estimator.memory().total)


def measure(config: Config, architecture: ModelConfig) -> Costs:
    """The costs of real steps, as operations show them."""
    with PeakMemory() as memory:
        learner = rehearse(config, architecture)
        with FlopCounterMode(display=False) as counter:
            step(learner)
    return Costs(counter.get_total_flops(), memory.peak)


def measure_resident(preset: str, precision: str, malloc: str) -> int:
    """Bytes by which training increases the resident memory of this process at peak. Linux only."""
    torch.set_num_threads(1)
    limit_onednn_cache()
    training = {"precision": precision}
    step(rehearse(*make_config("micro", training=training)))  # loads libraries
    gc.collect()
    before = _status("VmRSS")
    if malloc == "heap":
        keep_freed_memory()
    step(rehearse(*make_config(preset, training=training)))
    return _status("VmHWM") - before


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def rehearse(config: Config, architecture: ModelConfig) -> Learner:
    """A learner after the rehearsal that training begins with."""
    model = Transformer(architecture).train()
    learner, average = Learner(model, config.training), WeightAverage(model, config.training)
    learner.dry_run(random_batch(architecture))
    average.update(1)
    learner.average = average  # type: ignore[attr-defined]  # lives as long as the learner
    return learner


def step(learner: Learner) -> None:
    """Take an optimizer step."""
    batch = random_batch(learner.model.config)
    learner.step([batch], batch.target_tokens, rate=1e-4)


def random_batch(architecture: ModelConfig) -> Batch:
    """A micro-batch of random tokens, without padding."""
    source = torch.randint(4, architecture.source_vocab_size, (PAIRS, LENGTH))
    target = torch.randint(4, architecture.target_vocab_size, (PAIRS, LENGTH))
    keep = torch.ones_like(source, dtype=torch.bool)
    return Batch(source, keep, target, target, target.numel(), list(range(PAIRS)))


def row(preset: str, precision: str) -> list[str]:
    """A row of the table."""
    config, architecture = make_config(preset, training={"precision": precision})
    predicted, measured = predict(config, architecture), measure(config, architecture)
    resident = [resident_in_new_process(preset, precision, malloc) for malloc in MALLOC]
    flops = (f"{costs.flops / 1e9:,.1f}" for costs in (predicted, measured))
    memory = (f"{size / 2**20:,.0f}" for size in (predicted.memory, measured.memory, *resident))
    return [preset, precision, *flops, *memory]


def resident_in_new_process(preset: str, precision: str, malloc: str) -> int:
    """What `measure_resident` returns in a new process."""
    command = [sys.executable, __file__, "--resident", preset, precision, malloc]
    environment = {**os.environ, **_SINGLE_BLOCKS}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    return int(done.stdout)


def fit_row(
    corpus: Sequence[Path], steps: int, folder: Path, preset: str, precision: str, threads: int
) -> list[str]:
    """A row of the table of `mtrain fit`: the memory of the process, predicted and at peak, in MiB."""
    source, target = (str(file.resolve()) for file in corpus)
    size = VOCABULARIES["tiny"]
    raw = {
        "run_dir": str(folder / f"{preset}-{precision}-{threads}"),
        "data": {
            "source_lang": "en",
            "target_lang": "de",
            "train": {"source": source, "target": target},
            "validation": {"holdout": 20},
            "folder": str(folder / "data"),
        },
        "tokenizer": {"vocab_size": size},
        "model": {"preset": preset, "dropout": 0.1},
        "training": {"max_steps": steps, "batch_tokens": PAIRS * LENGTH, "precision": precision},
        "decoding": {"beam_size": 1},
    }
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(raw))
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    mtrain = [sys.executable, "-m", "mtrain"]
    for name in ("prepare", "plan"):  # learning the tokenizer takes memory of its own
        options = ["--hardware", "cpu", "--json"] if name == "plan" else []
        command = [*mtrain, name, str(file), *options]
        done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    predicted = json.loads(done.stdout)["process_memory"]
    fit = subprocess.Popen([*mtrain, "fit", str(file), "--device", "cpu", "--quiet"], env=environment)
    _, status, usage = os.wait4(fit.pid, 0)
    if status:
        sys.exit("mtrain fit has failed")
    peak = usage.ru_maxrss * 1024
    sizes = (f"{size / 2**20:,.0f}" for size in (predicted, peak))
    return [preset, precision, str(threads), *sizes, f"{predicted / peak - 1:+.0%}"]


def main() -> None:
    """Print a table, or measure one row's resident memory in this process."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--presets", nargs="+", choices=PRESETS, default=list(PRESETS))
    parser.add_argument("--precisions", nargs="+", choices=("fp32", "bf16"), default=["fp32", "bf16"])
    parser.add_argument(
        "--fit", nargs=2, type=Path, metavar=("SOURCE", "TARGET"), help="train on these texts"
    )
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2], help="with --fit (1 2)")
    parser.add_argument("--steps", type=int, default=20, help="with --fit (20)")
    parser.add_argument("--resident", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.resident:
        print(measure_resident(*options.resident))
        return
    choices = [(preset, precision) for preset in options.presets for precision in options.precisions]
    if options.fit:
        header = ("preset", "precision", "threads", "MiB predicted", "MiB at peak", "difference")
        with TemporaryDirectory() as folder:
            rows = [
                fit_row(options.fit, options.steps, Path(folder), *c, n)
                for c in choices
                for n in options.threads
            ]
        print(table(header, rows))
        return
    units = (
        "GFLOP predicted",
        "GFLOP counted",
        "MiB predicted",
        "MiB of tensors",
        *(f"MiB resident, {name}" for name in MALLOC),
    )
    print(table(("preset", "precision", *units), [row(*choice) for choice in choices]))


if __name__ == "__main__":
    main()
