"""The formulas of the automatic recipe agree with published recipes and change in the right direction."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from mtrain.config.recipe import (
    CPU,
    GPU,
    Budget,
    CorpusSize,
    choose_batch,
    choose_vocab_size,
    dropout,
    ema_decay,
    parameters,
    peak_rate,
    presets_for,
    suffices,
    useful_epochs,
    warmup,
)
from mtrain.config.sections.presets import PRESETS

SIZE = CorpusSize(pairs=29_000, tokens=430_000, epoch_tokens=430_000, validation_tokens=15_000)


@pytest.mark.parametrize(
    ("pairs", "vocabulary", "largest"),
    [
        (200, 2_000, "micro"),
        (5_000, 4_000, "tiny"),
        (29_000, 8_000, "tiny"),  # Multi30k
        (160_000, 12_000, "small"),  # IWSLT14, Tatoeba
        (4_500_000, 32_000, "base"),  # WMT14
        (20_000_000, 32_000, "big"),
    ],
)
def test_vocabulary_and_largest_model_of_well_known_corpora(pairs, vocabulary, largest):
    assert choose_vocab_size(pairs, tokens=1e12) == vocabulary
    assert presets_for(pairs)[-1] == largest


@pytest.mark.parametrize(
    ("pairs", "tokens", "vocabulary"),
    [
        (4_500_000, 2e7, 32_000),
        (4_500_000, 1e7, 12_000),
        (160_000, 8e6, 12_000),
        (160_000, 7e6, 8_000),
        (29_000, 1e5, 8_000),
        (1_000, 1e5, 2_000),
    ],
)
def test_vocabularies_above_8_000_need_long_runs(pairs, tokens, vocabulary):
    assert choose_vocab_size(pairs, tokens) == vocabulary


@pytest.mark.parametrize("preset", PRESETS)
def test_parameters_are_those_of_the_matrices_of_a_transformer_of_pytorch(preset):
    sizes = PRESETS[preset]
    layers = sizes["encoder_layers"], sizes["decoder_layers"]
    with torch.device("meta"):
        model = nn.Transformer(sizes["d_model"], sizes["heads"], *layers, sizes["ffn_dim"], batch_first=True)
    assert parameters(sizes) == sum(weight.numel() for weight in model.parameters() if weight.dim() > 1)


def test_a_model_needs_ten_tokens_for_each_parameter():
    needed = 10 * parameters(PRESETS["small"])
    assert suffices(needed, PRESETS["small"]) and not suffices(needed - 1, PRESETS["small"])


@pytest.mark.parametrize(
    ("width", "published"),
    [(128, 0.005), (512, 0.0007), (1024, 0.0005)],  # Wu et al. 2021; Vaswani et al. 2017; Ott et al. 2018
)
def test_peak_rates_are_within_half_and_twice_the_published_ones(width, published):
    assert published / 2 <= peak_rate(width) <= 2 * published


@pytest.mark.parametrize(
    ("tokens", "batch"),
    [
        (0, 1024),
        (10_000_000, 1024),  # the best on Tatoeba
        (27_000_000, 2048),
        (2_500_000_000, 16384),  # WMT14, 100,000 steps: 25,000 in Vaswani et al. (2017)
        (1e12, 32768),
    ],
)
def test_batches_for_a_number_of_tokens(tokens, batch):
    assert choose_batch(tokens) == batch


@given(st.floats(0.01, 1e4), st.floats(0.01, 1e4))
def test_more_epochs_never_reduce_dropout(one, other):
    assert 0 <= dropout(min(one, other)) <= dropout(max(one, other)) <= 0.3


@given(st.integers(1, 10**9), st.integers(1, 10**9), st.floats(1, 1e12))
def test_larger_corpora_get_fewer_epochs_and_no_smaller_model_or_vocabulary(one, other, tokens):
    fewer, more = sorted((one, other))
    assert useful_epochs(fewer) >= useful_epochs(more) > 0
    assert presets_for(more)[: len(presets_for(fewer))] == presets_for(fewer)
    assert choose_vocab_size(fewer, tokens) <= choose_vocab_size(more, tokens)


@pytest.mark.parametrize("steps", [1, 12, 1_000, 300_000])
def test_warm_up_is_a_small_part_of_a_run(steps):
    assert 1 <= warmup(steps) <= max(1, steps / 10)


@pytest.mark.parametrize(("steps", "decay"), [(1, 0.9), (2_000, 0.99), (20_000, 0.999), (10**6, 0.9999)])
def test_weights_are_averaged_over_a_twentieth_of_a_run(steps, decay):
    assert ema_decay(steps) == decay


@given(st.floats(0, 1e12))
def test_batches_on_a_gpu_are_no_smaller_than_on_a_cpu_and_25_000_or_more_for_large_corpora(tokens):
    assert choose_batch(tokens, CPU) <= choose_batch(tokens, GPU) <= 4 * choose_batch(tokens, CPU)
    assert choose_batch(tokens, GPU) == choose_batch(tokens, CPU) or tokens > 1e8
    assert choose_batch(tokens, GPU) >= 25_000 or tokens < 2e9


def budget(steps=None, epochs=None, minutes=None, batch_tokens=None, device=CPU) -> Budget:
    return Budget(steps, epochs, minutes, batch_tokens, device=device)


def test_the_tokens_of_a_budget():
    assert budget(epochs=10).limit(SIZE, speed=1.0).tokens == 4_300_000
    assert budget(steps=100, batch_tokens=500).limit(SIZE, speed=1.0).tokens == 50_000
    assert budget(minutes=100).limit(SIZE, speed=1_000).tokens == pytest.approx(6e6, rel=0.05)
    assert budget(minutes=10, epochs=1).limit(SIZE, speed=1_000).tokens == 430_000  # the first limit reached
    assert budget().limit(SIZE, speed=1.0).tokens == pytest.approx(useful_epochs(29_000) * 430_000)


def test_time_beyond_the_useful_epochs_is_not_used():
    assert budget(minutes=10_000).limit(SIZE, speed=1_000).tokens == budget().limit(SIZE, speed=1_000).tokens


@pytest.mark.parametrize("device", [CPU, GPU])
@pytest.mark.parametrize("steps", [100, 3_000, 10_000])
def test_the_batch_for_a_number_of_steps_is_that_for_their_tokens(steps, device):
    limited = budget(steps=steps, device=device)
    tokens = limited.limit(SIZE, speed=1.0).tokens
    assert limited.batch(SIZE, speed=1.0) == choose_batch(tokens, device) == tokens / steps


@given(st.integers(10**6, 10**11), st.integers(10, 10**6), st.floats(1e4, 3e6))
def test_validations_on_a_gpu_take_a_tenth_of_the_time_or_are_few(tokens, validation_tokens, speed):
    size = SIZE._replace(validation_tokens=validation_tokens)
    count = budget(device=GPU).validations(tokens, size, speed)
    seconds = count * (4 + 4 * validation_tokens / speed)
    assert 3 <= count <= 20 and (count == 3 or seconds <= 0.12 * tokens / speed)


@pytest.mark.parametrize("limit", [{"steps": 50_000}, {"steps": 10**6}, {"epochs": 1_000}])
def test_more_steps_than_are_useful_do_not_enlarge_the_batch(limit):
    assert budget(**limit).batch(SIZE, speed=1.0) == budget().batch(SIZE, speed=1.0)


def test_a_given_batch_is_kept():
    assert budget(minutes=10, batch_tokens=3_000).batch(SIZE, speed=1_000) == 3_000
