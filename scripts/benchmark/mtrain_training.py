"""Measures mtrain's own training steps."""

from pathlib import Path
from typing import Any

from benchmark.job import TrainingJob, answer_with
from benchmark.meter import Meter
from mtrain.config.load import load_config
from mtrain.data.epochs.loader import largest_batches
from mtrain.data.epochs.schedule import Position
from mtrain.training.fit import make_trainer
from mtrain.training.loop import train_step
from mtrain.training.trainer import Trainer


def open_trainer(job: TrainingJob) -> Trainer:
    """A trainer of the prepared run, ready for its first step."""
    trainer = make_trainer(load_config(Path(job.run_dir) / "config.yaml"), device=job.device)
    if trainer.ranks.device.type == "cuda":  # as `fit` does; compilation takes longer than the warm-up
        for batch in largest_batches(trainer.loader, trainer.planner.open(Position())):
            trainer.learner.dry_run(batch)
    return trainer


def measure(job: TrainingJob) -> dict[str, Any]:
    """Train for the time span of the job."""
    trainer = open_trainer(job)
    meter = Meter(job.device, job.warmup, job.seconds)
    for step in trainer.steps():
        train_step(trainer, step)
        if meter.step(step.tokens, sum(batch.labels.numel() for batch in step.batches)):
            break
    return meter.result()


if __name__ == "__main__":
    answer_with(measure)
