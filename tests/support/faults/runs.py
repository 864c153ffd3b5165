"""A small training run that faults are injected into, and what it must have left behind."""

import time
from pathlib import Path
from typing import NamedTuple

import pytest

from mtrain.checkpoint.checkpoint import CHECKPOINT_FILES, checkpoint_folders
from mtrain.config.load import validate
from mtrain.config.schema import Config
from mtrain.storage.manifest import verify_folder
from mtrain.training import loop
from mtrain.training.fit import fit
from tests.support.faults.processes import Counters
from tests.support.training import losses

STEPS = 40
CHECKPOINT_EVERY = 5  # steps


class Outcome(NamedTuple):
    """What one kind of fault did; a row of the table."""

    fault: str
    tries: int
    lost: int  # tries after which something was missing or different
    corrupt: int  # tries after which damaged files passed for valid ones
    remark: str = ""


def make_run_config(run_dir: Path, steps: int = STEPS) -> Config:
    """A run with everything that makes exact resumption hard: dropout, accumulation, averaged weights,
    subword sampling, and a single checkpoint kept, so that every save removes the one before it."""
    raw = {
        "run_dir": str(run_dir),
        "data": {
            "source_lang": "en",
            "target_lang": "fr",
            "train": {"toy": "validation"},
            "validation": {"holdout": 8},
            "subword_sampling": 0.3,
        },
        "tokenizer": {"vocab_size": 330},
        "model": {"d_model": 16, "ffn_dim": 32, "heads": 2, "encoder_layers": 1, "decoder_layers": 1},
        "training": {
            "max_steps": steps,
            "batch_tokens": 512,
            "micro_batch_tokens": 256,
            "warmup_steps": 5,
            "validate_every": 2 * CHECKPOINT_EVERY,
            "checkpoint_every": CHECKPOINT_EVERY,
            "keep_checkpoints": 1,
            "best_metric": "nll",
            "log_every": 1,
            "ema_decay": 0.9,
            "precision": "fp32",
        },
        "decoding": {"beam_size": 1, "max_length_ratio": 0.5, "max_length_offset": 2, "precision": "fp32"},
    }
    return validate(Config, raw, "faults")


def train(run_dir: Path, steps: int = STEPS, counters: Counters | None = None) -> None:
    """Start or resume the run; `counters` follow its steps."""
    with pytest.MonkeyPatch.context() as patch:
        if counters is not None:
            patch.setattr(loop, "train_step", _counting(loop.train_step, counters))
        fit(make_run_config(run_dir, steps), device="cpu")


def _counting(train_step, counters: Counters):
    def count(self, step):
        counters.step, began = self.state.step + 1, time.perf_counter_ns()
        sums = train_step(self, step)
        counters.new_steps += 1
        counters.step_nanoseconds += time.perf_counter_ns() - began
        return sums

    return count


def result_of(run_dir: Path) -> tuple[list[bytes], list[tuple]]:
    """Weights and optimizer of the last checkpoint, the published weights, and every loss of a run."""
    newest = checkpoint_folders(run_dir)[-1]
    files = [newest / "model.safetensors", newest / "optimizer.safetensors"]
    files.append(run_dir / "model/model.safetensors")
    return [file.read_bytes() for file in files], losses(run_dir)


def count_valid_checkpoints(run_dir: Path) -> int:
    """The number of checkpoints of a run, all of which must be valid: raises ModelError for a damaged one."""
    folders = checkpoint_folders(run_dir)
    for folder in folders:
        verify_folder(folder, CHECKPOINT_FILES)
    return len(folders)


def contents_of(folder: Path) -> dict[str, bytes]:
    """The contents of the files of a folder, by name."""
    return {file.name: file.read_bytes() for file in folder.iterdir()}
