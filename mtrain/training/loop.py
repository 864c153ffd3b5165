"""The training loop.

If there are several ranks, all of them run these functions together. The functions that are called decide
what only rank 0 does, such as writing files.
"""

import logging
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError
from contextlib import closing, contextmanager
from signal import Signals

import torch

from mtrain.checkpoint.checkpoint import checkpoint_folders, rename_newer_checkpoints
from mtrain.checkpoint.state import NO_HEAD
from mtrain.data.epochs.loader import StepInput, largest_batches, layouts_of
from mtrain.data.epochs.packed_batch import batch_type
from mtrain.data.epochs.schedule import Position
from mtrain.data.epochs.windows import Window
from mtrain.duration import format_duration
from mtrain.errors import DataError, DistributedError, Interrupted, StorageError, is_out_of_memory
from mtrain.kernels.reproducible import reproducible
from mtrain.processes.stop_signals import StopSignal
from mtrain.runs.metrics import read_metrics
from mtrain.training.setup.micro_batch import write_limit
from mtrain.training.step.arithmetic import log_changes
from mtrain.training.step.learner import StepMetrics, SynchronizationMemoryError
from mtrain.training.step.learning_rate import encoder_share, r_drop_weight
from mtrain.training.trainer import Trainer

log = logging.getLogger(__name__)


def train(trainer: Trainer, stop: StopSignal) -> None:
    """Train until a limit is reached, the patience is exhausted, or a signal arrives."""
    _finish_last_validation(trainer)
    if reason := trainer.limit_reached():
        log.info("already finished: %s; raise the limit to continue training", reason)
        return
    _begin(trainer)
    window = _open_first_window(trainer, stop)
    try:
        _dry_run(trainer, window)
        if trainer.checkpoint is not None:
            log_changes(trainer.state, trainer.arithmetic, trainer.learner, trainer.ranks)
        trainer.progress.start()
        with trainer.progress.bar, closing(trainer.progress), closing(trainer.saver):
            if trainer.checkpoint is None and trainer.config.training.init_from is not None:
                trainer.selection.score_initial_model()
                _count_validation(trainer, trainer.state.seconds, bool(trainer.state.initial_scores))
            if trainer.clock is not None:
                trainer.clock.begin()
            _take_steps(trainer, stop)
    except (DistributedError, RuntimeError, MemoryError) as error:
        if isinstance(error, SynchronizationMemoryError):
            limit = trainer.learner.max_micro_batch_positions
            write_limit(trainer.run_dir, trainer.state.micro_batch_tokens, limit)
        if isinstance(error, DistributedError) or is_out_of_memory(error):
            _save_alone(trainer)
        raise


def _take_steps(trainer: Trainer, stop: StopSignal) -> None:
    state = trainer.state
    with closing(trainer.steps(stop)) as steps:
        while True:
            with _stopping(trainer, stop):
                step = _load(trainer, steps)
            # Ranks may open a window at different times, and the last step of a window is loaded only
            # when the next window is open.
            if state.position.step == 0 or step.next.step == 0:
                trainer.ranks.barrier()
            metrics = train_step(trainer, step)
            trainer.unrecorded = step
            trainer.progress.add_step(metrics, step.locate)
            seconds = trainer.progress.elapsed(stepping=True)
            state.seconds += seconds
            trainer.updates = trainer.learner.updates
            replanned = trainer.clock is not None and trainer.clock.add_step(seconds)
            # All decisions of this step use the signal that is known here; a later one is handled after the
            # next save. Metrics are read only after this exchange, which notices a lost rank: reading waits
            # for the GPU, and would hang.
            stopped = _agree(trainer, stop, replanned)
            trainer.ranks.expect_steps()
            reason = _record_step(trainer)
            trained = state.seconds
            validates = state.validation_due and not stopped  # a stopped run validates when it is resumed
            saves = validates or state.step % trainer.config.training.checkpoint_every == 0 or bool(stopped)
            if saves:
                trainer.saver.save(last=bool(reason or stopped))
            if validates:
                trainer.selection.validate(trainer.saver.is_saved, last=reason is not None)
                trainer.saver.settle()
                reason = reason or _finish_if_limit_reached(trainer)
                trainer.average.discard()
                if trainer.saver.is_saved():
                    stopped = _agree(trainer, stop)
            state.seconds += trainer.progress.elapsed()
            if saves:
                _count_validation(trainer, state.seconds - trained, validates and not state.validation_due)
            if reason and not state.validation_due:
                duration = format_duration(state.seconds)
                log.info("finished after %d steps, %s: %s", state.step, duration, reason)
                trainer.selection.review()
                break
            if stopped:
                raise _interrupted(trainer, stopped)


