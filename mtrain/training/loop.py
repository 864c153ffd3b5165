"""The training loop: from a config to a trained model, going on wherever an earlier run stopped."""

import logging
import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from mtrain.checkpoint import Checkpoint, TrainState, load_checkpoint, save_checkpoint, set_newer_aside
from mtrain.data.batch import Batch, collate
from mtrain.data.batching import BatchPlan, Rows, plan_batches
from mtrain.data.encode import PreparedData, check_corpora, prepare_data
from mtrain.device import describe_device, keep_freed_memory, resolve_device, resolve_precision
from mtrain.errors import DataError, Interrupted
from mtrain.evaluate import make_metrics
from mtrain.model.transformer import Transformer
from mtrain.modelfolder import publish_best
from mtrain.schema import Config, ModelConfig
from mtrain.tokenizer import Tokenizer, model_config
from mtrain.training.progress import Progress
from mtrain.training.run import open_run, prepare_tokenizer
from mtrain.training.schedule import learning_rate
from mtrain.training.signals import StopSignal
from mtrain.training.step import make_optimizer, train_step
from mtrain.training.validate import Validator

log = logging.getLogger(__name__)


def fit(config: Config, resume: str = "auto", device: str = "auto", quiet: bool = False) -> None:
    """Train the model of a config, and leave the best weights in `RUN/model`.

    `resume`: `auto` goes on from the newest valid checkpoint, if any; `never` refuses a used folder; a path
    goes on from that checkpoint. Raises any of `mtrain.errors`; Interrupted after SIGINT or SIGTERM, when
    the state has been saved.
    """
    place = resolve_device(device)
    check_corpora(config.data)
    make_metrics(("bleu", "chrf"), config.data.target_lang)  # what it lacks shows now, not after an hour
    keep_freed_memory()
    checkpoint = open_run(config, resume)
    tokenizer = prepare_tokenizer(config)
    expected = checkpoint.state.data_fingerprint if checkpoint else None
    network = model_config(config.model, tokenizer, config.data.max_length)
    data = prepare_data(config.data, tokenizer, Path(config.run_dir) / "data", config.seed, expected)
    with StopSignal() as stop:
        _Trainer(config, network, tokenizer, data, place, checkpoint, quiet).run(stop)


class _Step(NamedTuple):
    epoch: int  # from 1
    passes: list[Rows]  # rows of the corpus, for each forward and backward pass
    tokens: int  # target tokens of all passes


