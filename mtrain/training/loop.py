"""The training loop: from a config to a trained model, continuing wherever an earlier run stopped."""

import logging
import signal
import sys
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch
from torch import Tensor, nn
from tqdm import tqdm

from mtrain.checkpoint import TrainState, load_checkpoint, read_state, save_checkpoint, save_model_folder
from mtrain.data.batch import Batch, collate
from mtrain.data.batching import BatchPlan, Rows, plan_batches
from mtrain.data.encode import PreparedData, check_corpora, prepare_data
from mtrain.device import autocast, describe_device, keep_freed_memory, resolve_device
from mtrain.errors import DivergedError, Interrupted
from mtrain.evaluate import make_metrics
from mtrain.model.loss import projected_cross_entropy
from mtrain.model.transformer import Transformer
from mtrain.schema import Config, TrainingConfig
from mtrain.tokenizer import Tokenizer, model_config
from mtrain.training.run import Metrics, open_run, prepare_tokenizer
from mtrain.training.schedule import learning_rate
from mtrain.training.validate import Validator

log = logging.getLogger(__name__)

NONFINITE_STEPS = 3  # in a row; then training has diverged


def fit(config: Config, resume: str = "auto", device: str = "auto", quiet: bool = False) -> None:
    """Train the model of a config, and leave the best weights in `RUN/model`.

    `resume`: `auto` continues from the newest valid checkpoint, if any, `never` refuses a used folder,
    a path continues from that checkpoint. Raises every error of `mtrain.errors`; Interrupted after SIGINT or
    SIGTERM, when the state has been saved.
    """
    place = resolve_device(device)
    check_corpora(config.data)
    make_metrics(
        ("bleu", "chrf"), config.data.target_lang
    )  # a missing tokenizer shows now, not after an hour
    keep_freed_memory()
    checkpoint = open_run(config, resume)
    tokenizer = prepare_tokenizer(config)
    expected = read_state(checkpoint).data_fingerprint if checkpoint else None
    data = prepare_data(config.data, tokenizer, Path(config.run_dir) / "data", config.seed, expected)
    with _StopSignal() as stop:
        _Trainer(config, tokenizer, data, place, checkpoint, quiet).run(stop)


class StepSums(NamedTuple):
    """What one optimizer step measured; tensors stay on the device until they are asked for."""

    values: Tensor  # (4,): summed loss and nll, gradient norm, 1 if the step was skipped
    tokens: int  # target tokens


def train_step(
    model: Transformer,
    optimizer: torch.optim.Optimizer,
    batches: list[Batch],
    tokens: int,
    rate: float,
    config: TrainingConfig,
) -> StepSums:
    """One optimizer step over `batches`, whose `tokens` target tokens share the loss equally.

    The gradient is that of the summed loss / `tokens`, however the pairs are split into batches. A step whose
    loss or gradient is not finite leaves weights and optimizer as they were. Nothing waits for the device.
    """
    device = next(model.parameters()).device
    loss, nll = torch.zeros(2, device=device).unbind()
    for batch in batches:
        moved = batch.to(device)
        with autocast(device, config.precision):
            hidden = model(moved.source, moved.source_keep, moved.target_in)
            sums = projected_cross_entropy(
                hidden, *model.projection(), moved.labels, moved.target_tokens, config.label_smoothing
            )
        (sums.loss / tokens).backward()  # type: ignore[no-untyped-call]
        loss, nll = loss + sums.loss.detach(), nll + sums.nll
    norm = nn.utils.clip_grad_norm_(model.parameters(), config.clip_norm or float("inf"))
    bad = ~(norm.isfinite() & loss.isfinite())
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.found_inf = bad.float()  # type: ignore[attr-defined]  # the fused kernel then changes nothing
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return StepSums(torch.stack([loss, nll, norm, bad.float()]), tokens)


