"""Completes the config of a new run: chooses the values that `model.preset: auto` and keys without a value
leave open."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mtrain.config import fine_tuning_recipe, recipe
from mtrain.config.choices import OPEN_IF_NULL, Choice, choose_optimizer, choose_training
from mtrain.config.load import validate
from mtrain.config.recipe import ENDLESS, Budget, CorpusSize
from mtrain.config.schema import Config
from mtrain.config.sections.presets import PRESETS, SIZES
from mtrain.data.epochs.batching import BatchPlan, Division
from mtrain.data.epochs.loader import Loader, StepInput
from mtrain.data.epochs.windows import WindowPlanner
from mtrain.data.prepare import PreparedData
from mtrain.data.rewriting.reencode import Reencoder
from mtrain.distributed.ranks import Ranks
from mtrain.duration import format_duration
from mtrain.errors import is_out_of_memory
from mtrain.tokenizer.tokenizer import Tokenizer, model_config
from mtrain.training.setup.lengths import TrainingLengths
from mtrain.training.setup.micro_batch import micro_batch_tokens
from mtrain.training.setup.run_folder import record_choices
from mtrain.training.setup.timing import Speed, measure_speed
from mtrain.training.step.learner import Learner

log = logging.getLogger(__name__)

Measure = Callable[[Config], Speed]  # of training with a config
# A larger model is timed if the budget suffices at this many times the speed that its number of parameters
# suggests: small models use the hardware poorly.
SPEED_MARGIN = 4
UNKNOWN_STEPS = 12_500  # assumed if nothing limits the number of steps


class Workload(NamedTuple):
    """What a plan needs to know about the data and the machine."""

    size: Callable[[], CorpusSize]
    steps_per_epoch: Callable[[int], int]  # given training.batch_tokens
    speed: Measure
    assumed_speed: float  # before it is measured
    device: recipe.Device = recipe.CPU
    ranks: int = 1


def is_incomplete(config: Config) -> bool:
    """Whether a config leaves values to `complete_config`."""
    training = config.training
    values = training.learning_rate, training.warmup_steps, training.encoder_after
    return config.model.preset == "auto" or None in values


def complete_config(
    config: Config, tokenizer: Tokenizer, data: PreparedData, ranks: Ranks, earlier: Sequence[Choice] = ()
) -> Config:
    """The config of a run with a value for every key. Rank 0 of `ranks` calls this.

    Logs and records what `model.preset: auto` chose, including `earlier` choices. Raises DataError if no pair
    is left, StorageError if the record cannot be written.
    """
    if not is_incomplete(config):
        return config
    # To segment a window again would take long, and each timing would do it.
    corpus = data.train.with_rewrites(lambda rewrite: not isinstance(rewrite, Reencoder))

    def speed(sized: Config) -> Speed:
        log.info("timing some training steps")
        architecture = model_config(sized.model, tokenizer, sized.data.max_length)

        def steps(learner: Learner) -> Iterator[StepInput]:
            micro_batch = micro_batch_tokens(sized, data.train, learner, ranks.local_size)
            division = Division(micro_batch, len(learner.replicas), ranks.rank, ranks.size)
            planner = WindowPlanner(corpus, sized, division)
            return Loader(planner, tokenizer, learner.device, learner.layout_for).steps()

        training, alone = sized.training, ranks.size == 1
        return measure_speed(architecture, training, ranks.device, steps, alone, training.max_minutes)

    lengths = TrainingLengths.of_data(data, config).of_examples(config.model)
    on_cpu = ranks.device.type == "cpu"
    work = make_workload(config, lengths, speed, assumed_speed_of(ranks), on_cpu, ranks.size)
    completed, choices = choose_values(config, work)
    if config.model.preset == "auto":
        choices = [*earlier, *choices]
        log_choices(choices)
        record_choices(Path(config.run_dir), choices)
    return completed


def assumed_speed_of(ranks: Ranks) -> float:
    """The `assumed_speed` of all ranks. Ranks on one CPU share its speed."""
    on_cpu = ranks.device.type == "cpu"
    return recipe.assumed_speed(ranks.device.type, ranks.size // ranks.local_size if on_cpu else ranks.size)


def make_workload(
    config: Config, lengths: TrainingLengths, speed: Measure, assumed: float, on_cpu: bool, ranks: int = 1
) -> Workload:
    """The workload of training on pairs of these lengths. For `speed` and `assumed` see `Workload`."""

    @cache
    def plan(batch_tokens: int) -> BatchPlan:
        return lengths.plan(batch_tokens, max(batch_tokens, config.longest_sequence))

    def size() -> CorpusSize:
        shares = np.minimum(lengths.weights, 1) * lengths.distinct
        pairs = float(shares.sum())
        tokens = float((lengths.target * shares).sum())
        validated = min(lengths.validation_pairs, config.training.validation_pairs or ENDLESS)
        planned = plan(max(config.training.batch_tokens, config.data.max_length)).tokens[1]
        return CorpusSize(
            pairs=round(pairs / lengths.share),
            tokens=round(tokens / lengths.share),
            epoch_tokens=round(float(planned / lengths.share)),
            validation_tokens=round(validated * tokens / pairs),
        )

    def steps_per_epoch(batch_tokens: int) -> int:
        return lengths.steps_in_epoch(plan(batch_tokens))

    return Workload(size, steps_per_epoch, speed, assumed, recipe.CPU if on_cpu else recipe.GPU, ranks)


def choose_values(config: Config, work: Workload) -> tuple[Config, list[Choice]]:
    """The config with a value for every key, and what `model.preset: auto` chose.

    Keys that the config gives do not change. The speed is measured only if the time is limited or nothing is.
    """
    choices: list[Choice] = []
    if config.model.preset == "auto":
        choices = [choice for choice in _choose(config, work) if not _is_given(config, choice.key)]
        raw = config.model_dump(mode="json", exclude_unset=True)
        raw["model"]["preset"] = None  # unless it is one of the choices
        for choice in choices:
            section, key = choice.key.split(".")
            raw.setdefault(section, {})[key] = choice.value
        config = validate(Config, raw, "the automatic recipe")
    training = config.training
    limits = [steps for steps in (training.max_steps, training.planned_steps) if steps is not None]
    if training.max_epochs is not None:
        limits.append(training.max_epochs * work.steps_per_epoch(training.batch_tokens))
    steps = min(limits, default=UNKNOWN_STEPS)
    rate, warmup, encoder_after = training.learning_rate, training.warmup_steps, training.encoder_after
    if rate is None:
        rates = fine_tuning_recipe if training.init_from else recipe
        rate = rates.peak_rate(config.model.d_model)
    if warmup is None:
        warmup = recipe.warmup(steps)
    if encoder_after is None:
        encoder_after = recipe.encoder_after(warmup, steps) if _may_collapse(config) else 0
    values = {"learning_rate": rate, "warmup_steps": warmup, "encoder_after": encoder_after}
    return config.model_copy(update={"training": training.model_copy(update=values)}), choices


def _may_collapse(config: Config) -> bool:
    """Whether the encoder output of all tokens may become equal before the decoder has learned to attend; see
    docs/experiments/recipes.md. This happens neither without a decoder nor in fine-tuning."""
    model, is_new = config.model, config.training.init_from is None
    return is_new and model.norm == "post" and not model.is_classifier


def _is_given(config: Config, key: str) -> bool:
    """Whether a config gives a key, so that it is not chosen. `average_checkpoints` counts as `ema_decay`,
    because they exclude each other."""
    section, name = key.split(".")
    values = getattr(config, section)
    if key == "training.ema_decay" and "average_checkpoints" in config.training.model_fields_set:
        return True
    if section == "training" and name in OPEN_IF_NULL and getattr(values, name) is None:
        return False
    return key != "model.preset" and name in values.model_fields_set


def _choose(config: Config, work: Workload) -> list[Choice]:
    """All values of the recipe, also for keys that the config gives."""
    size, given = work.size(), Budget.of(config, work.device)
    budget, is_fine_tuning = given, config.training.init_from is not None
    if is_fine_tuning:
        size, budget = fine_tuning_recipe.plan(size, given)
    timer = _Timer(config, budget, size, work.speed, work.assumed_speed)
    if is_fine_tuning or config.model.model_fields_set.issuperset(SIZES):
        presets, sizes = [], smallest_sizes(config)  # all of which are given
    else:
        preset, reason = _choose_preset(config, size, timer)
        presets, sizes = [Choice("model.preset", preset, reason)], _sizes(config, preset)
    batch = timer.settle(sizes)
    tokens = budget.limit(size, timer.speed).tokens
    steps = max(1, round(tokens / size.epoch_tokens * work.steps_per_epoch(batch)))
    steps = min(steps, budget.steps or steps)
    if budget.unlimited:
        message = "no limit: training ends when validation stops improving, perhaps after %s"
        log.info(message, format_duration(tokens / timer.speed))
    choices = choose_training(size, budget, timer.speed, batch, steps, sizes["d_model"])
    is_new = not is_fine_tuning and config.model.norm == "pre" and not config.model.is_classifier
    if is_new and work.ranks == 1:  # each rank would compute the whole update, in fp32
        choices += choose_optimizer(budget)
    if is_fine_tuning:
        choices = fine_tuning_recipe.adapt(choices, given, steps, sizes["d_model"])
    return [*presets, *choices]


def _sizes(config: Config, preset: str) -> Mapping[str, int]:
    """The sizes of a preset, overridden by the sizes that the config gives."""
    given = {key: getattr(config.model, key) for key in SIZES if key in config.model.model_fields_set}
    return PRESETS[preset] | given


def smallest_sizes(config: Config) -> Mapping[str, int]:
    """The sizes of the smallest preset, overridden by the sizes that the config gives."""
    return _sizes(config, recipe.presets_for(0)[0])


def _choose_preset(config: Config, size: CorpusSize, timer: "_Timer") -> tuple[str, str]:
    """The largest preset that the corpus can fill and the budget can train, and the reason."""
    chosen, *larger = recipe.presets_for(size.pairs)
    reason = f"{size.pairs:,} pairs"
    for name in larger:
        sizes = _sizes(config, name)
        heads = sizes["heads"] * (2 if config.model.positions == "rotary" else 1)  # each has an even width
        if sizes == _sizes(config, chosen) or sizes["d_model"] % heads:
            continue
        if not timer.can_train(sizes, _sizes(config, chosen)):
            return chosen, f"{reason}; the limit or the memory is too small for {name}"
        chosen = name
    return chosen, reason


@dataclass
class _Timer:
    """Measures the training speed of models of different sizes, once each, if the plan depends on it."""

    config: Config
    budget: Budget
    corpus: CorpusSize
    measure: Measure
    speed: float  # target tokens/s, of the last model
    slowdown: float = 1.0  # see `Speed`
    _speeds: dict[tuple[object, ...], Speed] = field(default_factory=dict)

    def settle(self, sizes: Mapping[str, int], rounds: int = 3) -> int:
        """`training.batch_tokens` for a model. The batch depends on the speed, which depends on the batch, so
        both are adjusted in turn."""
        batch = self.budget.batch(self.corpus, self.speed)
        if self.budget.minutes is None and not self.budget.unlimited:
            return batch
        for _ in range(rounds):
            self.speed, self.slowdown = self._time(sizes, batch)
            if self.budget.batch(self.corpus, self.speed) == batch:
                break
            batch = self.budget.batch(self.corpus, self.speed)
        return batch

    def can_train(self, sizes: Mapping[str, int], smaller: Mapping[str, int]) -> bool:
        """Whether the budget suffices for a model, given a `smaller` one for which it does. If the speed is
        measured, the model must also fit in memory."""
        if self.budget.minutes is None and not self.budget.unlimited:
            return self._suffices(sizes)
        before = self.speed
        if self.budget.minutes is not None:
            self.settle(smaller, rounds=1)
            before = self.speed
            small, large = recipe.parameters(smaller), recipe.parameters(sizes)
            self.speed = before * SPEED_MARGIN * small / large
        try:
            if self._suffices(sizes):  # at the speed that its size suggests
                self.settle(sizes, rounds=1)
                if self._suffices(sizes):  # at the measured speed
                    return True
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
        self.speed = before
        return False

    def _suffices(self, sizes: Mapping[str, int]) -> bool:
        """Whether the budget suffices without other processes. They may end during the run, and a size chosen
        for the current load would differ between runs."""
        speed = self.speed * self.slowdown
        return recipe.suffices(self.budget.limit(self.corpus, speed).tokens, sizes)

    def _time(self, sizes: Mapping[str, int], batch: int) -> Speed:
        key = (*sizes.items(), batch)
        if key not in self._speeds:
            sized = {**sizes, "preset": None, "activation_dropout": 0.0}
            model = self.config.model.model_copy(update=sized)
            training = self.config.training.model_copy(update={"batch_tokens": batch})
            config = self.config.model_copy(update={"model": model, "training": training})
            self._speeds[key] = self.measure(config)
        return self._speeds[key]


def log_choices(choices: Sequence[Choice]) -> None:
    """Log the values that were chosen, with reasons, as a table; nothing if the config gives all of them."""
    if not choices:
        return
    log.info("mtrain chose these values; to change one, give the key in the config:")
    widths = [max(len(str(choice[column])) for choice in choices) for column in (0, 1)]
    for key, value, reason in choices:
        log.info("  %s  %s  %s", key.ljust(widths[0]), str(value).rjust(widths[1]), reason)
