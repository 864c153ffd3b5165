"""Plans a new run: chooses the values that `model.preset: auto` and keys without a value leave open."""

import logging
from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import torch

from mtrain.config.load import validate
from mtrain.config.presets import SIZES
from mtrain.config.recipe import (
    Budget,
    Choice,
    CorpusSize,
    choose_training,
    parameters,
    peak_rate,
    presets_for,
    suffices,
    warmup,
)
from mtrain.config.schema import Config
from mtrain.data.batching import BatchPlan, plan_batches
from mtrain.data.encode import PreparedData
from mtrain.tokenizer.tokenizer import Tokenizer
from mtrain.training.timing import measure_speed

log = logging.getLogger(__name__)

FIRST_SPEED = 8_000.0  # target tokens/s, assumed for the batch size of the first timing
# A larger model is timed if it may be this many times as fast as its number of parameters suggests.
SPEED_MARGIN = 4
UNKNOWN_STEPS = 12_500  # assumed for warm-up if nothing limits the number of steps


class Workload(NamedTuple):
    """What a plan needs to know about the data and the machine."""

    size: CorpusSize
    steps_per_epoch: Callable[[int], int]  # given training.batch_tokens
    speed: Callable[[Config], float]  # measures target tokens/s of training with a config


def is_incomplete(config: Config) -> bool:
    """Whether a config leaves values to `complete_config`."""
    recipe = config.training
    return config.model.preset == "auto" or recipe.learning_rate is None or recipe.warmup_steps is None


def complete_config(
    config: Config,
    tokenizer: Tokenizer,
    data: PreparedData,
    device: torch.device,
    earlier: Sequence[Choice] = (),
) -> Config:
    """The config of a new run with a value for every key.

    Logs what `model.preset: auto` chose, including `earlier` choices.
    """
    train = data.train

    @cache
    def epoch(batch_tokens: int) -> BatchPlan:
        lengths = train.source_lengths, train.target_lengths
        sizes = batch_tokens, max(batch_tokens, config.data.max_length)
        return plan_batches(*lengths, *sizes, seed=config.seed, epoch=0, weights=train.weights)

    def speed(sized: Config) -> float:
        return measure_speed(sized, tokenizer, data, device)

    pairs = len(train) if train.weights is None else round(float(train.weights.sum()))
    tokens = epoch(config.training.batch_tokens).tokens[1]
    size = CorpusSize(pairs, tokens, round(len(data.validation) * tokens / max(pairs, 1)))
    work = Workload(size, lambda batch_tokens: len(epoch(batch_tokens).steps), speed)
    completed, choices = plan_run(config, work)
    if config.model.preset == "auto":
        log_choices([*earlier, *choices])
    return completed


def plan_run(config: Config, work: Workload) -> tuple[Config, list[Choice]]:
    """The config with a value for every key, and what `model.preset: auto` chose.

    Keys that the config gives do not change. The speed is measured only if the time is limited or nothing is.
    """
    choices: list[Choice] = []
    if config.model.preset == "auto":
        choices = [choice for choice in _choose(config, work) if not _is_given(config, choice.key)]
        config = with_choices(config, choices)
    recipe = config.training
    limits = [] if recipe.max_steps is None else [recipe.max_steps]
    if recipe.max_epochs is not None:
        limits.append(recipe.max_epochs * work.steps_per_epoch(recipe.batch_tokens))
    rate, steps = recipe.learning_rate, recipe.warmup_steps
    values = {
        "learning_rate": peak_rate(config.model.d_model) if rate is None else rate,
        "warmup_steps": warmup(min(limits, default=UNKNOWN_STEPS)) if steps is None else steps,
    }
    return config.model_copy(update={"training": recipe.model_copy(update=values)}), choices


def with_choices(config: Config, choices: Sequence[Choice]) -> Config:
    """A config with the chosen values. A chosen preset fills in the sizes that the config does not give."""
    raw = config.model_dump(mode="json", exclude_unset=True)
    for choice in choices:
        section, key = choice.key.split(".")
        raw.setdefault(section, {})[key] = choice.value
    return validate(Config, raw, "the automatic recipe")


def _is_given(config: Config, key: str) -> bool:
    """Whether a config gives the value of a key, or, of the averaging of weights, another kind of it."""
    section, name = key.split(".")
    values = getattr(config, section)
    if key == "training.ema_decay" and config.training.average_checkpoints > 1:
        return True
    return key != "model.preset" and name in values.model_fields_set and getattr(values, name) is not None


def _choose(config: Config, work: Workload) -> list[Choice]:
    """All values of the recipe."""
    size, budget = work.size, Budget.of(config.training)
    preset, speed = _choose_preset(config, work, budget)
    config = with_choices(config, [preset])
    batch, speed = _settle_batch(config, work, budget, speed)
    tokens = budget.tokens(size, speed)
    steps = budget.steps or max(1, round(tokens / size.tokens * work.steps_per_epoch(batch)))
    if budget.unlimited:
        message = "no limit: training ends when validation stops improving, perhaps after %.1f minutes"
        log.info(message, tokens / speed / 60)
    return [preset, *choose_training(size, budget, tokens, batch, steps, config.model.d_model)]


def _choose_preset(config: Config, work: Workload, budget: Budget) -> tuple[Choice, float]:
    """The largest preset that the corpus can fill and the budget can train, and its speed."""
    size = work.size
    chosen, *larger = presets_for(size.pairs)
    if config.model.model_fields_set.issuperset(SIZES):
        larger = []

    def speed_of(name: str, expected: float) -> float:
        sized = with_choices(config, [Choice("model.preset", name, "")])
        return _settle_batch(sized, work, budget, expected, rounds=1)[1]

    speed, reason = FIRST_SPEED, f"{size.pairs:,} pairs"
    if larger:
        speed = speed_of(chosen, speed)
    for name in larger:
        expected = speed * SPEED_MARGIN * parameters(chosen) / parameters(name)
        if suffices(budget.tokens(size, expected), name):
            expected = speed_of(name, expected)
        if not suffices(budget.tokens(size, expected), name):
            reason += f"; too few tokens in all for {name}"
            break
        chosen, speed = name, expected
    return Choice("model.preset", chosen, reason), speed


def _settle_batch(
    config: Config, work: Workload, budget: Budget, speed: float, rounds: int = 3
) -> tuple[int, float]:
    """`training.batch_tokens` and the speed with it. Each depends on the other; they start from a guess."""
    timed = None
    for _ in range(rounds):
        batch = max(budget.batch(work.size, speed), config.data.max_length)
        if batch == timed or not (budget.minutes or budget.unlimited):
            break
        sized = with_choices(config, [Choice("training.batch_tokens", batch, "")])
        speed, timed = work.speed(sized), batch
    return batch, speed


def log_choices(choices: Sequence[Choice]) -> None:
    """Log the values that were chosen, with reasons, as a table."""
    values = [(choice.key, str(choice.value), choice.reason) for choice in choices]
    widths = [max(len(row[column]) for row in values) for column in (0, 1)]
    log.info("model.preset: auto chose these values; to change one, give the key in the config:")
    for key, value, reason in values:
        log.info("  %-*s  %*s  %s", widths[0], key, widths[1], value, reason)
