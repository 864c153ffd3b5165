"""The training loop."""

import logging
import math
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Self

import torch

from mtrain.checkpoint.checkpoint import (
    Checkpoint,
    TrainState,
    checkpoint_folders,
    load_checkpoint,
    record_validation,
    rename_newer_checkpoints,
    restore_validation,
    save_checkpoint,
)
from mtrain.checkpoint.model_folder import LoadedModel, publish_best
from mtrain.config.schema import Config
from mtrain.data.batching import BATCH_ORDER
from mtrain.data.encode import PreparedData
from mtrain.data.loader import Loader, Step
from mtrain.device import default_worker_count, describe_numerics, should_compile
from mtrain.errors import DivergedError, Interrupted, ModelError, MtrainError, StorageError, is_out_of_memory
from mtrain.interop.formats import describe_exports
from mtrain.model.transformer import Transformer
from mtrain.tokenizer.tokenizer import Tokenizer, model_config
from mtrain.training.average import WeightAverage
from mtrain.training.micro_batch import available_memory, choose_micro_batch_tokens
from mtrain.training.progress import Progress
from mtrain.training.resolve_config import freeze
from mtrain.training.schedule import learning_rate
from mtrain.training.step import Learner, StepMetrics
from mtrain.training.validate import Validator

log = logging.getLogger(__name__)

FAILED_SAVES = 3  # in a row, each tried twice; continuing would only lose more work
FAILED_VALIDATIONS = 3  # in a row


