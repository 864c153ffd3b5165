"""The keys that `model.preset: auto` chooses, and their values by the formulas of `mtrain.config.recipe`."""

import math
from typing import NamedTuple

from mtrain.config import recipe
from mtrain.config.recipe import CPU, Budget, CorpusSize
from mtrain.config.sections.presets import SIZES

CHECKPOINT_STEPS = 2000  # maximum between checkpoints
# Translations by models of fewer pairs often end too early or repeat tokens. These settings raised chrF by
# 0.3 to 4 points and changed BLEU by -0.1 to 0.2 (docs/experiments/automatic-recipe.md, "Search").
SMALL_CORPUS, LENGTH_PENALTY, NO_REPEAT_NGRAM = 100_000, 1.2, 6
# The keys that `model.preset: auto` chooses, except for `training.max_steps`.
AUTOMATIC = (
    *(f"model.{key}" for key in (*SIZES, "dropout", "activation_dropout")),
    "tokenizer.vocab_size",
    *(f"training.{key}" for key in ("batch_tokens", "learning_rate", "warmup_steps", "schedule")),
    *(f"training.{key}" for key in ("ema_decay", "validate_every", "checkpoint_every")),
    *("training.optimizer", "training.planned_steps", "training.validation_pairs"),
    *(f"decoding.{key}" for key in ("length_penalty", "no_repeat_ngram")),
)
# Keys of `training` that mtrain may choose even if the config gives them as null.
OPEN_IF_NULL = ("learning_rate", "warmup_steps", "encoder_after", "max_steps", "planned_steps")


class Choice(NamedTuple):
    """A value for a key of the config, such as `training.learning_rate`, and why it was chosen."""

    key: str
    value: int | float | str
    reason: str


def choose_training(
    size: CorpusSize, budget: Budget, speed: float, batch: int, steps: int, width: int
) -> list[Choice]:
    """All automatic values except the model sizes and the vocabulary, for a model of width `width`.

    The run has `steps` steps of `batch` padded tokens, at `speed` target tokens/s.
    """
    limit = budget.limit(size, speed)
    tokens = limit.tokens
    epochs = tokens / size.tokens
    # A longer run ends early if validation does not improve, so warm-up and validations suit the useful part.
    useful = min(tokens, recipe.useful_tokens(size))
    useful_steps = max(1, round(steps * useful / tokens))
    interval = math.ceil(useful_steps / budget.validations(useful, size, speed))
    saved_every = min(interval, CHECKPOINT_STEPS)
    warmup_steps = recipe.warmup(useful_steps)
    share = f"{warmup_steps / useful_steps:.0%}"
    choices = [
        Choice("model.dropout", recipe.dropout(epochs), f"each pair is seen {epochs:.3g} times"),
        Choice("model.activation_dropout", 0.0, "model.dropout suffices"),
        Choice("training.batch_tokens", batch, f"{useful / 1e6:.3g} million target tokens in all"),
        Choice("training.learning_rate", recipe.peak_rate(width), f"model width {width}"),
        Choice("training.warmup_steps", warmup_steps, f"{share} of {useful_steps:,} steps"),
        Choice("training.validate_every", interval, f"{math.ceil(steps / interval)} validations"),
        Choice("training.checkpoint_every", saved_every, "with each validation or more often"),
    ]
    if budget.by_clock:
        reason = f"as many as {limit.what} allow; corrected by the clock"
        choices.append(Choice("training.planned_steps", steps, reason))
        most = max(steps, round(steps * recipe.useful_tokens(size) / tokens))
        epochs = recipe.useful_epochs(size.pairs) * size.useful_share
        choices.append(Choice("training.max_steps", most, f"{epochs:.0f} useful epochs"))
        validated = budget.validation_tokens(size, speed)
        if validated < size.validation_tokens:
            pairs = round(validated * size.pairs / size.tokens)
            choices.append(Choice("training.validation_pairs", pairs, "all of them would take too long"))
    elif budget.minutes is not None:
        choices.append(Choice("training.max_steps", steps, f"as many as {limit.what} allow"))
    # If the time ends before the given max_steps, these schedules would not reach zero.
    if budget.unlimited or (limit.is_time and budget.steps is not None):
        reason = "no limit is given" if budget.unlimited else "max_steps may not be reached"
        choices.append(Choice("training.schedule", "inverse_sqrt", reason))
        reason = "the learning rate does not end at zero"
        choices.append(Choice("training.ema_decay", recipe.ema_decay(steps), reason))
    else:
        schedule = "wsd" if budget.by_clock else "cosine"
        choices.append(Choice("training.schedule", schedule, "the number of steps is known"))
    if size.pairs < SMALL_CORPUS:
        reason = f"fewer than {SMALL_CORPUS:,} pairs"
        choices.append(Choice("decoding.length_penalty", LENGTH_PENALTY, reason))
        if budget.device == CPU:  # CUDA graphs do not support it
            choices.append(Choice("decoding.no_repeat_ngram", NO_REPEAT_NGRAM, reason))
    return choices


def choose_optimizer(budget: Budget) -> list[Choice]:
    """The optimizer of a new translation model with `norm: pre` that a single process trains, if it is not
    the default: Muon for runs on a CPU that the clock ends, as measured in
    docs/experiments/automatic-recipe.md, "Muon"."""
    if not budget.by_clock or budget.device != CPU:
        return []
    return [Choice("training.optimizer", "muon", "higher scores in the same time on a CPU")]
