"""What a training run consists of."""

import logging
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path

import torch

from mtrain.checkpoint.checkpoint import Checkpoint, load_checkpoint, restore_validation
from mtrain.checkpoint.state import TrainState
from mtrain.config.sections.training import ENDING_AT_ZERO
from mtrain.data.epochs.batching import Division
from mtrain.data.epochs.loader import Loader, StepInput
from mtrain.data.epochs.windows import Window, WindowPlanner
from mtrain.device import count_unused_gpus, resolve_precision
from mtrain.distributed.ranks import Ranks
from mtrain.interop.formats import describe_exports
from mtrain.model.build import AnyModel, build_model
from mtrain.processes.stop_signals import StopSignal
from mtrain.runs.limits import allowed_steps, limit_reached
from mtrain.tokenizer.tokenizer import model_config
from mtrain.training.clock import Clock
from mtrain.training.model_selection import ModelSelection
from mtrain.training.records.progress import Progress
from mtrain.training.records.saver import Saver, saves_in_background
from mtrain.training.setup.micro_batch import agree_on_micro_batches
from mtrain.training.setup.prepare_run import PreparedRun
from mtrain.training.step.arithmetic import describe_arithmetic
from mtrain.training.step.average import WeightAverage
from mtrain.training.step.learning_rate import learning_rate
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
        # Each rank resolves it on its own. Gradients can only be added up if all have the same.
        ranks.require_equal({"the precision": resolve_precision(ranks.device, training.precision)})
        self.learner = make_learner(self.model, training, ranks)
        self.average = WeightAverage(self.model, training)
        with ranks.watched():
            state = self._restore(run.checkpoint) if run.checkpoint else run.with_inputs(TrainState())
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
        self.allowed_steps = allowed_steps(
            training, stages, length, self.planner.steps_in_epoch, state.data_since
        )
        self.clock: Clock | None = None
        if training.planned_steps is None:
            self.state.plan = None  # of an earlier clock, which knows nothing of the steps from now on
        else:
            self.clock = Clock(self.run_dir, training, self.state, ranks, self.allowed_steps)
        precision = self.learner.precision
        self.progress = Progress(config, self.state, self.total_steps, precision, ranks.is_first)
        self.selection = ModelSelection(run, self.state, self.progress, self.average, ranks)
        background = ranks.broadcast(saves_in_background(self.learner))  # hosts may have different memory
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

    @property
    def total_steps(self) -> int | None:
        """The number of steps that the limits allow or, with `max_minutes`, that are planned."""
        return self.allowed_steps if self.clock is None else self.clock.plans[-1].total_steps

    def rate(self, step: int) -> float:
        """The learning rate of an optimizer step, counted from 1."""
        training = self.config.training
        return learning_rate(self.scheduled(step), training, training.planned_steps or self.total_steps)

    def scheduled(self, step: int) -> float:
        """The position of an optimizer step in the planned steps. A schedule that ends at zero follows the
        plan of the clock; others depend on the step alone."""
        if self.clock is None or self.config.training.schedule not in ENDING_AT_ZERO:
            return step
        return self.clock.plans[-1].scheduled_at(step) * self.clock.planned_steps

    @property
    def arithmetic(self) -> str:
        """What determines the exact results of a step."""
        return describe_arithmetic(self.learner, self.ranks, self.state.micro_batch_tokens)

    def log_setup(self, window: Window, windows: int) -> None:
        """Log what is trained, and how long. `window` is the first of the `windows` of an epoch."""
        parameters = sum(p.numel() for p in self.model.parameters())
        frozen = sum(p.numel() for p in self.model.parameters() if not p.requires_grad)
        architecture = self.model.config
        log.info("device: %s", self.arithmetic)
        if self.ranks.size == 1 and (unused := count_unused_gpus(self.ranks.device)):
            command = f"torchrun --nproc-per-node {unused + 1} -m mtrain fit CONFIG"
            log.info("%d more GPUs of this machine are not used; to use all, run `%s`", unused, command)
        sizes = f"{parameters / 1e6:.2f} million parameters ({frozen / 1e6:.2f} frozen)"
        log.info("model: %s, vocabulary size %d", sizes, architecture.target_vocab_size)
        if not architecture.is_classifier:
            level = logging.INFO if self.config.export.require else logging.DEBUG
            log.log(level, "exports: %s", describe_exports(self.config, self.loader.tokenizer))
        steps = f"{window.steps_in_epoch} steps"
        if windows > 1:
            steps = f"about {steps} in {windows} windows"
        training = self.config.training
        frozen_until = 0 if "encoder" in training.freeze else training.encoder_after or 0
        if self.scheduled(self.state.step) < frozen_until:
            about = "about " * (self.clock is not None)
            log.info("encoder: frozen for %sthe first %d steps", about, frozen_until)
        padding = (100 * share for share in window.plan.padding)
        log.info("epoch: %s; padding: %.1f%% source, %.1f%% target, %.1f%% both", steps, *padding)
        total, stages = self.total_steps, len(self.config.data.stages or ())
        if total is not None:
            is_estimate = (windows > 1 or stages > 1) and total != self.config.training.max_steps
            planned = f"{'about ' * (is_estimate or self.clock is not None)}{total} steps"
            if stages <= 1:  # their epochs differ
                planned += f", {total / window.steps_in_epoch:.1f} epochs"
            log.info("planned: %s", planned)
            message = "training.%s (%d) is not reached in the planned %d steps"
            if training.r_drop and training.r_drop_after >= total:
                log.warning(message, "r_drop_after", training.r_drop_after, total)
            of_schedule = (training.planned_steps if self.clock is not None else None) or total
            if frozen_until >= of_schedule:
                log.warning(message, "encoder_after", frozen_until, of_schedule)


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