def make_optimizer(model: nn.Module, config: TrainingConfig) -> torch.optim.AdamW:
    """AdamW (Loshchilov and Hutter 2019); weight decay for matrices alone, not for biases and norms."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=config.betas, eps=1e-9, fused=True)


class _Trainer:
    """A run in progress: the loop, and what it does every so many steps."""

    def __init__(
        self,
        config: Config,
        tokenizer: Tokenizer,
        data: PreparedData,
        device: torch.device,
        checkpoint: Path | None,
        quiet: bool,
    ):
        self.config, self.recipe, self.tokenizer, self.data = config, config.training, tokenizer, data
        self.device, self.run_dir = device, Path(config.run_dir)
        torch.manual_seed(config.seed)
        self.model = (
            Transformer(model_config(config.model, tokenizer, config.data.max_length)).to(device).train()
        )
        self.optimizer = make_optimizer(self.model, self.recipe)
        self.state = TrainState(data_fingerprint=data.fingerprint)
        if checkpoint is not None:
            self.state = load_checkpoint(checkpoint, self.model, self.optimizer)
            log.info("continuing from %s", checkpoint)
        self.metrics = Metrics(self.run_dir, self.state.step)
        self.validator = Validator(data.validation, config, tokenizer, device)
        self.total_steps = self._planned_steps()
        self.pending: deque[StepSums] = deque()
        self.clock = time.perf_counter()
        self.bar = tqdm(
            total=self.total_steps,
            initial=self.state.step,
            unit="step",
            disable=quiet or not sys.stderr.isatty(),
        )

    def run(self, stop: "_StopSignal") -> None:
        """Train until a limit, a signal or lost patience ends it."""
        if reason := self._limit_reached():
            log.info("already finished: %s; raise the limit to train on", reason)
            return
        self._announce()
        self.clock = time.perf_counter()
        for epoch, passes, tokens in self._steps():
            state = self.state
            state.step += 1
            state.target_tokens_seen += tokens
            rate = learning_rate(state.step, self.recipe, self.total_steps)
            batches = [self._collate(rows) for rows in passes]
            self.pending.append(train_step(self.model, self.optimizer, batches, tokens, rate, self.recipe))
            self._read_sums(keep=1)  # the device works on this step while the one before it is read
            self._tick()
            self.bar.update()
            if state.step % self.recipe.log_every == 0:
                self._log(epoch, rate)

            reason, improved = self._limit_reached(), False
            if state.step % self.recipe.validate_every == 0 or reason:
                improved = self._validate()
                reason = reason or self._limit_reached()
            if state.step % self.recipe.checkpoint_every == 0 or improved or reason or stop.received:
                self._save(improved)
            if reason:
                log.info("finished after %d steps, %.1f minutes: %s", state.step, state.seconds / 60, reason)
                break
            if stop.received:
                raise Interrupted(
                    f"stopped by {stop.received.name}; saved at step {state.step}; the same command goes on",
                    stop.received,
                )
        self.bar.close()

    def _steps(self) -> Iterator[tuple[int, list[Rows], int]]:
        """Epoch (from 1), rows of each pass and target tokens of every step to come, without end.

        The state is moved past a step before it is yielded, so that a checkpoint made after it is right.
        """
        while True:
            epoch, plan = self.state.epoch, self._plan(self.state.epoch)
            for index in range(self.state.next_batch, len(plan.steps)):
                last = index + 1 == len(plan.steps)
                self.state.epoch, self.state.next_batch = (epoch + 1, 0) if last else (epoch, index + 1)
                yield epoch + 1, plan.steps[index], plan.step_tokens[index]

    def _plan(self, epoch: int) -> BatchPlan:
        corpus = self.data.train
        return plan_batches(
            corpus.source_lengths,
            corpus.target_lengths,
            self.recipe.batch_tokens,
            self.recipe.pass_tokens,
            self.config.seed,
            epoch,
            weights=corpus.weights,
        )

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
        log.info("device: %s, precision: %s", describe_device(self.device), self.recipe.precision)
        log.info(
            "model: %.2f million parameters, %d pieces", parameters / 1e6, self.tokenizer.target_vocab_size
        )
        log.info("epoch: %d steps, %.1f%% padding", len(plan.steps), 100 * plan.padding)
        if self.total_steps is not None:
            log.info("planned: %d steps, %.1f epochs", self.total_steps, self.total_steps / len(plan.steps))

    def _tick(self) -> float:
        """Add the time since the last call to the state's clock, and return it."""
        now = time.perf_counter()
        passed, self.clock = now - self.clock, now
        self.state.seconds += passed
        self.state.window["seconds"] = self.state.window.get("seconds", 0.0) + passed
        return passed

    def _read_sums(self, keep: int) -> None:
        """Fetch what all but the newest `keep` steps measured."""
        while len(self.pending) > keep:
            sums = self.pending.popleft()
            loss, nll, norm, skipped = sums.values.tolist()
            state, window = self.state, self.state.window
            for key, value in (("loss", loss), ("nll", nll), ("tokens", sums.tokens)):
                window[key] = window.get(key, 0.0) + value
            window["norm"] = norm
            state.skipped_in_a_row = state.skipped_in_a_row + 1 if skipped else 0
            if skipped:
                state.skipped_steps += 1
                log.warning("step skipped: loss or gradient is not finite (%d so far)", state.skipped_steps)
            if state.skipped_in_a_row >= NONFINITE_STEPS:
                raise DivergedError(
                    f"diverged: {NONFINITE_STEPS} steps in a row had a loss or gradient that is not finite; "
                    "lower training.learning_rate or raise training.warmup_steps"
                )
            self.bar.set_postfix(loss=f"{loss / sums.tokens:.3f}", refresh=False)

    def _log(self, epoch: int, rate: float) -> None:
        self._read_sums(keep=0)
        state, window = self.state, self.state.window
        record = {
            "step": state.step,
            "epoch": epoch,
            "loss": window["loss"] / window["tokens"],
            "nll": window["nll"] / window["tokens"],
            "learning_rate": rate,
            "grad_norm": window["norm"],
            "target_tokens": state.target_tokens_seen,
            "target_tokens_per_second": window["tokens"] / window["seconds"],
            "seconds": state.seconds,
            "skipped_steps": state.skipped_steps,
            "time": time.time(),
        }
        self.metrics.write(record)
        state.window = {}
        speed = f"{record['target_tokens_per_second']:,.0f} target tokens/s"
        self.bar.set_postfix_str(f"loss={record['loss']:.3f} lr={rate:.2g} {speed}", refresh=False)
        if self.bar.disable:
            log.info(
                "step %d, epoch %d: loss %.3f nats/token, lr %.2g, %s",
                state.step,
                epoch,
                record["loss"],
                rate,
                speed,
            )

    def _validate(self) -> bool:
        """Score the weights; returns whether they are the best so far."""
        self._read_sums(keep=0)
        scores = self.validator(self.model)
        state, metric = self.state, self.recipe.best_metric
        score = -scores.nll if metric == "nll" else getattr(scores, metric)
        improved = state.best_score is None or score > state.best_score
        state.validations_without_improvement = 0 if improved else state.validations_without_improvement + 1
        if improved:
            state.best_step, state.best_score = state.step, score
        window_seconds = state.window.get("seconds", 0.0)
        self._tick()
        state.window["seconds"] = window_seconds  # the speed of training leaves validation out
        self.metrics.write(
            {
                "step": state.step,
                "validation": scores._asdict(),
                "seconds": state.seconds,
                "time": time.time(),
            }
        )
        self.bar.clear()
        log.info(
            "step %d: validation nll %.3f nats/token, perplexity %.2f, BLEU %.2f, chrF %.2f%s",
            state.step, *scores, " (best)" if improved else "",
        )  # fmt: skip
        return improved

    def _save(self, improved: bool) -> None:
        self._read_sums(keep=0)
        save_checkpoint(self.run_dir, self.model, self.optimizer, self.state, self.recipe.keep_checkpoints)
        if improved:
            save_model_folder(self.run_dir / "model", self.model, self.config, self.tokenizer)


class _StopSignal:
    """Notes SIGINT or SIGTERM, for the loop to act on when its step is done; a second one acts at once."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None

    def __enter__(self) -> "_StopSignal":
        self.before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        for number in self.before:
            signal.signal(number, self._note)
        return self

    def _note(self, number: int, _: FrameType | None) -> None:
        self.received = signal.Signals(number)
        self._restore()

    def _restore(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    __exit__ = _restore
