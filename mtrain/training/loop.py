"""The training loop: from a config to a trained model, going on wherever an earlier run stopped."""

import logging
import math
from collections.abc import Iterator
from pathlib import Path

import torch

from mtrain.checkpoint.checkpoint import (
    Checkpoint,
    TrainState,
    checkpoint_folders,
    load_checkpoint,
    save_checkpoint,
    set_newer_aside,
)
from mtrain.checkpoint.model_folder import LoadedModel, publish_best
from mtrain.config.schema import Config
from mtrain.data.batching import BATCH_ORDER
from mtrain.data.check_report import log_warnings
from mtrain.data.encode import PreparedData, check_corpora, prepare_data
from mtrain.data.loader import Loader, Step
from mtrain.data.scan import RawData
from mtrain.device import (
    compiles,
    describe_arithmetic,
    keep_few_kernels,
    keep_freed_memory,
    make_current,
    resolve_device,
    workers_for,
)
from mtrain.errors import Interrupted, StorageError, UsageError
from mtrain.evaluation.metrics import make_metrics
from mtrain.interop.formats import describe_exports, require_exports
from mtrain.model.transformer import Transformer
from mtrain.tokenizer.tokenizer import Tokenizer, model_config
from mtrain.training.average import Average
from mtrain.training.init_from import freeze, note_origin, resolved
from mtrain.training.micro_batch import fit_micro_batch, memory_of
from mtrain.training.progress import Progress
from mtrain.training.run_folder import (
    adopt_vocab_size,
    claimed,
    open_run,
    prepare_tokenizer,
    vocab_size_is_automatic,
)
from mtrain.training.schedule import learning_rate
from mtrain.training.signals import StopSignal
from mtrain.training.step import Learner, StepSums
from mtrain.training.validate import Validator

log = logging.getLogger(__name__)

FAILED_SAVES = 3  # in a row, each tried twice; then a run that goes on would only lose more


def fit(
    config: Config,
    resume: str = "auto",
    device: str = "auto",
    quiet: bool = False,
    allow_data_change: bool = False,
) -> None:
    """Train the model of a config, and leave the best weights in `RUN/model`.

    `resume`: `auto` goes on from the newest valid checkpoint, if any; `never` refuses a used folder; a path
    goes on from that checkpoint. With `allow_data_change` it may go on with another corpus, from the start of
    an epoch. Raises any of `mtrain.errors`; Interrupted after SIGINT or SIGTERM, when the state has been
    saved.
    """
    resolve_device(device)
    if config.training.init_from is None:  # whose sizes are not known yet
        require_exports(config)
    check_corpora(config.data)
    make_metrics(("bleu", "chrf"), config.data.target_lang)  # what it lacks shows now, not after an hour
    with claimed(Path(config.run_dir)):
        trainer = make_trainer(config, resume, device, quiet, allow_data_change)
        with StopSignal() as stop:
            trainer.run(stop)


def make_trainer(
    config: Config,
    resume: str = "auto",
    device: str = "auto",
    quiet: bool = False,
    allow_data_change: bool = False,
) -> "Trainer":
    """Enter the run folder, make or load its tokenizer and data, and set up a trainer. As `fit` otherwise,
    but nothing keeps other processes out of the folder."""
    place = resolve_device(device)
    make_current(place)
    keep_freed_memory()
    keep_few_kernels()
    is_encoded, any_size = (Path(config.run_dir) / "data").exists(), vocab_size_is_automatic(config)
    raw = RawData(config.data, config.seed, Path(config.run_dir), check=not is_encoded)
    config, start = resolved(config, raw)
    require_exports(config)
    checkpoint = open_run(config, resume)
    tokenizer = prepare_tokenizer(config, raw, any_size=any_size)
    if any_size:
        config = adopt_vocab_size(config)
    if start and start.tokenizer.fingerprint() != tokenizer.fingerprint():
        reason = f"its tokenizer is not that of {config.training.init_from}"
        raise UsageError(f"{config.run_dir}: {reason}; `mtrain tokenize CONFIG --force` renews it")
    if checkpoint is None:
        note_origin(Path(config.run_dir), start, config.training.init_from)
    expected = checkpoint.state.data_fingerprint if checkpoint and not allow_data_change else None
    if not is_encoded:
        log_warnings(config.data, tokenizer, raw)
    data = prepare_data(config.data, tokenizer, Path(config.run_dir) / "data", config.seed, expected, raw)
    if checkpoint and checkpoint.state.tokenizer_fingerprint != tokenizer.fingerprint():
        log.warning(
            "tokenizer: not the one of the checkpoints; what they learnt of its pieces may be of others"
        )
        checkpoint.state.tokenizer_fingerprint = tokenizer.fingerprint()
    if checkpoint and checkpoint.state.data_fingerprint != data.fingerprint:
        log.warning("data: another corpus than before; epoch %d starts again", checkpoint.state.epoch + 1)
        checkpoint.state.data_fingerprint, checkpoint.state.next_batch = data.fingerprint, 0
    if checkpoint and checkpoint.state.batch_order != BATCH_ORDER:
        if checkpoint.state.next_batch:
            message = "data: this version of mtrain orders batches differently; restarting epoch %d"
            log.warning(message, checkpoint.state.epoch + 1)
        checkpoint.state.batch_order, checkpoint.state.next_batch = BATCH_ORDER, 0
    return Trainer(config, tokenizer, data, place, checkpoint, quiet, start)


