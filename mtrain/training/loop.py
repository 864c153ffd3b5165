"""The training loop."""

import logging
import time
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from signal import Signals

import torch

from mtrain.checkpoint.checkpoint import TrainState, rename_newer_checkpoints
from mtrain.data.epochs.batch import Batch
from mtrain.data.epochs.batching import batch_order
from mtrain.data.epochs.loader import Loader, Step, Window
from mtrain.data.epochs.position import Position
from mtrain.data.rewriting.throttle import CancelledError, Pace
from mtrain.distributed.ranks import Ranks
from mtrain.duration import format_duration
from mtrain.errors import DataError, DistributedError, Interrupted, StorageError, is_out_of_memory
from mtrain.model.build import AnyModel, build_model
from mtrain.runs.limits import allowed_steps, limit_reached
from mtrain.tokenizer.tokenizer import model_config
from mtrain.training.model_selection import ModelSelection, make_validator
from mtrain.training.rank_zero import Leader
from mtrain.training.records.progress import Progress, log_setup
from mtrain.training.records.resume import ends_at_older_checkpoint, restore
from mtrain.training.records.saver import Saver
from mtrain.training.setup.micro_batch import agree_on_micro_batches, write_limit
from mtrain.training.setup.prepare import PreparedRun
from mtrain.training.signals import StopSignal
from mtrain.training.step.arithmetic import describe_arithmetic, describe_computation, log_changes
from mtrain.training.step.average import WeightAverage
from mtrain.training.step.ddp import SynchronizationMemoryError, make_learner_of_rank
from mtrain.training.step.learner import StepMetrics
from mtrain.training.step.optimizer import freeze
from mtrain.training.step.schedule import learning_rate, r_drop_weight

log = logging.getLogger(__name__)


