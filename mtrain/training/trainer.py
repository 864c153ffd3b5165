"""What a training run consists of."""

import logging
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path

import torch

from mtrain.checkpoint.checkpoint import Checkpoint, load_checkpoint, restore_validation
from mtrain.checkpoint.state import TrainState
from mtrain.data.epochs.batching import Division, batch_order
from mtrain.data.epochs.loader import Loader, StepInput
from mtrain.data.epochs.windows import WindowPlanner
from mtrain.distributed.ranks import Ranks
from mtrain.model.build import AnyModel, build_model
from mtrain.runs.limits import allowed_steps, limit_reached
from mtrain.tokenizer.tokenizer import model_config
from mtrain.training.model_selection import ModelSelection
from mtrain.training.records.progress import Progress
from mtrain.training.records.saver import Saver, saves_in_background
from mtrain.training.setup.micro_batch import agree_on_micro_batches
from mtrain.training.setup.prepare_run import PreparedRun
from mtrain.training.signals import StopSignal
from mtrain.training.step.arithmetic import describe_computation
from mtrain.training.step.average import WeightAverage
from mtrain.training.step.make_learner import make_learner
from mtrain.training.step.optimizer import freeze

log = logging.getLogger(__name__)


class Trainer:
    """A training run: the model, the optimizer, the data, and the progress so far."""

    def __init__(self, run: PreparedRun, ranks: Ranks):
        """A new run starts with the weights of `run.initial_model`, if given, else with random weights. A run
        that has a checkpoint resumes from it."""
        config, training = run.config, run.config.training
        self.config, self.corpus = config, run.data.train
        self.run_dir, self.ranks = Path(config.run_dir), ranks
        self.checkpoint = run.checkpoint and run.checkpoint.folder  # to resume from
        self.model = _make_model(run, ranks.device)
        ranks.require_equal(describe_computation(training, ranks.device))
        self.learner = make_learner(self.model, training, ranks)
        self.average = WeightAverage(self.model, training)
        with ranks.watched():
            state = self._restore(run.checkpoint) if run.checkpoint else _initial_state(run)
            micro_batch = agree_on_micro_batches(config, self.corpus, self.learner, state, ranks)
        if state.micro_batch_tokens == micro_batch:
            self.learner.restore_shapes(state.fixed_shapes)
        division = Division(micro_batch, len(self.learner.replicas), ranks.rank, ranks.size)
        self.planner = WindowPlanner(self.corpus, config, division)
        self.loader = Loader(self.planner, run.tokenizer, ranks.device, self.learner.layout_for)
        # The state keeps the steps of the first epoch, so that a resumed run has the same learning rates.
        length, stages = state.steps_in_first_epoch, config.data.stages
        if length is None and training.max_epochs is not None and stages is None:
            length = self.planner.steps_in_epoch(0)
        self.state = replace(state, micro_batch_tokens=micro_batch, steps_in_first_epoch=length)
        self.total_steps = allowed_steps(training, stages, length, self.planner.steps_in_epoch)
        precision, classifies = self.learner.precision, config.model.is_classifier
        self.progress = Progress(
            self.run_dir, self.state, self.total_steps, precision, ranks.is_first, classifies
        )
        self.selection = ModelSelection(run, self.state, self.progress, self.average, ranks)
        background = saves_in_background(self.learner)
        self.saver = Saver(config, self.state, self.learner, self.average, self.progress, ranks, background)
        if run.checkpoint:
            self.saver.saved_step = self.state.step
        self.unrecorded: StepInput | None = None  # the last step, until it is logged
        self.updates = 0  # of the learner, after the last step that is complete

    def _restore(self, checkpoint: Checkpoint) -> TrainState:
        """Restore the model, the optimizer, the averaged weights and the random generators. Returns the state
        of training. Raises ModelError if the tensors do not fit the model."""
        load_checkpoint(checkpoint, self.model, self.learner.optimizer)
        self.average.load(checkpoint.folder)
        self.learner.loss_scaler.restore(checkpoint.state.loss_scale)
        # Rank 0 restores the state for all, because the file systems of the ranks may differ.
        state = self.ranks.broadcast(restore_validation(self.run_dir, checkpoint.state).to_json())
        log.info("resuming from %s", checkpoint.folder)
        return TrainState.from_json(state)

    def steps(self, stop: StopSignal | None = None) -> Generator[StepInput, None, None]:
        """Yield the steps that follow the current state, without end. Raises CancelledError if `stop` is
        received while the data of a step is not ready."""
        return self.loader.steps(self.state.position, lambda: stop is not None and stop.received is not None)

    def limit_reached(self) -> str | None:
        """The limit at which training ends, if it is reached."""
        return limit_reached(self.config.training, self.state)


def _initial_state(run: PreparedRun) -> TrainState:
    return TrainState(
        batch_order=batch_order(run.config.data),
        window_layout=run.data.train.layout(),
        data_fingerprint=run.data.fingerprint,
        tokenizer_fingerprint=run.tokenizer.fingerprint(),
    )


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
