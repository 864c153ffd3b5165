"""Predicted memory and FLOPs agree with real steps; the other numbers follow from the plan of the batches."""

import itertools

import numpy as np
import pytest

from mtrain.config.sections.model import ModelConfig
from mtrain.config.sections.training import TrainingConfig
from mtrain.model.transformer import Transformer
from mtrain.planning.cost import Shape, TrainingDevice, activation_bytes, count_parameters
from mtrain.planning.estimate import Estimator
from mtrain.planning.hardware import UTILIZATION, find_hardware
from mtrain.training.setup.lengths import TrainingLengths
from mtrain.training.setup.micro_batch import activation_bytes as measured_activation_bytes
from mtrain.training.step.learner import Learner
from tests.support import costs

SIZES = {"d_model": 32, "heads": 4, "encoder_layers": 2, "decoder_layers": 3, "ffn_dim": 80}
WORDS = {"source_vocab_size": 90, "target_vocab_size": 110, "max_positions": 80, "tie_embeddings": "decoder"}
CHOICES = [
    {},
    {"dropout": 0.0},
    {"dropout": 0.0, "activation_dropout": 0.2},
    {"activation_dropout": 0.0},
    {"attention_dropout": 0.1},
    {"activation": "gelu"},
    {"activation": "silu", "dropout": 0.0},
    {"activation": "swiglu"},
    {"norm": "post"},
    {"positions": "learned"},
    {"positions": "rotary"},
    {"output_bias": True},
    {"tie_embeddings": "none"},
    {"alignment_head": True},
    {"alignment_head": True, "attention_dropout": 0.1},
]
LOW_PRECISION_CASES = [(choice, "bf16", (80, 72)) for choice in CHOICES[::3]]


