"""The recipe that `model.preset: auto` chooses: formulas of the corpus and the budget.

The comments name what each formula is based on; docs/experiments records the runs.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

from mtrain.config.schema import Config

PEAK_RATE = 0.004  # of a model of width 128
WARMUP = 0.08  # share of the planned steps
# With a longer warm-up, the rate rises slowly enough to train the encoder from the first step;
# docs/experiments/recipes.md has the runs.
MOST_ENCODER_AFTER = 1000
# Embeddings excluded; see docs/experiments/automatic-recipe.md, and Hoffmann et al. 2022, section 3: 20.
TOKENS_PER_PARAMETER = 10
BEAM_COST = 0.6  # of each further hypothesis: with beam size 5, decoding took 3.4 times as long
VALIDATIONS = (3, 20)  # minimum and maximum number
LEAST_VALIDATION_PAIRS = 200  # that are drawn for a validation if the time is short
# Small corpora need small vocabularies (Gowda and May, "Finding the Optimal Vocabulary Size for Neural
# Machine Translation", 2020), but not too small ones: with 1,000 pairs, 2,000 is better than 1,000
# (docs/experiments/vocabularies.md). On Multi30k (29,000 pairs), 12,000 is 0.4 BLEU better than 8,000 after
# the same number of steps, but these take 1.2 times as long. Millions of pairs: as in Vaswani et al. (2017).
VOCABULARIES = ((2_000, 2_000), (10_000, 4_000), (100_000, 8_000), (1_000_000, 12_000), (math.inf, 32_000))
# A vocabulary larger than SUFFICIENT_VOCABULARY needs this many target tokens for each entry. In five minutes
# on Tatoeba, 8,000 is as good as 4,000 in fp32, and better in bf16; 12,000 is better only in bf16
# (docs/experiments/vocabularies.md).
TOKENS_PER_ENTRY, SUFFICIENT_VOCABULARY = 600, 8_000
TOKENS_PER_PAIR = 20  # target tokens, assumed before there is a tokenizer
ASSUMED_SPEEDS = {"cpu": 10_000.0, "gpu": 200_000.0}  # target tokens/s, before it is measured
# The largest model for fewer than so many pairs. Multi30k: models larger than `tiny` only overfit (Wu et al.,
# ACL 2021). Millions of pairs: base and big, as in Vaswani et al. (2017).
LARGEST = ((2_000, "micro"), (100_000, "tiny"), (1_000_000, "small"), (10_000_000, "base"), (math.inf, "big"))


class Device(NamedTuple):
    """What the recipe assumes of a kind of device."""

    batch_rules: tuple[tuple[float, float], ...]  # see `choose_batch`
    largest_batch: int
    validation_share: float  # of the training time
    validation_cost: float  # time to decode a token by greedy search and score it, relative to training on it
    validation_seconds: float  # of each validation besides: to prepare it, for metrics, and to publish


# Tatoeba, 10 million tokens: 1,024; docs/experiments has the runs. Multi30k, 10 million: 2,048 is 1.0 BLEU
# better than 4,096. WMT14, 2.5 billion: 25,000 in Vaswani et al. (2017).
CPU = Device(((0.4, 1 / 2),), 32_768, validation_share=0.05, validation_cost=2, validation_seconds=0)
# Up to 100 million tokens (4,096) the same batches, then larger ones, which a GPU computes faster: an H200
# trained `base` 5 times as fast with 25,000 as with 4,096 tokens (docs/benchmarks.md; without CUDA graphs,
# which should narrow the gap). WMT14: 32,768. Costs of a validation are assumed: decoding is slower than
# training, and the time to write files counts.
GPU = Device(
    (*CPU.batch_rules, (0.019, 2 / 3)), 65_536, validation_share=0.1, validation_cost=4, validation_seconds=4
)
ENDLESS = 10**12  # larger limits on steps and epochs count as this one


def assumed_speed(device_type: str, devices: int = 1) -> float:
    """The target tokens/s that are assumed for some devices of a kind, such as `cuda`, before they are
    measured."""
    return devices * ASSUMED_SPEEDS["cpu" if device_type == "cpu" else "gpu"]


class CorpusSize(NamedTuple):
    """The size of the training corpus and of the validation set, in pairs and in target tokens with EOS."""

    pairs: int  # distinct training pairs of an epoch, each counted at most once, whatever its `weight`
    tokens: int  # of these pairs
    epoch_tokens: int  # of all pairs of an epoch, including repetitions
    validation_tokens: int
    useful_share: float = 1.0  # of the epochs that are useful for a new model


class Limit(NamedTuple):
    """What limits a run."""

    tokens: float  # target tokens that the run trains on, about
    what: str
    is_time: bool = False


class Budget(NamedTuple):
    """The limits that a config gives, and its batch size. Without a limit, a run ends when validation stops
    improving."""

    steps: int | None
    epochs: int | None
    minutes: float | None
    batch_tokens: int | None
    least_batch: int = 0  # tokens of the longest pair, which must fit in a batch
    validation_beam_size: int = 1
    device: Device = CPU

    @classmethod
    def of(cls, config: Config, device: Device = CPU) -> "Budget":
        """The budget of a config, for training on a kind of device."""
        training = config.training
        return cls(
            steps=training.max_steps and min(training.max_steps, ENDLESS),
            epochs=training.max_epochs and min(training.max_epochs, ENDLESS),
            minutes=training.max_minutes,
            batch_tokens=training.batch_tokens if "batch_tokens" in training.model_fields_set else None,
            least_batch=config.data.max_length,
            validation_beam_size=training.validation_beam_size,
            device=device,
        )

    @property
    def unlimited(self) -> bool:
        """Whether no limit is given."""
        return self.steps is None and self.epochs is None and self.minutes is None

    @property
    def by_clock(self) -> bool:
        """Whether only the time is limited, so that the clock ends the run."""
        return self.minutes is not None and self.steps is None and self.epochs is None

    def limit(self, size: CorpusSize, speed: float) -> Limit:
        """What limits a run at `speed` target tokens/s."""
        limits: list[Limit] = []
        if self.steps is not None:
            useful = choose_batch(useful_tokens(size), self.device)
            batch = min(_steady_batch(self.steps, self.device), useful)
            batch = self.batch_tokens or max(batch, self.least_batch)
            limits.append(Limit(self.steps * batch, f"{self.steps:,} steps"))
        if self.epochs is not None:
            limits.append(Limit(self.epochs * size.epoch_tokens, f"{self.epochs:,} epochs"))
        if not limits:
            epochs = useful_epochs(size.pairs) * size.useful_share
            limits.append(Limit(useful_tokens(size), f"{epochs:.0f} useful epochs"))
        if self.minutes is not None:
            allowed = self.minutes * 60 * speed
            validation = self._validation_cost(self.validation_tokens(size, speed), speed)
            tokens = max(allowed - self.validations(allowed, size, speed) * validation, allowed / 2)
            limits.append(Limit(tokens, f"{self.minutes:g} minutes", is_time=True))
        return min(limits)

    def batch(self, size: CorpusSize, speed: float) -> int:
        """`training.batch_tokens`: as given, or chosen. A run that is longer than is useful gets the size for
        its useful part, because it may end early."""
        tokens = min(self.limit(size, speed).tokens, useful_tokens(size))
        return self.batch_tokens or max(choose_batch(tokens, self.device), self.least_batch)

    def validations(self, tokens: float, size: CorpusSize, speed: float) -> int:
        """The number of validations of a run that trains on `tokens` target tokens at `speed` tokens/s."""
        cost = self._validation_cost(max(self.validation_tokens(size, speed), 1), speed)
        return round(min(max(self.device.validation_share * tokens / cost, VALIDATIONS[0]), VALIDATIONS[1]))

    def validation_tokens(self, size: CorpusSize, speed: float) -> float:
        """Target tokens of a validation: all or, if the clock ends the run, at most so many that the least
        number of validations takes its share of the time."""
        if not self.by_clock or self.minutes is None:
            return size.validation_tokens
        allowed = self.device.validation_share * self.minutes * 60 * speed / VALIDATIONS[0]
        affordable = (allowed - self.device.validation_seconds * speed) / self._decoding_cost
        least = LEAST_VALIDATION_PAIRS * size.tokens / max(size.pairs, 1)
        return min(size.validation_tokens, max(affordable, least))

    def _validation_cost(self, tokens: float, speed: float) -> float:
        """How many target tokens training takes in the time of a validation on `tokens` target tokens."""
        return self._decoding_cost * tokens + self.device.validation_seconds * speed

    @property
    def _decoding_cost(self) -> float:
        return self.device.validation_cost * (1 + BEAM_COST * (self.validation_beam_size - 1))


def choose_vocab_size(pairs: int, tokens: float) -> int:
    """The vocabulary size for a number of training pairs and a run on `tokens` target tokens in all, if the
    text is written in alphabets; see `train_tokenizer`."""
    largest = next(size for below, size in VOCABULARIES if pairs < below)
    affordable = [size for _, size in VOCABULARIES if size * TOKENS_PER_ENTRY <= tokens]
    return min(largest, max([SUFFICIENT_VOCABULARY, *affordable]))


def useful_epochs(pairs: int) -> float:
    """The number of epochs that a schedule is planned for, at most: more would only overfit.

    166 for a thousand pairs, 61 for Multi30k (29,000), 21 for a million, 9 for 20 million.
    """
    return 60 * math.pow(30_000 / max(pairs, 1), 0.3)


def useful_tokens(size: CorpusSize) -> float:
    """The number of target tokens in the useful epochs of a corpus."""
    return useful_epochs(size.pairs) * size.useful_share * size.tokens


def parameters(sizes: Mapping[str, int]) -> int:
    """The number of parameters in matrices of a model with these sizes (`SIZES`), embeddings excluded."""
    attention, feed_forward = 4 * sizes["d_model"] ** 2, 2 * sizes["d_model"] * sizes["ffn_dim"]
    encoder, decoder = attention + feed_forward, 2 * attention + feed_forward
    return sizes["encoder_layers"] * encoder + sizes["decoder_layers"] * decoder


def presets_for(pairs: int) -> list[str]:
    """The presets that may be chosen for a number of training pairs, smallest first."""
    names = [name for _, name in LARGEST]
    return names[: 1 + next(i for i, (below, _) in enumerate(LARGEST) if pairs < below)]


def suffices(tokens: float, sizes: Mapping[str, int]) -> bool:
    """Whether a number of target tokens is enough to train a model with these sizes."""
    return tokens >= TOKENS_PER_PARAMETER * parameters(sizes)


def choose_batch(tokens: float, device: Device = CPU) -> int:
    """`training.batch_tokens` of a run on `tokens` target tokens in all: a power of two near 0.4 of their
    square root, or on a GPU near 0.019 of the cube root of their square, if that is more."""
    return _power_of_two(max(factor * tokens**power for factor, power in device.batch_rules), device)


def _steady_batch(steps: int, device: Device) -> int:
    """The batch b of a run of some steps that is `choose_batch` of its tokens, steps * b."""
    solutions = ((factor * steps**power) ** (1 / (1 - power)) for factor, power in device.batch_rules)
    return _power_of_two(max(solutions), device)


def _power_of_two(number: float, device: Device) -> int:
    return min(max(1 << round(math.log2(max(number, 1))), 1024), device.largest_batch)


def peak_rate(width: int) -> float:
    """The peak learning rate of a model of a width (`d_model`): 0.004 for `tiny`, 0.001 for `base`.

    It is inversely proportional to the width (Yang et al., "Tensor Programs V", 2022).
    """
    return float(f"{PEAK_RATE * 128 / width:.2g}")


def warmup(steps: int) -> int:
    """The warm-up steps of a run of `steps` steps."""
    return max(1, round(WARMUP * steps))


def encoder_after(warmup_steps: int, steps: int) -> int:
    """The number of initial steps in which the encoder of a new post-norm model is frozen, in a run of
    `steps` steps."""
    return min(2 * warmup_steps, MOST_ENCODER_AFTER, steps // 4)


def ema_decay(steps: int) -> float:
    """The decay of a moving average over about a twentieth of a run, but between 10 and 10,000 steps."""
    return round(1 - 1 / min(max(steps / 20, 10), 10_000), 5)


def dropout(epochs: float) -> float:
    """The dropout rate for a number of epochs: the more often a pair is seen, the more is needed.

    Multi30k: 0.2 is better than 0.15 for 38 epochs, and 0.15 is better than 0.3 for 24.
    """
    return round(min(max(0.1 + 0.05 * math.log2(max(epochs, 1) / 10), 0.0), 0.3), 2)