class Trainer:
    """A run in progress."""

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
            log.info("starting from %s (%s)", self.recipe.init_from, start.fingerprint[:12])
        freeze(self.model, self.recipe.freeze)
        # Threads that compile one model at the same time do not get along.
        workers = 1 if compiles(device, self.recipe.compile) else workers_for(device)
        self.learner = Learner(self.model, self.recipe, workers)
        self.average = Average(self.model, self.recipe)
        self.state = TrainState(
            batch_order=BATCH_ORDER,
            data_fingerprint=data.fingerprint,
            tokenizer_fingerprint=tokenizer.fingerprint(),
        )
        if checkpoint is not None:
            self.state = checkpoint.state
            load_checkpoint(checkpoint, self.model, self.learner.optimizer)
            self.average.load(checkpoint.folder)
            self.learner.scale.restore(self.state.loss_scale)
            log.info("going on from %s", checkpoint.folder)
        self.loader = Loader(
            data.train, config, tokenizer.special, device, self._micro_batch_tokens(data), workers
        )
        self.validator = Validator(data.validation, config, tokenizer, device, self.loader.micro_batch_tokens)
        self._note_arithmetic()
        self.saved_step, self.failed_saves = -1, 0
        self.saved_best = self.state.best_step, self.state.best_score
        self.total_steps = self._planned_steps()
        self.progress = Progress(self.run_dir, self.state, self.total_steps, self.learner.precision, quiet)

    def _arithmetic(self) -> str:
        """All that the last bits of a step depend on, besides what a checkpoint holds."""
        learner, compiled = self.learner, compiles(self.device, self.recipe.compile)
        machine = describe_arithmetic(self.device, learner.precision, compiled, len(learner.replicas))
        cut = "" if learner.most == math.inf else f", cut to {learner.most:g} positions"
        return f"{machine}, micro-batches of {self.loader.micro_batch_tokens} tokens{cut}"

    def _note_arithmetic(self) -> None:
        """Tell whether the last bits of a step come out as before an interruption."""
        arithmetic = self._arithmetic()
        if self.checkpoint is not None and self.state.arithmetic != arithmetic:
            log.warning("%s; before: %s: goes on, not bit for bit", arithmetic, self.state.arithmetic)
        elif self.checkpoint is not None and self.device.type == "cuda":
            log.info("a GPU adds up in an order of its own: goes on, not bit for bit")
        self.state.arithmetic = arithmetic

    def _note_validation(self) -> None:
        """Forget the best score if what is measured from now on does not compare with it."""
        state, measure = self.state, self.validator.fingerprint()
        if state.best_score is not None and state.validation_fingerprint != measure:
            log.warning("validation: other pairs or another search than before; the best score starts anew")
            state.best_step = state.best_score = None
            state.validations_without_improvement = 0
            self.saved_best = (None, None)
        state.validation_fingerprint = measure

    def run(self, stop: StopSignal) -> None:
        """Train until a limit, lost patience or a signal ends it, if none has already."""
        state, reason = self.state, self._limit_reached()
        newest = checkpoint_folders(self.run_dir)[-1:]
        if self.checkpoint is not None and (not reason or newest == [self.checkpoint.folder]):
            self._publish()  # a crash may have come before it
        if reason:
            log.info("already finished: %s; raise the limit to train on", reason)
            return
        self._note_validation()
        if self.checkpoint is not None:
            set_newer_aside(self.checkpoint)
        self._announce()
        for batch in self.loader.largest(state.epoch):  # what memory cannot hold shows now, not hours later
            self.learner.rehearse(batch)
        self.progress.begin()
        with self.progress.bar:
            self._train(stop)

    def _train(self, stop: StopSignal) -> None:
        """Take steps until a limit, lost patience or a signal ends them."""
        state, recipe = self.state, self.recipe
        for step in self.steps():
            rows = [row for batch in step.batches for row in batch.rows]
            self.progress.add(self.train_on(step), rows)
            if state.step % recipe.log_every == 0:
                self.progress.log_step(step.epoch, self.rate)

            reason, best = self._limit_reached(), False
            if state.step % recipe.validate_every == 0 or reason:
                best = self._validate()
                reason = reason or self._limit_reached()  # patience may have ended
            stopped = stop.received  # asked once: a signal that comes during the save waits for the next step
            if state.step % recipe.checkpoint_every == 0 or best or reason or stopped:
                self.save(last=bool(reason or stopped))
                self.progress.tick()
            if reason:
                log.info("finished after %d steps, %.1f minutes: %s", state.step, state.seconds / 60, reason)
                break
            if stopped:
                message = f"stopped by {stopped.name}; saved at step {state.step}; run it again to go on"
                raise Interrupted(message, stopped)

    def steps(self) -> Iterator[Step]:
        """The steps to come, without end."""
        return self.loader.steps(self.state.epoch, self.state.next_batch)

    def train_on(self, step: Step) -> StepSums:
        """Take one optimizer step; the state then says where to go on."""
        state = self.state
        state.step += 1
        state.target_tokens_seen += step.tokens
        state.epoch, state.next_batch = step.position
        sums = self.learner.step(step.batches, step.tokens, self.rate)
        self.learner.alone(lambda: self.average.update(state.step))
        return sums

    @property
    def rate(self) -> float:
        """Learning rate of the present step."""
        return learning_rate(self.state.step, self.recipe, self.total_steps)

    def _planned_steps(self) -> int | None:
        """Steps that max_steps and max_epochs allow; None if only the clock ends training."""
        limits = [] if self.recipe.max_steps is None else [self.recipe.max_steps]
        if self.recipe.max_epochs is not None:
            limits.append(self.recipe.max_epochs * len(self.loader.plan(0).steps))
        return min(limits, default=None)

    def _micro_batch_tokens(self, data: PreparedData) -> int:
        """Padded tokens that a device takes in a micro-batch: as configured, or as many as fit its memory."""
        if self.recipe.micro_batch_tokens != "auto":
            return self.recipe.micro_batch_limit
        longest = max(int(data.train.source_lengths.max()), int(data.train.target_lengths.max()))
        if self.config.data.subword_sampling is not None:
            longest = self.config.data.max_length  # as long as another segmentation may get
        return fit_micro_batch(self.learner, longest, self.recipe.micro_batch_limit, memory_of(self.device))

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

    def _announce(self) -> None:
        parameters = sum(p.numel() for p in self.model.parameters())
        frozen = sum(p.numel() for p in self.model.parameters() if not p.requires_grad)
        plan = self.loader.plan(self.state.epoch)
        log.info("device: %s", self._arithmetic())
        sizes = (parameters / 1e6, frozen / 1e6, self.tokenizer.target_vocab_size)
        log.info("model: %.2f million parameters (%.2f frozen), %d pieces", *sizes)
        log.info("exports: %s", describe_exports(self.model.config))
        padding = (100 * share for share in plan.padding)
        log.info(
            "epoch: %d steps; padding: %.1f%% source, %.1f%% target, %.1f%% both", len(plan.steps), *padding
        )
        if self.total_steps is not None:
            log.info("planned: %d steps, %.1f epochs", self.total_steps, self.total_steps / len(plan.steps))

    def _validate(self) -> bool:
        """Score the weights; returns whether they are the best so far."""
        self.progress.read()
        with self.average.applied(self.run_dir):
            scores = self.validator(self.model)
        state, metric = self.state, self.recipe.best_metric
        score = -scores.nll if metric == "nll" else getattr(scores, metric)
        best = math.isfinite(score) and (state.best_score is None or score > state.best_score)
        state.validations_without_improvement = 0 if best else state.validations_without_improvement + 1
        if best:
            state.best_step, state.best_score = state.step, score
        self.progress.log_validation(scores, best)
        return best

    def save(self, last: bool) -> None:
        """Save; what fails is tried again at once, and then at the next checkpoint, unless this is the `last`
        one or the third to fail. Raises StorageError then."""
        self.progress.read()
        self.state.loss_scale, self.state.arithmetic = self.learner.scale.state(), self._arithmetic()
        try:
            try:
                self._write()
            except StorageError as error:
                log.warning("%s; trying again", error)
                self._write()
        except StorageError as error:
            self.failed_saves += 1
            if last or self.failed_saves == FAILED_SAVES:
                raise
            log.warning("%s; going on, to save at the next checkpoint", error)
            # The best weights are those that are on disk; better ones must come again.
            self.state.best_step, self.state.best_score = self.saved_best
        else:
            self.failed_saves = 0

    def _write(self) -> None:
        """Write the checkpoint, unless it is there from the first try, and `model/` if it is another now."""
        recipe, average, state = self.recipe, self.average.weights, self.state
        if self.saved_step != state.step:
            kept = (recipe.keep_checkpoints, recipe.checkpoint_every)
            save_checkpoint(self.run_dir, self.model, self.learner.optimizer, state, *kept, average)
            self.saved_step, self.saved_best = state.step, (state.best_step, state.best_score)
        self._publish()

    def _publish(self) -> None:
        publish_best(self.run_dir, self.state, self.config, self.tokenizer)