class StopSignal:
    """Records SIGINT or SIGTERM, so that the loop stops after the current step; a second one acts at once."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None

    def __enter__(self) -> Self:
        self.previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        for number in self.previous:
            signal.signal(number, self._record)
        return self

    def _record(self, number: int, _: FrameType | None) -> None:
        self.received = signal.Signals(number)
        self._restore()

    def _restore(self, *_: object) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    __exit__ = _restore


class Trainer:
    """A training run: the model, the optimizer, the data, and the progress so far."""

    def __init__(
        self,
        config: Config,
        tokenizer: Tokenizer,
        data: PreparedData,
        device: torch.device,
        checkpoint: Checkpoint | None,
        quiet: bool,
        start: LoadedModel | None,
    ):
        self.config, self.recipe, self.tokenizer = config, config.training, tokenizer
        self.run_dir, self.device, self.checkpoint = Path(config.run_dir), device, checkpoint
        torch.manual_seed(config.seed)
        network = model_config(config.model, tokenizer, config.data.max_length)
        self.model = Transformer(network).to(device).train()
        if start is not None and checkpoint is None:
            self.model.load_state_dict(start.model.state_dict())
            log.info("initialized from %s (%s)", self.recipe.init_from, start.fingerprint[:12])
        freeze(self.model, self.recipe.freeze)
        # torch.compile is not safe in several threads at once.
        workers = 1 if should_compile(device, self.recipe.compile) else default_worker_count(device)
        self.learner = Learner(self.model, self.recipe, workers)
        self.average = WeightAverage(self.model, self.recipe)
        self.state = TrainState(
            batch_order=BATCH_ORDER,
            data_fingerprint=data.fingerprint,
            tokenizer_fingerprint=tokenizer.fingerprint(),
        )
        if checkpoint is not None:
            self._restore(checkpoint)
        micro_batch_tokens = self._micro_batch_tokens(data)
        self.loader = Loader(data.train, config, tokenizer.special, device, micro_batch_tokens, workers)
        self.validator = Validator(data.validation, config, tokenizer, device, micro_batch_tokens)
        self._compare_arithmetic()
        self.saved_step = -1
        self.failed_saves = self.failed_validations = 0
        self.total_steps = self._planned_steps()
        self.progress = Progress(self.run_dir, self.state, self.total_steps, self.learner.precision, quiet)

    def _restore(self, checkpoint: Checkpoint) -> None:
        self.state = checkpoint.state
        load_checkpoint(checkpoint, self.model, self.learner.optimizer)
        self.average.load(checkpoint.folder)
        self.learner.scale.restore(self.state.loss_scale)
        restore_validation(self.run_dir, self.state)
        log.info("resuming from %s", checkpoint.folder)

    def run(self, stop: StopSignal) -> None:
        """Train until a limit is reached, the patience is exhausted, or a signal arrives."""
        if self.checkpoint is not None:
            self._finish_validation(self.checkpoint)
        if reason := self._limit_reached():
            log.info("already finished: %s; raise the limit to continue training", reason)
            return
        self._compare_validation()
        if self.checkpoint is not None:
            rename_newer_checkpoints(self.checkpoint)
        self._log_setup()
        for batch in self.loader.largest(self.state.epoch):  # out of memory now rather than hours later
            self.learner.dry_run(batch)
        self.progress.begin()
        with self.progress.bar:
            self._train(stop)

    def _train(self, stop: StopSignal) -> None:
        state, recipe = self.state, self.recipe
        for step in self.steps():
            sums = self.train_step(step)
            self.progress.add(sums, [row for batch in step.batches for row in batch.rows])
            if state.step % recipe.log_every == 0:
                self.progress.log_step(step.epoch, self.learning_rate)

            reason = self._limit_reached()
            stopped = stop.received  # read before saving: a later signal waits for the next save
            state.validation_due = state.step % recipe.validate_every == 0 or reason is not None
            if state.validation_due or state.step % recipe.checkpoint_every == 0 or stopped:
                self.save(last=bool(reason or stopped))
            if state.validation_due and not stopped:  # after a stop, resuming validates first
                self.validate(last=reason is not None)
                reason = reason or self._limit_reached()  # patience
                if self.saved_step == state.step:
                    stopped = stop.received
            self.progress.tick()

            if reason and not state.validation_due:
                log.info("finished after %d steps, %.1f minutes: %s", state.step, state.seconds / 60, reason)
                break
            if stopped:
                message = f"stopped by {stopped.name}; saved at step {state.step}; run it again to resume"
                raise Interrupted(message, stopped)

    def steps(self) -> Iterator[Step]:
        """The steps to come, endlessly."""
        return self.loader.steps(self.state.epoch, self.state.next_batch)

    def train_step(self, step: Step) -> StepMetrics:
        """Take one optimizer step and advance the state."""
        state = self.state
        state.step += 1
        state.target_tokens_seen += step.tokens
        state.epoch, state.next_batch = step.position
        sums = self.learner.step(step.batches, step.tokens, self.learning_rate)
        self.learner.run_in_worker(lambda: self.average.update(state.step))
        return sums

    @property
    def learning_rate(self) -> float:
        """The learning rate of the current step."""
        return learning_rate(self.state.step, self.recipe, self.total_steps)

    def _limit_reached(self) -> str | None:
        state, recipe = self.state, self.recipe
        if recipe.max_steps is not None and state.step >= recipe.max_steps:
            return f"max_steps ({recipe.max_steps})"
        if recipe.max_epochs is not None and state.epoch >= recipe.max_epochs:
            return f"max_epochs ({recipe.max_epochs})"
        if recipe.max_minutes is not None and state.seconds >= recipe.max_minutes * 60:
            return f"max_minutes ({recipe.max_minutes:g})"
        if recipe.patience is not None and state.validations_without_improvement >= recipe.patience:
            return f"no better {recipe.best_metric} in {recipe.patience} validations"
        return None

    # ------------------------------------------------------------------------------------------ validation

    def validate(self, last: bool = False) -> None:
        """Validate the saved weights and publish the best ones.

        A failure does not end training: it is logged, and the next validation tries again. The `last`
        validation is repeated instead. Raises the error after FAILED_VALIDATIONS failures in a row.
        """
        while True:
            try:
                if self.state.validation_due:
                    self._score()
                publish_best(self.run_dir, self.state, self.config, self.tokenizer)
            except (MtrainError, RuntimeError, MemoryError) as error:
                if not isinstance(error, MtrainError) and not is_out_of_memory(error):
                    raise
                self.failed_validations += 1
                if self.failed_validations >= FAILED_VALIDATIONS:
                    if isinstance(error, ModelError):  # the outputs are not finite
                        count = self.failed_validations
                        raise DivergedError(f"{count} validations in a row failed: {error}") from None
                    raise
                log.warning("step %d: validation failed: %s", self.state.step, error)
                if self.device.type == "cuda":
                    torch.cuda.empty_cache()
            else:
                self.failed_validations = 0
                return
            if not last:
                return

    def _score(self) -> None:
        """Score the weights, and record the outcome in the state and on disk."""
        state, metric = self.state, self.recipe.best_metric
        saved = self.saved_step == state.step  # weights that could not be saved are not the best
        with self.average.applied():
            scores = self.validator(self.model)
            score = -scores.nll if metric == "nll" else getattr(scores, metric)
            improved = math.isfinite(score) and (state.best_score is None or score > state.best_score)
            layer = self.validator.alignment_layer(self.model) if improved and saved else None
        before = replace(state)
        state.validations_without_improvement = 0 if improved else state.validations_without_improvement + 1
        if improved and saved:
            state.best_step, state.best_score, state.best_alignment_layer = state.step, score, layer
        state.validation_due = False
        self.progress.tick()
        if saved:
            try:
                record_validation(self.run_dir, state)
            except StorageError:
                state.best_step, state.best_score = before.best_step, before.best_score
                state.best_alignment_layer = before.best_alignment_layer
                state.validations_without_improvement = before.validations_without_improvement
                state.validation_due = True
                raise
        self.progress.log_validation(scores, improved and saved)

    def _finish_validation(self, checkpoint: Checkpoint) -> None:
        """Validate and publish what a run was stopped or killed before."""
        newest = checkpoint_folders(self.run_dir)[-1:] == [checkpoint.folder]
        if not newest and self._limit_reached():  # finished: nothing changes
            return
        if self.state.validation_due:
            self._compare_validation()
            rename_newer_checkpoints(checkpoint)
            self.saved_step = self.state.step
            self.progress.begin()
            self.validate(last=self._limit_reached() is not None)
        else:
            self.validate()

    def _compare_validation(self) -> None:
        """Discard the best score if the validation pairs or the search have changed since."""
        state, fingerprint = self.state, self.validator.fingerprint()
        if state.best_score is not None and state.validation_fingerprint != fingerprint:
            log.warning("the validation pairs or the search have changed; the best score is discarded")
            state.best_step = state.best_score = state.best_alignment_layer = None
            state.validations_without_improvement = 0
        state.validation_fingerprint = fingerprint

    # ---------------------------------------------------------------------------------------------- saving

    def save(self, last: bool) -> None:
        """Save a checkpoint. A failed save is repeated at once, then at the next checkpoint.

        Raises StorageError if this is the `last` save or FAILED_SAVES in a row have failed.
        """
        self.progress.read()
        if self.state.validation_due:
            self.average.average_checkpoints(self.run_dir)
        self.state.loss_scale, self.state.arithmetic = self.learner.scale.state(), self._arithmetic()
        try:
            try:
                self._write_checkpoint()
            except StorageError as error:
                log.warning("%s; trying again", error)
                self._write_checkpoint()
        except StorageError as error:
            self.failed_saves += 1
            if last or self.failed_saves == FAILED_SAVES:
                raise
            log.warning("%s; training continues and saves at the next checkpoint", error)
        else:
            self.failed_saves = 0
            self.saved_step = self.state.step

    def _write_checkpoint(self) -> None:
        kept = (self.recipe.keep_checkpoints, self.recipe.checkpoint_every)
        optimizer, average = self.learner.optimizer, self.average.weights
        save_checkpoint(self.run_dir, self.model, optimizer, self.state, *kept, average)

    # ---------------------------------------------------------------------------------------------- set-up

    def _planned_steps(self) -> int | None:
        """Number of steps that max_steps and max_epochs allow; None if only the time is limited."""
        state, recipe = self.state, self.recipe
        limits = [] if recipe.max_steps is None else [recipe.max_steps]
        if recipe.max_epochs is not None:
            if state.steps_in_first_epoch is None:
                state.steps_in_first_epoch = len(self.loader.plan(0).steps)
            limits.append(recipe.max_epochs * state.steps_in_first_epoch)
        return min(limits, default=None)

    def _micro_batch_tokens(self, data: PreparedData) -> int:
        """Padded tokens of a micro-batch: as configured, or as many as fit in memory."""
        if self.recipe.micro_batch_tokens != "auto":
            return self.recipe.micro_batch_limit
        longest = max(int(data.train.source_lengths.max()), int(data.train.target_lengths.max()))
        if self.config.data.subword_sampling is not None:
            longest = self.config.data.max_length  # another segmentation may be as long
        return choose_micro_batch_tokens(
            self.learner, longest, self.recipe.micro_batch_limit, available_memory(self.device)
        )

    def _arithmetic(self) -> str:
        """Everything that determines the last bits of a step and is not in a checkpoint."""
        learner, compiled = self.learner, should_compile(self.device, self.recipe.compile)
        machine = describe_numerics(self.device, learner.precision, compiled, len(learner.replicas))
        limit = learner.max_micro_batch_positions
        reduced = "" if limit == math.inf else f", reduced to {limit:g} positions"
        return f"{machine}, micro-batches of {self.loader.micro_batch_tokens} tokens{reduced}"

    def _compare_arithmetic(self) -> None:
        """Log whether the resumed run is bit-identical to an uninterrupted one."""
        arithmetic = self._arithmetic()
        if self.checkpoint is not None and self.state.arithmetic != arithmetic:
            message = "resuming, but not bit-identically: %s; before: %s"
            log.warning(message, arithmetic, self.state.arithmetic)
        elif self.checkpoint is not None and self.device.type == "cuda":
            log.info("resuming, but not bit-identically: the order of GPU operations varies")
        self.state.arithmetic = arithmetic

    def _log_setup(self) -> None:
        parameters = sum(p.numel() for p in self.model.parameters())
        frozen = sum(p.numel() for p in self.model.parameters() if not p.requires_grad)
        plan = self.loader.plan(self.state.epoch)
        log.info("device: %s", self._arithmetic())
        sizes = (parameters / 1e6, frozen / 1e6, self.tokenizer.target_vocab_size)
        log.info("model: %.2f million parameters (%.2f frozen), vocabulary size %d", *sizes)
        log.info("exports: %s", describe_exports(self.model.config))
        padding = (100 * share for share in plan.padding)
        message = "epoch: %d steps; padding: %.1f%% source, %.1f%% target, %.1f%% both"
        log.info(message, len(plan.steps), *padding)
        if self.total_steps is not None:
            log.info("planned: %d steps, %.1f epochs", self.total_steps, self.total_steps / len(plan.steps))
