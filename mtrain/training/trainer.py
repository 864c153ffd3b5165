"""What a training run consists of."""

import logging
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path

import torch

from mtrain.checkpoint.state import TrainState
from mtrain.data.epochs.batching import batch_order
from mtrain.data.epochs.loader import Loader, Step
from mtrain.distributed.ranks import Ranks
from mtrain.model.build import AnyModel, build_model
from mtrain.runs.limits import allowed_steps, limit_reached
from mtrain.tokenizer.tokenizer import model_config
from mtrain.training.model_selection import ModelSelection, make_validator
from mtrain.training.records.progress import Progress
from mtrain.training.records.resume import restore
from mtrain.training.records.saver import Saver
from mtrain.training.setup.memory_limit import agree_on_micro_batches
from mtrain.training.setup.prepare import PreparedRun
from mtrain.training.signals import StopSignal
from mtrain.training.step.arithmetic import describe_arithmetic, describe_computation, log_changes
from mtrain.training.step.average import WeightAverage
from mtrain.training.step.learners import make_learner_of_rank
from mtrain.training.step.optimizer import freeze
from mtrain.training.step.schedule import learning_rate

log = logging.getLogger(__name__)


class Trainer:
    """A training run: the model, the optimizer, the data, and the progress so far."""

    def __init__(self, run: PreparedRun, ranks: Ranks):
        """A new run starts with the weights of `run.initial_model`, if given, else with random weights."""
        config, data = run.config, run.data
        self.config = config
        self.training = config.training
        self.tokenizer = run.tokenizer
        self.run_dir = Path(config.run_dir)
        self.ranks = ranks
        self.checkpoint = run.checkpoint and run.checkpoint.folder  # to resume from
        self.model = _make_model(run, ranks.device)
        ranks.require_equal(describe_computation(self.training, ranks.device))
        self.learner = make_learner_of_rank(self.model, self.training, ranks)
        self.average = WeightAverage(self.model, self.training)
        self.state = TrainState(
            batch_order=batch_order(config.data),
            window_layout=data.train.layout(),
            data_fingerprint=data.fingerprint,
            tokenizer_fingerprint=run.tokenizer.fingerprint(),
        )
        with ranks.watched():
            if run.checkpoint is not None:
                self.state = restore(run.checkpoint, self.run_dir, self.learner, self.average, ranks)
            micro_batch = agree_on_micro_batches(config, data.train, self.learner, self.state, ranks)
        self.loader = Loader(
            data.train,
            config,
            run.tokenizer,
            ranks.device,
            micro_batch,
            workers=len(self.learner.replicas),
            rank=ranks.rank,
            world_size=ranks.size,
        )
        self.arithmetic = describe_arithmetic(self.learner, ranks, micro_batch)
        if run.checkpoint is not None:
            log_changes(self.state, self.arithmetic, ranks)
        self.state = replace(
            self.state, micro_batch_tokens=micro_batch, steps_in_first_epoch=self._steps_in_first_epoch()
        )
        self.total_steps = allowed_steps(
            self.training, config.data.stages, self.state.steps_in_first_epoch, self.loader.steps_in_epoch
        )
        self.progress = Progress(
            self.run_dir,
            self.state,
            self.total_steps,
            self.learner.precision,
            ranks.is_first,
            config.model.is_classifier,
        )
        self.selection = ModelSelection(
            config,
            run.tokenizer,
            make_validator(run, micro_batch, ranks),
            self.state,
            self.progress,
            self.average,
            ranks,
        )
        self.saver = Saver(
            self.run_dir, self.training, self.state, self.learner, self.average, self.progress, ranks
        )
        if run.checkpoint is not None:
            self.saver.saved_step = self.state.step
        self.unrecorded: Step | None = None  # the last step, until it is logged
        self.updates = 0  # of the learner, after the last step that is complete

    def _steps_in_first_epoch(self) -> int | None:
        """The steps of the first epoch, if max_epochs needs it. The state keeps it, so that a resumed run has
        the same learning rates."""
        known = self.state.steps_in_first_epoch
        if known is None and self.training.max_epochs is not None and self.config.data.stages is None:
            return self.loader.steps_in_epoch(0)
        return known

    def steps(self, stop: StopSignal | None = None) -> Generator[Step, None, None]:
        """Yield the steps that follow the current state, without end. Raises CancelledError if `stop` is
        received while the data of a step is not ready."""
        return self.loader.steps(self.state.position, lambda: stop is not None and stop.received is not None)

    @property
    def learning_rate(self) -> float:
        """The learning rate of the current step."""
        return learning_rate(self.state.step, self.training, self.total_steps)

    def limit_reached(self) -> str | None:
        return limit_reached(self.training, self.state)


def _make_model(run: PreparedRun, device: torch.device) -> AnyModel:
    """The model of a run with its initial weights, on a device."""
    torch.manual_seed(run.config.seed)
    architecture = model_config(run.config.model, run.tokenizer, run.config.data.max_length)
    model = build_model(architecture).to(device).train()
    training, initial = run.config.training, run.initial_model
    if initial is not None and run.checkpoint is None:
        model.start_from(initial.model)
        log.info("initialized from %s (%s)", training.init_from, initial.fingerprint[:12])
    freeze(model, training.freeze)
    return model
