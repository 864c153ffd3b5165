"""Planning a run: every key gets a valid value, given keys stay, and the plan fits the budget."""

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mtrain.config.load import validate
from mtrain.config.presets import PRESETS, SIZES
from mtrain.config.recipe import AUTOMATIC, CorpusSize
from mtrain.config.schema import Config
from mtrain.training.plan import Workload, plan_run
from mtrain.training.schedule import learning_rate

DATA = {"source_lang": "en", "target_lang": "de", "train": {"toy": "train"}, "validation": {"holdout": 10}}
MULTI30K = CorpusSize(29_000, 430_000, 15_000)


def config(**sections: Any) -> Config:
    return validate(Config, {"run_dir": "runs/x", "data": DATA, **sections}, "test")


def workload(size: CorpusSize = MULTI30K, operations: float = 1e11) -> Workload:
    """A machine that takes `operations` multiplications a second, and steps that are full."""

    def speed(sized: Config) -> float:
        model = sized.model
        encoder = model.encoder_layers * (4 * model.d_model**2 + 2 * model.d_model * model.ffn_dim)
        decoder = model.decoder_layers * (8 * model.d_model**2 + 2 * model.d_model * model.ffn_dim)
        return operations / (3 * (encoder + decoder + model.d_model * sized.tokenizer.vocab_size))

    return Workload(size, lambda batch_tokens: max(1, size.tokens // batch_tokens), speed)


limits = st.fixed_dictionaries(
    {},
    optional={
        "max_steps": st.integers(1, 10**6),
        "max_epochs": st.integers(1, 1000),
        "max_minutes": st.floats(0.01, 1e5),
    },
)
sizes = st.builds(
    lambda pairs, length, validation: CorpusSize(pairs, round(pairs * length), round(validation * length)),
    *(st.integers(20, 20_000_000), st.floats(2, 100), st.integers(1, 10_000)),
)
given_keys = st.fixed_dictionaries(
    {},
    optional={
        "model": st.fixed_dictionaries(
            {}, optional={"dropout": st.floats(0, 0.9), "activation_dropout": st.floats(0, 0.9)}
        ),
        "training": st.fixed_dictionaries(
            {},
            optional={
                "learning_rate": st.floats(1e-5, 1),
                "warmup_steps": st.integers(0, 10_000),
                "batch_tokens": st.integers(256, 10**6),
                "validate_every": st.integers(1, 10_000),
                "checkpoint_every": st.integers(1, 10_000),
                "schedule": st.sampled_from(["constant", "inverse_sqrt"]),
                "average_checkpoints": st.just(3),
                "patience": st.just(1),
            },
        ),
        "data": st.fixed_dictionaries({}, optional={"max_length": st.integers(2, 256)}),
    },
)


@given(size=sizes, budget=limits, keys=given_keys, operations=st.floats(1e8, 1e15))
@example(CorpusSize(20, 100, 10), {}, {}, 1e11)
@example(CorpusSize(20_000_000, 600_000_000, 90_000), {"max_minutes": 2880.0}, {}, 1e15)
def test_any_corpus_and_budget_give_a_valid_config_that_keeps_given_keys(size, budget, keys, operations):
    sections = {**keys, "data": DATA | keys.get("data", {})}
    sections["training"] = budget | keys.get("training", {})
    planned, _ = plan_run(config(**sections), workload(size, operations))
    resolved = planned.model_dump(mode="json")
    assert config(**{key: value for key, value in resolved.items() if key != "run_dir"}) == planned
    assert planned.model.preset is None
    assert planned.training.learning_rate is not None and planned.training.warmup_steps is not None
    for section in ("model", "training"):
        for key, value in sections.get(section, {}).items():
            assert resolved[section][key] == value
    total = planned.training.max_steps
    assert 0 < learning_rate(1, planned.training, total or 10**6) < 1.01 * planned.training.learning_rate or (
        planned.training.warmup_steps == 0
    )


def test_all_chosen_keys_are_those_that_a_resumed_run_keeps():
    chosen = set()
    for training in ({}, {"max_minutes": 10.0}):
        chosen |= {choice.key for choice in plan_run(config(training=training), workload())[1]}
    sizes = {f"model.{key}" for key in SIZES}
    other = {"training.max_steps", "model.preset"}
    assert chosen - other | sizes | {"tokenizer.vocab_size"} == set(AUTOMATIC)


def test_a_longer_budget_gives_more_steps_and_a_schedule_that_ends_at_zero():
    short, long = (
        plan_run(config(training={"max_minutes": minutes}), workload())[0].training for minutes in (5.0, 30.0)
    )
    assert short.max_steps is not None and long.max_steps is not None
    assert short.max_steps * short.batch_tokens < long.max_steps * long.batch_tokens
    for recipe in (short, long):
        assert recipe.schedule == "cosine"
        assert learning_rate(recipe.max_steps, recipe, recipe.max_steps) == pytest.approx(0, abs=1e-9)


def test_a_small_budget_trains_a_smaller_model_than_a_large_one():
    corpus = CorpusSize(4_500_000, 120_000_000, 80_000)
    for minutes, preset in ((10.0, "tiny"), (1e5, "base")):
        planned, _ = plan_run(config(training={"max_minutes": minutes}), workload(corpus))
        assert {key: getattr(planned.model, key) for key in SIZES} == PRESETS[preset]


def test_without_a_limit_training_ends_by_patience_and_the_weights_are_averaged():
    recipe = plan_run(config(), workload())[0].training
    assert (recipe.max_steps, recipe.max_epochs, recipe.max_minutes) == (None, None, None)
    assert recipe.patience and recipe.ema_decay and recipe.schedule == "inverse_sqrt"


def test_without_automatic_sizes_only_the_rate_and_the_warm_up_are_filled_in():
    made = config(model={"preset": "base"}, training={"max_epochs": 10})
    planned, choices = plan_run(made, workload())
    assert not choices
    changed = {"learning_rate": 0.001, "warmup_steps": round(0.08 * 10 * (430_000 // 4096))}
    assert planned.training == made.training.model_copy(update=changed)
    assert planned.model == made.model


@pytest.mark.parametrize(
    ("training", "warmup_steps"), [({"max_steps": 5_000}, 400), ({"max_minutes": 1.0}, 1_000)]
)
def test_warm_up_is_a_fraction_of_the_known_steps(training, warmup_steps):
    planned, _ = plan_run(config(model={"preset": "tiny"}, training=training), workload())
    assert planned.training.warmup_steps == warmup_steps