class Trainer:
    """A training run: the model, the optimizer, the data, and the progress so far."""

    def __init__(self, run: PreparedRun, ranks: Ranks):
        """A new run starts with the weights of `run.initial_model`, if given, else with random weights."""
        config, tokenizer, data = run.config, run.tokenizer, run.data
        checkpoint, initial_model = run.checkpoint, run.initial_model
        self.config, self.recipe, self.tokenizer, self.ranks = config, config.training, tokenizer, ranks
        self.run_dir, self.device, self.checkpoint = Path(config.run_dir), ranks.device, checkpoint
        torch.manual_seed(config.seed)
        architecture = model_config(config.model, tokenizer, config.data.max_length)
        self.model = build_model(architecture).to(self.device).train()
        if initial_model is not None and checkpoint is None:
            self.model.start_from(initial_model.model)
            log.info("initialized from %s (%s)", self.recipe.init_from, initial_model.fingerprint[:12])
        freeze(self.model, self.recipe.freeze)
        ranks.require_equal(describe_computation(self.recipe, self.device))
        self.learner = make_learner_of_rank(self.model, self.recipe, ranks)
        self.average = WeightAverage(self.model, self.recipe)
        self.state = TrainState(
            batch_order=batch_order(config.data),
            window_layout=data.train.layout(),
            data_fingerprint=data.fingerprint,
            tokenizer_fingerprint=tokenizer.fingerprint(),
        )
        with ranks.watched():
            if checkpoint is not None:
                self.state = restore(checkpoint, self.run_dir, self.learner, self.average, ranks)
            micro_batch = agree_on_micro_batches(config, data.train, self.learner, self.state, ranks)
        self.loader = Loader(
            data.train,
            config,
            tokenizer,
            self.device,
            micro_batch,
            workers=len(self.learner.replicas),
            rank=ranks.rank,
            world_size=ranks.size,
        )
        if checkpoint is not None:
            log_changes(self.state, self._arithmetic(), ranks)
        self.state.arithmetic = self._arithmetic()
        self.total_steps = allowed_steps(
            self.recipe, self.state, config.data.stages, self.loader.steps_in_epoch
        )
        self.progress = Progress(
            self.run_dir,
            self.state,
            self.total_steps,
            self.learner.precision,
            ranks.is_first,
            config.model.is_classifier,
        )
        validator = make_validator(run, micro_batch, ranks)
        self.selection = ModelSelection(config, tokenizer, validator, self.state, self.progress)
        self.saver = Saver(
            self.run_dir, self.recipe, self.state, self.learner, self.average, self.progress, self._arithmetic
        )
        if checkpoint is not None:
            self.saver.saved_step = self.state.step
        self.leader = Leader(ranks, self.average, self.selection, self.saver)
        self._unrecorded: Step | None = None  # the last step, until `_record_step`
        self._updates = 0  # of the learner, after the last step that is complete

    def run(self, stop: StopSignal) -> None:
        """Train until a limit is reached, the patience is exhausted, or a signal arrives."""
        self._finish_last_validation()
        if reason := self._limit_reached():
            log.info("already finished: %s; raise the limit to continue training", reason)
            return
        self.leader.lead(self._begin)
        with self._stopping(stop):  # it may take minutes to open the first window
            pace = Pace(cancelled=lambda: stop.received is not None)
            position, window = self.loader.find(self.state.position, pace)
        windows = self.loader.corpus.count_windows(position.starts)
        log_setup(
            self.model,
            self._arithmetic(),
            window,
            windows,
            self.total_steps,
            self.recipe.max_steps,
            stages=len(self.config.data.stages or ()),
        )
        self._log_stage(position)
        try:
            self._dry_run(window)
            self.progress.start()
            with self.progress.bar, closing(self.progress):
                if self.checkpoint is None and self.recipe.init_from is not None:
                    self.leader.lead_validation(self.selection.score_initial_model, last=False)
                self._train(stop)
        except DistributedError as error:
            if isinstance(error, SynchronizationMemoryError):
                write_limit(
                    self.run_dir, self.state.micro_batch_tokens, self.learner.max_micro_batch_positions
                )
            self._save_alone()
            raise
        except (RuntimeError, MemoryError) as error:
            if is_out_of_memory(error):
                self._save_alone()
            raise

    def _dry_run(self, window: Window) -> None:
        """Fail now, not hours later, if memory is short."""
        batches = self.loader.largest(window)
        count = int(self.ranks.all_reduce_max(len(batches))[0])
        for batch in [*batches, *[Batch.without_pairs()] * (count - len(batches))]:
            self.learner.dry_run(batch)
        self.ranks.barrier()

    def _begin(self) -> None:
        self.selection.check_fingerprint()
        if self.checkpoint is not None:
            rename_newer_checkpoints(self.checkpoint)
        self.progress.remove_later_records()

    def _train(self, stop: StopSignal) -> None:
        state, recipe = self.state, self.recipe
        with closing(self.steps(stop)) as steps:
            while True:
                with self._stopping(stop):
                    step = self._load(steps)
                # Ranks may open a window at different times, and the last step of a window is loaded only
                # when the next window is open.
                if state.next_batch == 0 or step.next.step == 0:
                    self.ranks.barrier()
                metrics = self.train_step(step)
                self._unrecorded = step
                self.progress.add_step(metrics, step.locate)
                self._updates = self.learner.updates
                # All decisions of this step use one answer; a signal that arrives later is handled after the
                # next save. The metrics are read afterwards: that waits for the GPU, which would hang if a
                # rank is lost, whereas this exchange notices it.
                stopped = self._agree(stop)
                # Otherwise, a later batch may be compiled for, which takes minutes.
                if not self.learner.compiles:
                    self.ranks.expect_steps()
                reason = self._record_step()
                if state.validation_due or state.step % recipe.checkpoint_every == 0 or stopped:
                    self.leader.save(last=bool(reason or stopped))
                if state.validation_due and not stopped:  # a stopped run validates when it is resumed
                    self.leader.validate(last=reason is not None)
                    reason = reason or self._finish_if_limit_reached()
                    self.average.discard()
                    if self.saver.is_saved:
                        stopped = self._agree(stop)
                self.progress.update_time()

                if reason and not state.validation_due:
                    duration = format_duration(state.seconds)
                    log.info("finished after %d steps, %s: %s", state.step, duration, reason)
                    if self.ranks.is_first:
                        self.selection.review()
                    break
                if stopped:
                    raise self._interrupted(stopped)

    def _record_step(self) -> str | None:
        """Log the step that was taken, and note whether a validation is due. Returns the limit that it has
        reached, if any."""
        state, step = self.state, self._unrecorded
        assert step is not None
        if state.step % self.recipe.log_every == 0:
            self.progress.log_step(step.epoch, self.learning_rate, step.stage)
        reason = self._limit_reached()
        state.validation_due = state.step % self.recipe.validate_every == 0 or reason is not None
        self._unrecorded = None
        return reason

    def _finish_if_limit_reached(self) -> str | None:
        """The limit that a validation has reached, if any. No later step then repeats what has failed: the
        save, the validation, or publishing the best weights. It is repeated now, and must succeed."""
        reason, state = self._limit_reached(), self.state
        if reason is None:
            return None
        if not self.saver.is_saved:
            # Better weights could not become the best ones without a checkpoint, so they are validated again.
            state.validation_due |= state.validations_without_improvement == 0
            self.leader.save(last=True)
        if state.validation_due:
            self.leader.validate(last=True)
        else:
            self.leader.lead(lambda: self.selection.publish(last=True))
        return reason

    @contextmanager
    def _stopping(self, stop: StopSignal) -> Iterator[None]:
        """Raise Interrupted, with the state saved, if a signal ends the wait for data."""
        try:
            yield
        except CancelledError:
            assert stop.received is not None
            self._save_alone()
            raise self._interrupted(stop.received) from None

    def _interrupted(self, signal: Signals) -> Interrupted:
        message = f"stopped by {signal.name} before the first step; run it again"
        if self.state.step:
            saved = f"; saved at step {self.state.step}" if self.saver.is_saved else ""
            message = f"stopped by {signal.name}{saved}; run it again to resume"
        return Interrupted(message, signal)

    def _load(self, steps: Iterator[Step]) -> Step:
        """The next step. If it cannot be loaded, what was learned since the last checkpoint is saved."""
        start = time.perf_counter()
        try:
            return next(steps)
        except (DataError, StorageError):
            self._save_alone()
            raise
        finally:
            self.progress.add_waiting(time.perf_counter() - start)

    def _save_alone(self) -> None:
        """Save the steps that are complete, before this process ends, if it can without the other ranks.
        After an update that has failed, the weights may be those of no step."""
        if self._updates == self.learner.updates and self.saver.can_save_alone(self.ranks):
            if self._unrecorded is not None:  # the resumed run would neither log nor validate it
                self._record_step()
            self.saver.complete_state(Ranks(self.device))
            self.saver.save(last=True)

    def _agree(self, stop: StopSignal) -> Signals | None:
        """The signal that any rank has received. Also agrees on the time of the run, which is that of rank 0.

        This is the second exchange between the hosts in a step. The first one comes before the last backward
        pass, which must not begin if memory has run out on a rank. It could carry the signal, but neither the
        time that the step takes nor a signal during the longest part of the step, which would then be handled
        a step later. Whether numbers are finite needs no exchange: all ranks have the same sums.
        """
        signal, seconds = self.ranks.all_reduce_max(
            stop.received or 0, self.state.seconds if self.ranks.is_first else 0.0
        )
        self.state.seconds = seconds
        return Signals(int(signal)) if signal else None

    def steps(self, stop: StopSignal | None = None) -> Generator[Step, None, None]:
        """Yield the steps that follow the current state, without end. Raises CancelledError if `stop` is
        received while the data of a step is not ready."""
        return self.loader.steps(self.state.position, lambda: stop is not None and stop.received is not None)

    def train_step(self, step: Step) -> StepMetrics:
        """Take one optimizer step and advance the state."""
        state = self.state
        number = state.step + 1
        self.ranks.seed_step(self.config.seed, number)
        rate = learning_rate(number, self.recipe, self.total_steps)
        self.learner.r_drop = r_drop_weight(number, self.recipe)
        with self.ranks.watched():
            metrics = self.learner.step(step.batches, step.tokens, rate)
        state.step = number
        state.target_tokens_seen += step.tokens
        starts = state.stage_starts
        state.move_to(step.next)
        if state.stage_starts != starts:
            state.window_layout = self.loader.corpus.layout(state.stage_starts)
            self._log_stage(step.next)
        self.learner.run_in_worker(lambda: self.average.update(state.step))
        return metrics

    def _log_stage(self, position: Position) -> None:
        if self.loader.corpus.mixer is not None:
            log.info("data: %s", self.loader.corpus.mixer.describe(position.starts))

    @property
    def learning_rate(self) -> float:
        """The learning rate of the current step."""
        return learning_rate(self.state.step, self.recipe, self.total_steps)

    def _limit_reached(self) -> str | None:
        return limit_reached(self.recipe, self.state)

    def _finish_last_validation(self) -> None:
        """Repeat the validation that an interruption cut short, and publish the best weights."""
        if self.checkpoint is None:
            return
        ended = self.ranks.is_first and ends_at_older_checkpoint(self.checkpoint, self.run_dir, self.recipe)
        if self.ranks.broadcast(ended):
            return
        due, last = self.state.validation_due, self._limit_reached() is not None
        self._validate_checkpoint(last)
        if not last and self._limit_reached():  # see `_finish_if_limit_reached`
            self._validate_checkpoint(last=True)
        self.average.discard()
        if due and self._limit_reached() and self.ranks.is_first:
            self.selection.review()

    def _validate_checkpoint(self, last: bool) -> None:
        """Publish the best weights. Validate the weights that training resumes from if a validation is due,
        or if the best weights are lost."""

        def validate(model: AnyModel) -> None:
            self._begin()
            self.progress.start()
            with closing(self.progress):
                self.selection.validate(model, saved=True, last=last)

        def publish() -> None:
            best = self.state.best_step
            self.selection.publish(last)
            self.state.validation_due |= self.state.best_step != best

        self.leader.lead(publish)
        if self.state.validation_due:
            self.leader.lead_validation(validate, last)

    def _arithmetic(self) -> str:
        return describe_arithmetic(self.learner, self.ranks, self.loader.micro_batch_tokens)