@pytest.mark.parametrize(
    ("choice", "precision", "lengths"),
    [
        pytest.param(
            *case,
            marks=[] if case[1:] == ("fp32", (12, 9)) or case in LOW_PRECISION_CASES else pytest.mark.slow,
        )
        for case in itertools.product(CHOICES, ["fp32", "bf16"], [(12, 9), (80, 72)])
    ],
)
def test_activations_take_as_much_memory_as_predicted(choice, precision, lengths):
    """For short and for long sentences: a CPU computes attention by different kernels."""
    config = ModelConfig(**SIZES | WORDS | choice)
    source, target = lengths
    batch = costs.random_batch(16, source, target, vocabulary=90)
    learner = Learner(Transformer(config).train(), TrainingConfig(max_steps=1, precision=precision))
    measured = measured_activation_bytes(learner, batch)
    device = TrainingDevice(find_hardware("cpu"), precision)
    predicted = activation_bytes(config, Shape.of_lengths(16, source, target), device)
    assert predicted == pytest.approx(measured, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("preset", costs.VOCABULARIES)
def test_steps_of_the_presets_cost_what_is_predicted(preset, precision):
    config, architecture = costs.make_config(preset, training={"precision": precision})
    predicted, measured = (costs.predict(config, architecture), costs.measure(config, architecture))
    assert predicted.flops == pytest.approx(measured.flops, rel=0.001)
    assert predicted.memory == pytest.approx(measured.memory, rel=0.15)


@pytest.mark.parametrize(
    ("training", "model"),
    [
        pytest.param({}, {}, marks=pytest.mark.slow, id="plain"),
        pytest.param({"ema_decay": 0.99}, {}, marks=pytest.mark.slow, id="average"),
        pytest.param({"r_drop": 5.0}, {}, id="r_drop"),
        pytest.param({}, {"output_bias": True}, marks=pytest.mark.slow, id="bias"),
    ],
)
def test_a_small_step_costs_what_is_predicted(training, model, monkeypatch):
    monkeypatch.setattr(costs, "PAIRS", 24)
    monkeypatch.setitem(costs.VOCABULARIES, "tiny", 500)
    recipe = {"precision": "fp32", **training}
    config, architecture = costs.make_config("tiny", training=recipe, model=model)
    predicted, measured = (costs.predict(config, architecture), costs.measure(config, architecture))
    assert predicted.flops == measured.flops
    assert predicted.memory == pytest.approx(measured.memory, rel=0.15)


def estimator(training=None, memory=10**12, share=1.0, length=20, devices=1) -> Estimator:
    """The estimator of a tiny model on a GPU with some memory, and 64 pairs of some length."""
    recipe = {"batch_tokens": 64 * 32, "micro_batch_tokens": 64 * 32, **(training or {})}
    config, architecture = costs.make_config("tiny", training=recipe)
    lengths = np.full(64, length)
    pairs = TrainingLengths(lengths, lengths, np.ones(64), share, share == 1, 0, (1, 0), "test")
    device = TrainingDevice(find_hardware("a100")._replace(memory=memory), "bf16")
    return Estimator(config, architecture, pairs, device, devices)


def test_frozen_parts_have_no_gradients_and_no_moments():
    trained, frozen = estimator().memory(), estimator({"freeze": ["embeddings", "encoder"]}).memory()
    assert frozen["weights"] == trained["weights"] == trained["gradients"]
    parameters = count_parameters(estimator().architecture)
    assert frozen["gradients"] == 4 * parameters["decoder"]
    assert frozen["optimizer"] == 2 * frozen["gradients"]


def test_muon_takes_longer_by_its_products():
    """Five times three products of square blocks, two FLOPs for each multiplication."""
    plain, muon = (estimator({"optimizer": name}) for name in ("adamw", "muon"))
    sizes = plain.architecture
    width, inner = sizes.d_model, sizes.ffn_dim
    blocks = sizes.encoder_layers * (4 + 2 * inner // width) + sizes.decoder_layers * (8 + 2 * inner // width)
    rate = UTILIZATION * find_hardware("a100").flops(2)
    longer = muon.time().update - plain.time().update
    assert longer == pytest.approx(blocks * 5 * 3 * 2 * width**3 / rate)


def test_other_pairs_may_be_as_long_as_is_possible():
    whole, part = estimator(), estimator(share=0.5)
    assert (whole.longest, part.longest) == (20, 32)
    assert part.memory()["activations"] > whole.memory()["activations"]
    assert part.epoch().steps == 2 * whole.epoch().steps and part.epoch().pairs == 128


def test_an_automatic_micro_batch_is_reduced_until_it_fits():
    needed = estimator().memory()["total"]
    automatic = {"micro_batch_tokens": "auto"}
    sizes = [estimator(automatic, memory).micro_batch_tokens for memory in (10 * needed, needed, needed // 4)]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] == 64 * 32 and sizes[2] < sizes[0]


def test_the_largest_micro_batch_that_fits_is_found():
    roomy = estimator()
    needed = roomy.memory()["total"]
    short = estimator(memory=needed)  # of which a part is reserved
    assert roomy.fits(roomy.memory()) and not short.fits(short.memory())
    smaller = short.largest_fitting_micro_batch()
    assert smaller is not None and smaller < short.micro_batch_tokens
    again = estimator({"micro_batch_tokens": smaller}, needed)
    assert again.fits(again.memory())
    assert estimator(memory=1000).largest_fitting_micro_batch() is None
    memories = np.linspace(needed / 5, needed, 50)
    found = {estimator(memory=memory, length=10).largest_fitting_micro_batch() for memory in memories}
    assert min(found - {None}) == 32  # as data.max_length demands, although the longest pair has 10 tokens


def test_devices_divide_the_batch():
    one, four = (estimator(share=0.5, devices=devices) for devices in (1, 4))
    assert 3 < one.memory()["activations"] / four.memory()["activations"] < 4  # both copy the weights to bf16
    assert one.step().flops == pytest.approx(four.step().flops)
    assert one.step().micro_batches == four.step().micro_batches == 1