def train_step(trainer: Trainer, step: StepInput) -> StepMetrics:
    """Take one optimizer step and advance the state."""
    state = trainer.state
    number = state.step + 1
    trainer.ranks.seed_step(trainer.config.seed, number)
    trainer.learner.r_drop = r_drop_weight(number, trainer.config.training)
    trainer.learner.encoder_share = encoder_share(trainer.scheduled(number), trainer.config.training)
    before = torch.get_rng_state()  # that of a GPU is not read in each step
    try:
        with trainer.ranks.watched(), reproducible(trainer.ranks.device):
            metrics = trainer.learner.step(step.batches, step.tokens, trainer.rate(number))
    except BaseException:
        torch.set_rng_state(before)  # the steps before this one may be saved
        raise
    state.step = number
    state.target_tokens_seen += step.tokens
    if step.next.starts != state.position.starts:
        state.window_layout = trainer.corpus.layout(step.next.starts)
        _log_stage(trainer, step.next)
    state.position = step.next
    trainer.learner.run_in_worker(lambda: trainer.average.update(state.step))
    return metrics


def _load(trainer: Trainer, steps: Iterator[StepInput]) -> StepInput:
    """The next step. If it cannot be loaded, the steps since the last checkpoint are saved."""
    start = time.perf_counter()
    try:
        return next(steps)
    except (DataError, StorageError):
        _save_alone(trainer)
        raise
    finally:
        trainer.progress.sums["data_seconds"] += time.perf_counter() - start


def _record_step(trainer: Trainer) -> str | None:
    """Log the step that was taken, and note whether a validation is due. Returns the limit that the run has
    reached, if any."""
    state, step = trainer.state, trainer.unrecorded
    assert step is not None
    if state.step % trainer.config.training.log_every == 0:
        trainer.progress.log_step(step.epoch, trainer.rate(state.step), step.stage)
    reason = trainer.limit_reached()
    allowed = trainer.clock is None or trainer.clock.allows_validation()
    is_due = allowed and state.step % trainer.config.training.validate_every == 0
    state.validation_due = is_due or reason is not None
    trainer.unrecorded = None
    return reason


def _agree(trainer: Trainer, stop: StopSignal, replanned: bool = False) -> Signals | None:
    """The signal that any rank has received. Also agrees on the time of the run, as measured by rank 0, and
    on the plan, if rank 0 has `replanned`.

    The first exchange of a step, before the last backward pass, makes sure that no rank has run out of
    memory. It comes too early for this one: the step has not ended, and a signal during the backward pass
    would wait for the next. Whether numbers are finite needs no exchange: all ranks have the same sums.
    """
    seconds = trainer.state.seconds if trainer.ranks.is_first else 0.0
    values = trainer.ranks.all_reduce_max(stop.received or 0, seconds, replanned)
    signal, trainer.state.seconds, has_new_plan = values
    if trainer.clock is not None:
        if has_new_plan:
            trainer.clock.adopt()
        trainer.progress.bar.total = trainer.total_steps
    return Signals(int(signal)) if signal else None


def _finish_if_limit_reached(trainer: Trainer) -> str | None:
    """The limit that a validation has reached, if any. What has failed, the save, the validation or
    publishing the best weights, is repeated and must succeed, because no later step will repeat it."""
    reason, state = trainer.limit_reached(), trainer.state
    if reason is None:
        return None
    if not trainer.saver.is_saved():
        # Without a checkpoint, better weights could not become the best ones; they are validated again.
        state.validation_due |= state.validations_without_improvement == 0
        trainer.saver.save(last=True)
    if state.validation_due:
        trainer.selection.validate(trainer.saver.is_saved, last=True)
    else:
        trainer.selection.publish(last=True)
    return reason


def _count_validation(trainer: Trainer, seconds: float, succeeded: bool) -> None:
    """Let the clock, if there is one, count a validation that, with saving, took some `seconds`. Those of a
    failed one, or of saving alone, do not tell how long a validation takes."""
    if trainer.clock is not None and succeeded:
        trainer.clock.add_validation(seconds)
    elif trainer.clock is not None:
        trainer.clock.spent += seconds


