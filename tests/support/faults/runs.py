"""The run that is tortured, and what must be found in it afterwards."""

import json
import time
from pathlib import Path
from typing import NamedTuple

from mtrain.checkpoint.checkpoint import CHECKPOINT_FILES, checkpoint_folders
from mtrain.config.load import validate
from mtrain.config.schema import Config
from mtrain.storage.atomic import verify_folder
from mtrain.training import loop
from tortures.children import Marks

STEPS = 40
EVERY = 5  # steps between checkpoints


class Outcome(NamedTuple):
    """A row of the table."""

    fault: str
    tries: int
    lost: int  # what should have been there, or the same, was not
    corrupt: int  # damage that was taken for sound
    remark: str = ""


def config_of(run_dir: Path, steps: int = STEPS) -> Config:
    """A small run with what makes resuming hard: dropout, accumulation, averages, sampled segmentation, and a
    single checkpoint kept, so that every save removes the one before it."""
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
            "validate_every": 2 * EVERY,
            "checkpoint_every": EVERY,
            "keep_checkpoints": 1,
            "best_metric": "nll",
            "log_every": 1,
            "ema_decay": 0.9,
            "precision": "fp32",
        },
        "decoding": {"beam_size": 1, "max_length_ratio": 0.5, "max_length_offset": 2, "precision": "fp32"},
    }
    return validate(Config, raw, "torture")


def fit(run_dir: Path, steps: int = STEPS, marks: Marks | None = None) -> None:
    """Train, or go on; `marks` are kept up to date."""
    if marks is not None:
        _mark(marks)
    loop.fit(config_of(run_dir, steps), device="cpu", quiet=True)


def _mark(marks: Marks) -> None:
    real_train, real_save = loop.Trainer.train_on, loop.Trainer._save

    def train_on(self: loop.Trainer, step: object) -> object:
        marks.step, began = self.state.step + 1, time.perf_counter_ns()
        sums = real_train(self, step)  # type: ignore[arg-type]
        marks.new_steps += 1
        marks.train_nanoseconds += time.perf_counter_ns() - began
        return sums

    def save(self: loop.Trainer, last: bool) -> None:
        marks.saving, began = 1, time.perf_counter_ns()
        try:
            real_save(self, last)
        finally:
            marks.saving, marks.saves = 0, marks.saves + 1
            marks.save_nanoseconds += time.perf_counter_ns() - began

    loop.Trainer.train_on, loop.Trainer._save = train_on, save  # type: ignore[assignment, method-assign]


def result_of(run_dir: Path) -> tuple[bytes, list[object]]:
    """The weights and the optimizer of the last checkpoint, the published weights, and every loss."""
    newest = checkpoint_folders(run_dir)[-1]
    files = [*(newest / name for name in sorted(CHECKPOINT_FILES[:2])), run_dir / "model/model.safetensors"]
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    losses = [
        [line["step"], line["epoch"], line["loss"], line["grad_norm"]] for line in lines if "loss" in line
    ]
    return b"".join(file.read_bytes() for file in files), losses


def sound(run_dir: Path) -> int:
    """How many checkpoints of a run are sound; raises ModelError if one that is in its place is not."""
    folders = checkpoint_folders(run_dir)
    for folder in folders:
        verify_folder(folder, CHECKPOINT_FILES)
    return len(folders)
