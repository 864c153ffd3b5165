"""Planning a run: every key gets a valid value, given keys stay, and the plan fits the budget."""

import json
import math
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mtrain.config.choices import AUTOMATIC, OPEN_IF_NULL
from mtrain.config.load import validate
from mtrain.config.recipe import CPU, GPU, CorpusSize, assumed_speed
from mtrain.config.schema import Config
from mtrain.config.sections.presets import PRESETS, SIZES, STUDENTS
from mtrain.config.sections.training import TrainingConfig
from mtrain.distributed.ranks import Ranks
from mtrain.training.setup.complete import Workload, assumed_speed_of, choose_values
from mtrain.training.setup.resolve import resolve_config
from mtrain.training.setup.run_folder import write_config
from mtrain.training.setup.timing import Speed
from mtrain.training.step.learning_rate import learning_rate

DATA = {"source_lang": "en", "target_lang": "de", "train": {"toy": "train"}, "validation": {"holdout": 10}}
MULTI30K = CorpusSize(29_000, 430_000, 430_000, 15_000)


def config(**sections: Any) -> Config:
    return validate(Config, {"run_dir": "runs/x", "data": DATA, **sections}, "test")


def workload(
    size: CorpusSize = MULTI30K,
    operations: float = 1e11,
    timed: list[Any] | None = None,
    slowdown: float = 1.0,
) -> Workload:
    """A machine with `operations` multiplications a second, in spite of a `slowdown`, and full steps. Timings
    are appended to `timed`."""

    def speed(sized: Config) -> Speed:
        model = sized.model
        if timed is not None:
            timed.append((model.d_model, model.encoder_layers, sized.training.batch_tokens))
        encoder = model.encoder_layers * (4 * model.d_model**2 + 2 * model.d_model * model.ffn_dim)
        decoder = model.decoder_layers * (8 * model.d_model**2 + 2 * model.d_model * model.ffn_dim)
        per_token = 3 * (encoder + decoder + model.d_model * sized.tokenizer.vocab_size)
        return Speed(operations / per_token, slowdown)

    def steps_per_epoch(batch: int) -> int:
        return max(1, size.epoch_tokens // batch)

    return Workload(lambda: size, steps_per_epoch, speed, assumed_speed("cpu"))


limits = st.fixed_dictionaries(
    {},
    optional={
        "max_steps": st.integers(1, 10**6) | st.just(10**15),
        "max_epochs": st.integers(1, 1000) | st.just(10**15),
        "max_minutes": st.floats(0.01, 1e5),
    },
)
corpora = st.builds(
    lambda pairs, length, weight, validation: CorpusSize(
        pairs, round(pairs * length), max(1, round(pairs * length * weight)), round(validation * length)
    ),
    *(st.integers(20, 20_000_000), st.floats(2, 100), st.floats(0.01, 100), st.integers(1, 10_000)),
)
given_keys = st.fixed_dictionaries(
    {
        "data": st.fixed_dictionaries({}, optional={"max_length": st.integers(2, 6000)}),
        "model": st.fixed_dictionaries(
            {"preset": st.just("auto")},
            optional={
                "dropout": st.floats(0, 0.9),
                "activation_dropout": st.none() | st.floats(0, 0.9),
                "d_model": st.sampled_from([100, 128, 256]),
                "encoder_layers": st.integers(1, 12),
                "norm": st.sampled_from(["pre", "post"]),
            },
        ),
        "training": st.fixed_dictionaries(
            {},
            optional={
                "learning_rate": st.none() | st.floats(1e-5, 1),
                "warmup_steps": st.none() | st.integers(0, 10_000),
                "batch_tokens": st.integers(6000, 10**6),
                "micro_batch_tokens": st.integers(12_000, 20_000),
                "validate_every": st.integers(1, 10_000),
                "checkpoint_every": st.integers(1, 10_000),
                "schedule": st.sampled_from(["constant", "inverse_sqrt"]),
                "average_checkpoints": st.sampled_from([1, 3]),
                "ema_decay": st.none(),
                "r_drop": st.just(5.0),
                "patience": st.just(1),
            },
        ),
    }
)


@settings(max_examples=20)
@given(size=corpora, budget=limits, keys=given_keys, operations=st.floats(1e8, 1e15))
@example(CorpusSize(20, 100, 100, 10), {}, {"training": {}}, 1e11)
@example(
    CorpusSize(20_000_000, 600_000_000, 600_000_000, 90_000), {"max_minutes": 2880.0}, {"training": {}}, 1e15
)
@example(MULTI30K, {"max_minutes": 10.0}, {"training": {"schedule": "cosine"}}, 1e11)
@example(MULTI30K, {"max_steps": 10**6, "max_minutes": 10.0}, {"training": {"schedule": "linear"}}, 1e11)
def test_any_corpus_and_budget_give_a_valid_plan_that_keeps_given_keys_and_resumes(
    tmp_path_factory, size, budget, keys, operations
):
    given = config(**keys | {"data": DATA | keys.get("data", {}), "training": budget | keys["training"]})
    run = tmp_path_factory.getbasetemp() / "planned"
    given = given.model_copy(update={"run_dir": str(run)})
    planned, _ = choose_values(given, workload(size, operations))

    resolved = planned.model_dump(mode="json")
    assert validate(Config, resolved, "test") == planned
    for section in ("model", "training"):
        for key, value in getattr(given, section).model_dump(exclude_unset=True).items():
            may_change = value is None and section == "training" and key in OPEN_IF_NULL
            assert resolved[section][key] == value or key == "preset" or may_change
    assert planned.model.preset is None
    assert planned.training.learning_rate is not None and planned.training.warmup_steps is not None
    steps = budget.get("max_steps", math.inf)
    if planned.training.max_steps is not None and "warmup_steps" not in keys["training"]:
        most = 0.08 * min(steps, planned.training.max_steps) + 0.5  # rounded
        assert planned.training.warmup_steps <= max(1, most)

    (run / "checkpoints" / "step-00000001").mkdir(parents=True, exist_ok=True)
    write_config(planned)
    assert resolve_config(given).config == planned


def test_wmt14_on_a_gpu_gets_the_usual_recipe():
    wmt14 = CorpusSize(4_500_000, 120_000_000, 120_000_000, 80_000)
    planned, _ = choose_values(config(), workload(wmt14, operations=5e13)._replace(device=GPU))
    training = planned.training
    assert (planned.model.d_model, training.batch_tokens, training.learning_rate) == (512, 32_768, 0.001)
    assert training.checkpoint_every <= training.validate_every


def test_all_chosen_keys_are_those_that_a_resumed_run_keeps():
    chosen = set()
    much = workload(MULTI30K._replace(validation_tokens=1_000_000))  # only some of it is used
    for training in ({}, {"max_minutes": 10.0}, {"max_minutes": 0.5}):  # the last with few epochs
        chosen |= {choice.key for choice in choose_values(config(training=training), much)[1]}
    sizes = {f"model.{key}" for key in SIZES}
    other = {"training.max_steps", "model.preset"}
    assert chosen - other | sizes | {"tokenizer.vocab_size"} == set(AUTOMATIC)


@pytest.mark.parametrize(
    ("sections", "device", "optimizer"),
    [
        ({"training": {"max_minutes": 5.0}}, CPU, "muon"),
        ({"training": {"max_minutes": 60.0}}, CPU, "muon"),
        ({"training": {"max_minutes": 5.0, "optimizer": "adamw"}}, CPU, "adamw"),
        ({"training": {"max_minutes": 5.0}, "model": {"preset": "auto", "norm": "post"}}, CPU, "adamw"),
        ({"training": {"max_minutes": 5.0, "init_from": "runs/y/model"}}, CPU, "adamw"),
        ({"training": {"max_minutes": 5.0}}, GPU, "adamw"),
        ({"training": {"max_minutes": 5.0, "max_steps": 100}}, CPU, "adamw"),
        ({"training": {"max_steps": 100}}, CPU, "adamw"),
        ({"training": {"optimizer": "muon", "max_steps": 100}}, CPU, "muon"),
        ({}, CPU, "adamw"),
    ],
)
def test_muon_trains_the_models_with_which_it_was_measured(sections, device, optimizer):
    work = workload(MULTI30K, operations=1e10)._replace(device=device)
    planned, choices = choose_values(config(**sections), work)
    assert planned.training.optimizer == optimizer
    given = sections.get("training", {}).get("optimizer")
    chosen = [choice.value for choice in choices if choice.key == "training.optimizer"]
    assert chosen == ["muon"] * (optimizer == "muon" and given is None)
    if chosen:
        planned, _ = choose_values(config(**sections), work._replace(ranks=2))
        assert planned.training.optimizer == "adamw"


def test_a_longer_budget_gives_more_steps_and_a_schedule_that_ends_at_zero():
    short, long = (
        choose_values(config(training={"max_minutes": minutes}), workload())[0].training
        for minutes in (5.0, 30.0)
    )
    assert short.planned_steps is not None and long.planned_steps is not None
    assert short.planned_steps * short.batch_tokens < long.planned_steps * long.batch_tokens
    for recipe in (short, long):
        assert recipe.schedule == "wsd"
        assert learning_rate(recipe.planned_steps, recipe, recipe.planned_steps) == pytest.approx(0, abs=1e-9)


def test_a_small_budget_trains_a_smaller_model_than_a_large_one():
    corpus = CorpusSize(4_500_000, 120_000_000, 120_000_000, 80_000)
    for minutes, preset in ((10.0, "micro"), (100.0, "tiny"), (1e5, "base")):
        planned, _ = choose_values(config(training={"max_minutes": minutes}), workload(corpus))
        assert {key: getattr(planned.model, key) for key in SIZES} == PRESETS[preset]


def test_without_a_limit_training_ends_by_patience_and_the_weights_are_averaged():
    recipe = choose_values(config(), workload())[0].training
    assert (recipe.max_steps, recipe.max_epochs, recipe.max_minutes) == (None, None, None)
    assert recipe.patience and recipe.ema_decay and recipe.schedule == "inverse_sqrt"


def test_without_automatic_sizes_only_keys_without_a_value_are_filled_in():
    made = config(model={"preset": "base"}, training={"max_epochs": 10})
    planned, choices = choose_values(made, workload())
    assert not choices
    changed = {
        "learning_rate": 0.001,
        "warmup_steps": round(0.08 * 10 * (430_000 // 4096)),
        "encoder_after": 0,
    }
    assert planned.training == made.training.model_copy(update=changed)
    assert planned.model == made.model


@pytest.mark.parametrize(("preset", "rate"), [("student_tiny", 0.002), ("student_base", 0.001)])
def test_a_student_gets_the_automatic_recipe_but_keeps_its_sizes(preset, rate):
    made = config(model={"preset": preset}, training={"max_steps": 5_000})
    planned, choices = choose_values(made, workload())
    assert {key: getattr(planned.model, key) for key in SIZES} == {
        key: STUDENTS[preset][key] for key in SIZES
    }
    assert not [
        choice.key for choice in choices if choice.key in {"model.preset", *(f"model.{s}" for s in SIZES)}
    ]
    assert (planned.training.learning_rate, planned.training.warmup_steps) == (rate, 399)
    assert planned.training.schedule == "cosine" and planned.model.norm == "post"


def test_planned_steps_limit_the_warm_up_and_how_long_the_encoder_is_frozen():
    def chosen(**training: Any) -> tuple[int | None, int | None]:
        model = {"preset": "base", "norm": "post"}
        made = config(model=model, training={"max_minutes": 10.0, "planned_steps": 900, **training})
        planned = choose_values(made, workload())[0].training
        return planned.warmup_steps, planned.encoder_after

    assert (chosen(), chosen(warmup_steps=200)) == ((72, 144), (200, 225))


@pytest.mark.parametrize("preset", ["auto", None])
def test_a_new_encoder_with_norms_after_the_sublayers_is_trained_later(preset):
    def encoder_after(**training: Any) -> int | None:
        model = {**PRESETS["base"], "preset": preset, "norm": training.pop("norm", "post")}
        made = config(model=model, training={"max_steps": 5_000, **training})
        return choose_values(made, workload())[0].training.encoder_after

    assert encoder_after() == pytest.approx(800, abs=2) and encoder_after(warmup_steps=20) == 40
    assert (encoder_after(max_steps=100_000), encoder_after(warmup_steps=300, max_steps=20)) == (1000, 5)
    assert (encoder_after(encoder_after=7), encoder_after(encoder_after=0)) == (7, 0)
    assert encoder_after(norm="pre") == encoder_after(init_from="runs/y") == 0
    given = {"learning_rate": 0.1, "warmup_steps": 30}
    assert encoder_after(**given) == 60


@pytest.mark.parametrize(
    ("training", "warmup_steps"), [({"max_steps": 5_000}, 400), ({"max_minutes": 1.0}, 1_000)]
)
def test_warm_up_is_a_fraction_of_the_known_steps(training, warmup_steps):
    planned, _ = choose_values(config(model={"preset": "tiny"}, training=training), workload())
    assert planned.training.warmup_steps == warmup_steps


def test_the_earliest_limit_determines_warm_up_and_validations():
    both = {"max_steps": 10**6, "max_minutes": 10.0}
    planned = [
        choose_values(config(training=limits), workload())[0] for limits in (both, {"max_minutes": 10.0})
    ]
    recipe, expected = (config.training for config in planned)
    assert recipe.max_steps == 10**6 and recipe.schedule == "inverse_sqrt" and recipe.ema_decay
    assert recipe.warmup_steps == expected.warmup_steps
    assert recipe.validate_every == expected.validate_every


@pytest.mark.parametrize(
    ("training", "data", "warmup_steps"),
    [
        ({"max_steps": 100_000, "max_epochs": 10}, {}, 0.08 * 10 * (430_000 // 1024)),
        ({"max_steps": 100_000, "max_epochs": 10, "max_minutes": 1e5}, {}, 0.08 * 10 * (430_000 // 1024)),
        ({"max_steps": 1_000}, {"max_length": 4_000}, 80),
    ],
)
def test_a_known_number_of_steps_gets_a_cosine_schedule(training, data, warmup_steps):
    recipe = choose_values(config(training=training, data=DATA | data), workload())[0].training
    assert recipe.schedule == "cosine" and recipe.ema_decay is None
    assert recipe.warmup_steps == pytest.approx(warmup_steps, rel=0.1)


def test_a_limit_beyond_the_useful_epochs_does_not_delay_validation():
    """The run ends early if validation does not improve."""
    useful = choose_values(config(training={"max_minutes": 1e5}), workload())[0].training
    for limit in ({"max_steps": 300_000}, {"max_epochs": 10_000}):
        recipe = choose_values(config(training=limit), workload())[0].training
        assert recipe.batch_tokens == useful.batch_tokens
        assert recipe.warmup_steps == pytest.approx(useful.warmup_steps, rel=0.1)
        assert recipe.validate_every == pytest.approx(useful.validate_every, rel=0.1)


def test_validation_by_beam_search_takes_longer():
    def planned(beam_size: int) -> TrainingConfig:
        training = {"max_minutes": 10.0, "validation_beam_size": beam_size}
        return choose_values(config(training=training), workload())[0].training

    greedy, beam = planned(1), planned(5)
    assert beam.validate_every > greedy.validate_every
    assert beam.planned_steps == pytest.approx(greedy.planned_steps, rel=0.05)  # about as long in all


def test_the_limit_that_determines_the_steps_is_named():
    for minutes, limit in ((5.0, "5 minutes"), (1e5, "61 useful epochs")):
        choices = choose_values(config(training={"max_minutes": minutes}), workload())[1]
        found = {choice.key: choice for choice in choices}
        planned, most = found["training.planned_steps"], found["training.max_steps"]
        assert planned.reason == f"as many as {limit} allow; corrected by the clock"
        assert most.reason == "61 useful epochs" and (planned.value == most.value) == ("useful" in limit)


@pytest.mark.parametrize("limit", [{"max_steps": 10**6}, {"max_epochs": 10**4}])
def test_with_another_limit_than_the_time_the_clock_does_not_decide(limit):
    recipe = choose_values(config(training={"max_minutes": 10.0, **limit}), workload())[0].training
    assert recipe.planned_steps is None and recipe.max_steps is not None


@pytest.mark.parametrize(("minutes", "drawn"), [(2.0, True), (1e3, False)])
def test_validation_pairs_are_drawn_if_all_of_them_would_take_too_long(minutes, drawn):
    size, work = MULTI30K._replace(validation_tokens=300_000), workload()
    planned, _ = choose_values(config(training={"max_minutes": minutes}), work._replace(size=lambda: size))
    training = planned.training
    assert (training.validation_pairs is not None) == drawn
    if drawn:  # three validations take a twentieth of the time, at twice the time of training
        seconds = 2 * training.validation_pairs * size.tokens / size.pairs / work.speed(planned).now
        assert 3 * seconds == pytest.approx(0.05 * 60 * minutes, rel=0.01)


def as_earlier_versions_planned(recipe: Config) -> Config:
    """The config of a run with `max_minutes` that only its number of steps was planned for."""
    planned = {"max_steps": recipe.training.planned_steps or recipe.training.max_steps, "planned_steps": None}
    return recipe.model_copy(update={"training": recipe.training.model_copy(update=planned)})


def test_rotary_positions_need_heads_of_an_even_width():
    model = {"preset": "auto", "d_model": 200, "positions": "rotary"}  # 8 heads would have a width of 25
    size = CorpusSize(4_500_000, 120_000_000, 120_000_000, 80_000)
    planned, _ = choose_values(config(model=model, training={"max_minutes": 1e5}), workload(size, 1e14))
    assert (planned.model.d_model, planned.model.heads) == (200, 4)


@pytest.mark.parametrize("epochs", [None, 1_000])
def test_a_resumed_run_plans_more_steps_for_more_minutes(tmp_path, epochs):
    def given(minutes: float) -> Config:
        return config(run_dir=str(tmp_path), training={"max_minutes": minutes, "max_epochs": epochs})

    planned = as_earlier_versions_planned(choose_values(given(5.0), workload())[0])
    (tmp_path / "checkpoints" / "step-00000001").mkdir(parents=True)
    write_config(planned)
    assert planned.training.max_steps is not None
    assert resolve_config(given(15.0)).config.training.max_steps == 3 * planned.training.max_steps


def test_fewer_minutes_do_not_shorten_a_run_that_its_epochs_limit(tmp_path):
    def given(minutes: float) -> Config:
        return config(run_dir=str(tmp_path), training={"max_minutes": minutes, "max_epochs": 2})

    planned = as_earlier_versions_planned(choose_values(given(1e4), workload())[0])
    (tmp_path / "checkpoints" / "step-00000001").mkdir(parents=True)
    write_config(planned)
    assert resolve_config(given(5e3)).config.training.max_steps == planned.training.max_steps


@pytest.mark.parametrize(
    ("needed", "minutes", "share"),
    [(1e3, 1.5e3, 1), (1e3, 500.0, 0.5), (1e4, 5e3, 0.5), (2e4, 5e3, 0.5), (1e3, 2e4, 2)],
)
def test_fewer_minutes_shorten_a_run_only_if_they_do_not_suffice_for_it(tmp_path, needed, minutes, share):
    """The speed of the run so far tells how many minutes of 10,000 are `needed`."""

    def given(minutes: float) -> Config:
        return config(run_dir=str(tmp_path), training={"max_minutes": minutes})

    planned = as_earlier_versions_planned(choose_values(given(1e4), workload())[0])
    steps = planned.training.max_steps
    assert steps is not None
    folder = tmp_path / "checkpoints" / "step-00000010"
    folder.mkdir(parents=True)
    (folder / "state.json").write_text(json.dumps({"step": 10, "seconds": 10 * 60 * needed / steps}))
    write_config(planned)
    assert resolve_config(given(1e4)).config.training.max_steps == steps
    assert resolve_config(given(minutes)).config.training.max_steps == pytest.approx(share * steps, abs=1)


def test_ranks_on_one_cpu_share_its_assumed_speed():
    ranks = Ranks(torch.device("cpu"))
    alone = assumed_speed_of(ranks)
    ranks.size, ranks.local_size = 4, 2  # two machines
    assert assumed_speed_of(ranks) == 2 * alone


@pytest.mark.parametrize(
    ("training", "timings"), [({"max_steps": 100}, 0), ({"max_epochs": 5}, 0), ({"max_minutes": 10.0}, 4)]
)
def test_each_model_is_timed_once_at_each_batch_size_and_only_if_time_is_limited(training, timings):
    timed: list[Any] = []
    size = CorpusSize(500_000, 7_000_000, 7_000_000, 15_000)
    choose_values(config(training=training), workload(size, 1e12, timed))
    assert len(timed) == len(set(timed)) <= timings
    assert bool(timed) == bool(timings)


@pytest.mark.parametrize("limits", [{"max_minutes": 600.0}, {}])
def test_a_model_that_does_not_fit_in_memory_is_not_chosen(limits):
    size = CorpusSize(4_500_000, 120_000_000, 120_000_000, 80_000)
    work = workload(size, 1e15)

    def speed(sized: Config) -> Speed:
        if sized.model.d_model > 256:
            raise MemoryError
        return work.speed(sized)

    planned, _ = choose_values(config(training=limits), work._replace(speed=speed))
    assert planned.model.d_model == 256


def test_other_processes_change_the_number_of_steps_but_not_the_model():
    free, busy, slow = (
        choose_values(
            config(training={"max_minutes": 6.0}), workload(operations=operations, slowdown=slowdown)
        )[0]
        for operations, slowdown in ((5e11, 1.0), (1.25e11, 4.0), (1.25e11, 1.0))
    )
    assert free.model.encoder_layers == busy.model.encoder_layers == 4 and slow.model.encoder_layers == 2
    tokens = [plan.training.planned_steps * plan.training.batch_tokens for plan in (free, busy)]
    assert tokens[0] == pytest.approx(4 * tokens[1], rel=0.1)


def test_repeated_pairs_are_not_new_ones():
    once = CorpusSize(1_000, 15_000, 15_000, 15_000)
    often = once._replace(epoch_tokens=100 * 15_000)
    plans = [choose_values(config(), workload(size))[0] for size in (once, often)]
    assert plans[0].model.d_model == plans[1].model.d_model
    assert plans[0].training.batch_tokens == plans[1].training.batch_tokens
    assert plans[0].model.dropout == plans[1].model.dropout


@pytest.mark.parametrize(
    ("pairs", "given", "expected"),
    [
        (99_999, {}, (1.2, 6)),
        (100_000, {}, (1.0, 0)),
        (99_999, {"length_penalty": 0.8, "beam_size": 5}, (0.8, 6)),
        (99_999, {"no_repeat_ngram": 0}, (1.2, 0)),
    ],
)
def test_models_of_small_corpora_translate_at_length_and_without_repetitions(pairs, given, expected):
    size = CorpusSize(pairs, 15 * pairs, 15 * pairs, 15_000)
    decoding = choose_values(config(decoding=given), workload(size))[0].decoding
    assert (decoding.length_penalty, decoding.no_repeat_ngram) == expected


def test_decoding_on_a_gpu_stays_fast():
    decoding = choose_values(config(), workload()._replace(device=GPU))[0].decoding
    assert (decoding.length_penalty, decoding.no_repeat_ngram) == (1.2, 0)


INITIAL = {**PRESETS["tiny"], "preset": "auto"}  # as `resolve_config` returns it


def fine_tuned(size: CorpusSize = MULTI30K, **training: Any) -> TrainingConfig:
    made = config(model=INITIAL, training={"init_from": "runs/y", **training})
    planned, choices = choose_values(made, workload(size))
    assert planned.model.preset is None and "model.preset" not in {choice.key for choice in choices}
    assert {key: getattr(planned.model, key) for key in SIZES} == PRESETS["tiny"]
    return planned.training


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("preset", ["auto", None])
def test_fine_tuning_starts_with_a_lower_rate(preset, norm):
    model = {**INITIAL, "preset": preset, "norm": norm}
    made = config(model=model, training={"init_from": "runs/y", "max_steps": 100})
    planned = choose_values(made, workload())[0].training
    assert (planned.learning_rate, planned.warmup_steps, planned.encoder_after) == (0.002, 8, 0)


def test_the_encoder_of_a_pair_classifier_is_trained_from_the_first_step():
    model = {"head": "pair_classifier", "preset": "tiny", "norm": "post"}
    planned = choose_values(config(model=model, training={"max_steps": 100}), workload())[0].training
    assert (planned.learning_rate, planned.warmup_steps, planned.encoder_after) == (0.004, 8, 0)


@pytest.mark.parametrize(("pairs", "epochs"), [(1_000, 42), (29_000, 15), (1_000_000, 5), (20_000_000, 2)])
def test_fine_tuning_without_a_limit_ends_after_the_useful_epochs(pairs, epochs):
    tokens = 20 * pairs
    planned = fine_tuned(CorpusSize(pairs, tokens, tokens, 15_000))
    steps_per_epoch = max(1, tokens // planned.batch_tokens)
    assert planned.max_steps == epochs * steps_per_epoch
    assert (planned.schedule, planned.ema_decay, planned.patience) == ("cosine", None, 10)
    assert planned.validate_every <= planned.max_steps / 3


def test_fine_tuning_respects_the_limits_of_the_config():
    short, long = fine_tuned(max_minutes=1.0), fine_tuned(max_minutes=1e4)
    assert short.planned_steps < long.planned_steps < 1.1 * fine_tuned().max_steps
    assert fine_tuned(max_epochs=3).max_steps is None
    assert fine_tuned(max_steps=77, learning_rate=0.1).max_steps == 77
    assert fine_tuned(max_steps=77, learning_rate=0.1).learning_rate == 0.1