def _finish_last_validation(trainer: Trainer) -> None:
    """Repeat a validation that was interrupted, and publish the best weights. The weights are also validated
    if a lowered limit ends the run at once. Nothing changes if a finished run resumes from another checkpoint
    than its newest."""
    if trainer.checkpoint is None:
        return
    last = trainer.limit_reached() is not None
    is_newest = trainer.ranks.broadcast(checkpoint_folders(trainer.run_dir)[-1:] == [trainer.checkpoint])
    if last and not is_newest:
        return
    if last and not trainer.state.validation_due and _is_newly_finished(trainer):
        trainer.state.validation_due = True
    due = trainer.state.validation_due
    _validate_checkpoint(trainer, last)
    if not last and trainer.limit_reached():  # see `_finish_if_limit_reached`
        _validate_checkpoint(trainer, last=True)
    trainer.average.discard()
    if due and trainer.limit_reached():
        trainer.selection.review()


def _is_newly_finished(trainer: Trainer) -> bool:
    """Whether the newest weights were never validated, and can be compared with the best ones. The average of
    several checkpoints is made when one is saved for a validation; this one was not."""
    step, is_validated = trainer.state.step, False
    if trainer.config.training.average_checkpoints > 1 and trainer.state.best_step is not None:
        return False
    if trainer.ranks.is_first:
        lines = read_metrics(trainer.run_dir)
        is_validated = any(line["step"] == step and "validation" in line for line in lines)
    return not trainer.ranks.broadcast(is_validated) and trainer.selection.is_comparable


def _validate_checkpoint(trainer: Trainer, last: bool) -> None:
    """Publish the best weights. Validate the weights that training resumes from if a validation is due,
    or if the best weights are lost."""
    if trainer.state.validation_fingerprint == NO_HEAD:
        trainer.selection.check_fingerprint()
    best = trainer.state.best_step
    trainer.selection.publish(last)
    trainer.state.validation_due |= trainer.state.best_step != best
    if trainer.state.validation_due:
        before = trainer.state.seconds
        _begin(trainer)
        trainer.progress.start()
        with closing(trainer.progress):
            trainer.selection.validate(lambda: True, last=last)
        _count_validation(trainer, trainer.state.seconds - before, not trainer.state.validation_due)


def _begin(trainer: Trainer) -> None:
    """Adapt the run folder and the best score to the step and the config from which training starts."""
    trainer.selection.check_fingerprint()
    if trainer.ranks.is_first:
        if trainer.checkpoint is not None:
            rename_newer_checkpoints(trainer.checkpoint, trainer.state)
        trainer.progress.remove_later_records()
    trainer.ranks.barrier()


def _open_first_window(trainer: Trainer, stop: StopSignal) -> Window:
    with _stopping(trainer, stop):  # it may take minutes
        position, window = trainer.planner.find(trainer.state.position, lambda: stop.received is not None)
    trainer.log_setup(window, windows=trainer.corpus.count_windows(position.starts))
    _log_stage(trainer, position)
    return window


def _dry_run(trainer: Trainer, window: Window) -> None:
    """Fail now, not hours later, if memory is short."""
    batches = largest_batches(trainer.loader, window)
    count = int(trainer.ranks.all_reduce_max(len(batches))[0])
    empty = batch_type(trainer.ranks.device).without_pairs()
    with reproducible(trainer.ranks.device):
        for batch in [*batches, *[empty] * (count - len(batches))]:
            trainer.learner.dry_run(batch)
    trainer.learner.expect(layouts_of(window))
    trainer.ranks.barrier()


@contextmanager
def _stopping(trainer: Trainer, stop: StopSignal) -> Iterator[None]:
    """Raise Interrupted, with the state saved, if a signal ends the wait for data."""
    try:
        yield
    except CancelledError:
        assert stop.received is not None
        _save_alone(trainer)
        raise _interrupted(trainer, stop.received) from None


def _interrupted(trainer: Trainer, signal: Signals) -> Interrupted:
    message = f"stopped by {signal.name} before the first step; run it again"
    if trainer.state.step:
        saved = f"; saved at step {trainer.state.step}" if trainer.saver.is_saved() else ""
        message = f"stopped by {signal.name}{saved}; run it again to resume"
    return Interrupted(message, signal)


def _save_alone(trainer: Trainer) -> None:
    """Save the steps that are complete, before this process ends, if it can without the other ranks.
    After a failed update, the weights may not belong to any step."""
    if trainer.updates == trainer.learner.updates and trainer.saver.can_save_alone():
        if trainer.unrecorded is not None:  # the resumed run would neither log nor validate it
            _record_step(trainer)
        trainer.saver.save(last=True, alone=True)


def _log_stage(trainer: Trainer, position: Position) -> None:
    if trainer.corpus.mixer is not None:
        log.info("data: %s", trainer.corpus.mixer.describe(position.starts))
