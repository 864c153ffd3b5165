"""JoeyNMT's training manager with its own token batches.

Its text consists of mtrain's token ids as digits, so that it trains on the same tokens. JoeyNMT does not
support bf16 on a CPU; there its autocast context is replaced.
"""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from joeynmt.batch import Batch
from joeynmt.config import parse_global_args, set_validation_args
from joeynmt.prediction import prepare
from joeynmt.training import TrainManager

from benchmark.job import TrainingJob, answer_with
from benchmark.meter import Meter
from benchmark.peers.batches import Streams

NEVER = 10**9  # steps
SPECIAL = {"unk": "<unk>", "pad": "<pad>", "bos": "<s>", "eos": "</s>"}  # in the order of JoeyNMT's ids


class MeasuredManager(TrainManager):  # type: ignore[misc]
    """A training manager that stops when the measured span is over and saves nothing."""

    meter: Meter
    tokens = positions = micro_batches = 0

    def _train_step(self, batch: Batch) -> tuple[float, int]:
        # A step ends after this method, so the previous step is counted when the next one begins.
        if self.micro_batches == self.args.batch_multiplier:
            self.stats.is_max_update = self.meter.step(self.tokens, self.positions)
            self.tokens = self.positions = self.micro_batches = 0
        self.tokens += int(batch.ntokens)
        self.positions += batch.trg.numel()
        self.micro_batches += 1
        return super()._train_step(batch)  # type: ignore[no-any-return]

    def _save_checkpoint(self, new_best: bool, score: float) -> None:
        pass


def measure(job: TrainingJob) -> dict[str, Any]:
    """Train for the time span of the job."""
    with TemporaryDirectory(prefix="mtrain-bench-") as folder:
        _write_corpus(job, Path(folder))
        arguments = parse_global_args(_config(job, Path(folder)), rank=0, mode="train")
        mixed = {
            "device_type": torch.device(job.device).type,
            "dtype": torch.bfloat16,
            "enabled": job.precision == "bf16",
        }
        arguments = arguments._replace(
            device=torch.device(job.device), n_gpu=int(job.device != "cpu"), autocast=mixed
        )
        model, training, validation, _ = prepare(arguments, rank=0, mode="train")
        manager = MeasuredManager(
            rank=0,
            model=model,
            model_dir=arguments.model_dir,
            device=arguments.device,
            n_gpu=arguments.n_gpu,
            num_workers=arguments.num_workers,
            autocast=arguments.autocast,
            seed=arguments.seed,
            train_args=arguments.train,
            dev_args=set_validation_args(arguments.test),
        )
        manager.meter = Meter(job.device, job.warmup, job.seconds)
        manager.train_and_validate(training, validation)
    return manager.meter.result()


def _write_corpus(job: TrainingJob, folder: Path) -> None:
    """Write the pairs of an epoch, the vocabularies, and one pair for a validation that never happens."""
    streams = Streams(job.streams, job.model)
    special = {job.model[f"{name}_id"] for name in SPECIAL}
    for name, side in (("source", streams.source), ("target", streams.target)):
        lines = [" ".join(map(str, side[row][:-1])) + "\n" for row in streams.rows]  # JoeyNMT adds EOS
        (folder / f"train.{name}").write_text("".join(lines))
        (folder / f"validation.{name}").write_text(lines[0])
        pieces = (str(i) for i in range(job.model[f"{name}_vocab_size"]) if i not in special)
        (folder / f"{name}.vocab").write_text("\n".join(pieces) + "\n")


def _config(job: TrainingJob, folder: Path) -> dict[str, Any]:
    return {
        "name": "bench",
        "model_dir": str(folder),
        "use_cuda": job.device != "cpu",
        "random_seed": job.seed,
        "data": {
            "dataset_type": "plain",
            "train": str(folder / "train"),
            "dev": str(folder / "validation"),
            "src": _side("source", folder),
            "trg": _side("target", folder),
            "special_symbols": {f"{name}_token": token for name, token in SPECIAL.items()},
        },
        "testing": {},
        "training": _training(job.training),
        "model": model_section(job.model),
    }


def _side(name: str, folder: Path) -> dict[str, Any]:
    return {"lang": name, "level": "word", "voc_file": str(folder / f"{name}.vocab"), "max_length": -1}


def _training(recipe: dict[str, Any]) -> dict[str, Any]:
    return {
        "optimizer": "adam",
        "adam_betas": recipe["betas"],
        "scheduling": "noam",
        "learning_rate_warmup": 4000,
        "learning_rate_min": 0.0,
        "clip_grad_norm": 1.0,
        "label_smoothing": recipe["label_smoothing"],
        "batch_type": "token",
        "batch_size": recipe["micro_batch_tokens"],
        "batch_multiplier": max(1, recipe["batch_tokens"] // recipe["micro_batch_tokens"]),
        "normalization": "tokens",
        "epochs": NEVER,
        "validation_freq": NEVER,
    }


def model_section(model: dict[str, Any]) -> dict[str, Any]:
    """The sizes of mtrain's model."""

    def half(layers: int) -> dict[str, Any]:
        return {
            "type": "transformer",
            "num_layers": layers,
            "num_heads": model["heads"],
            "embeddings": {"embedding_dim": model["d_model"], "scale": True},
            "hidden_size": model["d_model"],
            "ff_size": model["ffn_dim"],
            "dropout": model["dropout"],
            "layer_norm": model["norm"],
        }

    return {
        "initializer": "xavier_uniform",
        "embed_initializer": "xavier_uniform",
        "tied_embeddings": model["tie_embeddings"] == "all",
        "tied_softmax": model["tie_embeddings"] != "none",
        "encoder": half(model["encoder_layers"]),
        "decoder": half(model["decoder_layers"]),
    }


if __name__ == "__main__":
    answer_with(measure)