class _Trainer:
    """A run in progress."""

    def __init__(
        self,
        config: Config,
        network: ModelConfig,
        tokenizer: Tokenizer,
        data: PreparedData,
        device: torch.device,
        checkpoint: Checkpoint | None,
        quiet: bool,
    ):
        self.config, self.recipe, self.tokenizer, self.data = config, config.training, tokenizer, data
        self.run_dir, self.device, self.checkpoint = Path(config.run_dir), device, checkpoint
        torch.manual_seed(config.seed)
        self.model = Transformer(network).to(device).train()
        self.optimizer = make_optimizer(self.model, self.recipe)
        self.state = TrainState(data_fingerprint=data.fingerprint)
        if checkpoint is not None:
            self.state = checkpoint.state
            load_checkpoint(checkpoint, self.model, self.optimizer)
            publish_best(self.run_dir, self.state, config, tokenizer)  # a crash may have come before it
            log.info("going on from %s", checkpoint.folder)
        self.planned = 0, self._make_plan(0)
        self.validator = Validator(data.validation, config, tokenizer, device)
        self.total_steps = self._planned_steps()
        self.progress = Progress(self.run_dir, self.state, self.total_steps, quiet)

    def run(self, stop: StopSignal) -> None:
        """Train until a limit, lost patience or a signal ends it."""
        state, recipe = self.state, self.recipe
        if reason := self._limit_reached():
            log.info("already finished: %s; raise the limit to train on", reason)
            return
        if self.checkpoint is not None:
            set_newer_aside(self.checkpoint)
        self._announce()
        self.progress.restart_clock()
        for step in self._steps():
            state.step += 1
            state.target_tokens_seen += step.tokens
            rate = learning_rate(state.step, recipe, self.total_steps)
            batches = [self._collate(rows) for rows in step.passes]
            self.progress.add(train_step(self.model, self.optimizer, batches, step.tokens, rate, recipe))
            if state.step % recipe.log_every == 0:
                self.progress.log_step(step.epoch, rate)

            reason, best = self._limit_reached(), False
            if state.step % recipe.validate_every == 0 or reason:
                best = self._validate()
                reason = reason or self._limit_reached()  # patience may have ended
            if state.step % recipe.checkpoint_every == 0 or best or reason or stop.received:
                self._save()
            if reason:
                log.info("finished after %d steps, %.1f minutes: %s", state.step, state.seconds / 60, reason)
                break
            if stop.received:
                message = (
                    f"stopped by {stop.received.name}; saved at step {state.step}; run it again to go on"
                )
                raise Interrupted(message, stop.received)
        self.progress.bar.close()

    def _steps(self) -> Iterator[_Step]:
        """The steps to come, without end. The state is moved past a step before it is yielded, so that a
        checkpoint made after it says where to go on."""
        while True:
            epoch = self.state.epoch
            plan = self._plan(epoch)
            for index in range(self.state.next_batch, len(plan.steps)):
                last = index + 1 == len(plan.steps)
                self.state.epoch, self.state.next_batch = (epoch + 1, 0) if last else (epoch, index + 1)
                yield _Step(epoch + 1, plan.steps[index], plan.step_tokens[index])

    def _plan(self, epoch: int) -> BatchPlan:
        if epoch != self.planned[0]:
            self.planned = epoch, self._make_plan(epoch)
        return self.planned[1]

    def _make_plan(self, epoch: int) -> BatchPlan:
        corpus, recipe = self.data.train, self.recipe
        lengths, budgets = (
            (corpus.source_lengths, corpus.target_lengths),
            (recipe.batch_tokens, recipe.pass_tokens),
        )
        plan = plan_batches(*lengths, *budgets, self.config.seed, epoch, weights=corpus.weights)
        if not plan.steps:
            raise DataError(f"epoch {epoch + 1} has no pair to train on; raise the weights of data.train")
        return plan

    def _planned_steps(self) -> int | None:
        """Steps that max_steps and max_epochs allow; None if only the clock ends training."""
        limits = [] if self.recipe.max_steps is None else [self.recipe.max_steps]
        if self.recipe.max_epochs is not None:
            limits.append(self.recipe.max_epochs * len(self._plan(0).steps))
        return min(limits, default=None)

    def _collate(self, rows: Rows) -> Batch:
        indices: list[int] = rows.tolist()
        special = self.tokenizer.special
        return collate(*self.data.train.fetch(indices), special.pad, special.bos, indices)

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
        plan = self._plan(self.state.epoch)
        log.info(
            "device: %s, %s",
            describe_device(self.device),
            resolve_precision(self.device, self.recipe.precision),
        )
        log.info(
            "model: %.2f million parameters, %d pieces", parameters / 1e6, self.tokenizer.target_vocab_size
        )
        log.info("epoch: %d steps, %.1f%% padding", len(plan.steps), 100 * plan.padding)
        if self.total_steps is not None:
            log.info("planned: %d steps, %.1f epochs", self.total_steps, self.total_steps / len(plan.steps))

    def _validate(self) -> bool:
        """Score the weights; returns whether they are the best so far."""
        self.progress.read()
        scores = self.validator(self.model)
        state, metric = self.state, self.recipe.best_metric
        score = -scores.nll if metric == "nll" else getattr(scores, metric)
        best = math.isfinite(score) and (state.best_score is None or score > state.best_score)
        state.validations_without_improvement = 0 if best else state.validations_without_improvement + 1
        if best:
            state.best_step, state.best_score = state.step, score
        self.progress.log_validation(scores, best)
        return best

    def _save(self) -> None:
        self.progress.read()
        save_checkpoint(self.run_dir, self.model, self.optimizer, self.state, self.recipe.keep_checkpoints)
        publish_best(self.run_dir, self.state, self.config, self.tokenizer)
