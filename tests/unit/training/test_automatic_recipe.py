"""`model.preset: auto`, the default, chooses the recipe, unless the config gives it."""

import itertools
import json
import logging
import math
import random
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from mtrain.config.choices import AUTOMATIC
from mtrain.config.schema import Config
from mtrain.config.sections.model import ModelConfig
from mtrain.config.sections.presets import PRESETS, SIZES
from mtrain.data.epochs.loader import StepInput
from mtrain.data.epochs.schedule import Position
from mtrain.data.reading.digests import RawFiles
from mtrain.data.rewriting.reencode import Reencoder
from mtrain.data.scanning.scanner import CorpusScanner
from mtrain.distributed.ranks import Ranks
from mtrain.errors import DataError, UsageError
from mtrain.model.build import build_model
from mtrain.processes.cores import ThreadSeconds
from mtrain.tokenizer.tokenizer import Tokenizer
from mtrain.training.fit import fit
from mtrain.training.setup import complete as complete_config
from mtrain.training.setup import timing
from mtrain.training.setup.complete import make_workload
from mtrain.training.setup.lengths import TrainingLengths
from mtrain.training.setup.prepare_run import prepare_run
from mtrain.training.setup.resolve import resolve_config
from mtrain.training.setup.tokenizer import tokenize
from mtrain.training.step.learner import Learner, StepMetrics
from mtrain.training.step.make_learner import make_learner
from tests.support.training import read_metrics, with_bleu


@pytest.mark.parametrize(("pairs", "vocab_size"), [(1_999, 2_000), (2_000, 4_000)])
def test_the_vocabulary_size_follows_the_number_of_training_pairs(make_config, tmp_path, pairs, vocab_size):
    (tmp_path / "train.tsv").write_text("a\tb\n" * pairs)
    config = make_config(data={"train": {"tsv": str(tmp_path / "train.tsv")}})
    chosen = resolve_config(automatic(config)).config
    assert chosen.tokenizer.vocab_size == vocab_size
    assert chosen.training == config.training


def test_the_vocabulary_size_follows_the_budget(make_config, tmp_path):
    (tmp_path / "train.tsv").write_text("a\tb\n" * 100_000)
    config = make_config(data={"train": {"tsv": str(tmp_path / "train.tsv")}})
    short, long = ({"max_steps": 100}, {"max_minutes": 10.0}), ({"max_minutes": 15.0}, {})
    for training, vocab_size in [*((each, 8_000) for each in short), *((each, 12_000) for each in long)]:
        made = automatic(config, **(training or {"patience": 3}))
        assert resolve_config(made).config.tokenizer.vocab_size == vocab_size


def test_duplicates_count_once(make_config, corpus, tmp_path):
    """Each of the eight pairs twice, and two of them once more."""
    for side in ("en", "de"):
        lines = (corpus / f"train.{side}").read_text().splitlines(keepends=True)
        (tmp_path / f"train.{side}").write_text("".join([*lines, *lines, *lines[:2]]))
    train = {"source": str(tmp_path / "train.en"), "target": str(tmp_path / "train.de")}
    config = make_config(data={"train": train})
    run = prepare_run(config)
    encoded = TrainingLengths.of_data(run.data, config)
    text = TrainingLengths.of_text(config, CorpusScanner(RawFiles(config.data), seed=1), run.tokenizer)
    for lengths in (encoded, text):
        size = make_workload(config, lengths, float, 1e4, on_cpu=True).size()
        assert size.pairs == 8 and size.tokens == round(size.epoch_tokens * 8 / 18)


def automatic(config: Config, **training: Any) -> Config:
    """The config without sizes, and with other training keys."""
    raw = config.model_dump(mode="json", exclude_unset=True, exclude={"model", "tokenizer"})
    return Config.model_validate(raw | ({"training": training} if training else {}))


def test_given_keys_override_automatic_ones_and_the_resolved_ones_are_saved(make_config, tmp_path):
    config = make_config(model={"preset": "auto", "dropout": 0.2})  # with the small sizes of these tests
    tokenize(config)
    fit(config, device="cpu")
    fit(config, device="cpu")  # resolves to the same recipe, so it is the same run
    written = yaml.safe_load((tmp_path / "run/config.yaml").read_text())
    assert written["model"]["preset"] is None and written["model"]["d_model"] == 32
    assert written["tokenizer"]["vocab_size"] == 330 and written["model"]["dropout"] == 0.2
    given = config.training.model_dump(exclude_unset=True)
    assert given.items() <= written["training"].items()


def test_a_config_may_give_every_automatic_key(make_config, tmp_path, caplog):
    config = prepare_run(make_config(model={"preset": "auto"})).config
    raw = config.model_dump(mode="json")
    for key in AUTOMATIC:
        section, name = key.split(".")
        raw[section].setdefault(name, None)
    with caplog.at_level(logging.INFO, "mtrain"):
        fit(Config.model_validate(raw), device="cpu")
    assert not any("mtrain chose" in message for message in caplog.messages)
    assert json.loads((tmp_path / "run/choices.json").read_text()) == []


def test_a_config_with_sizes_is_not_changed_and_a_missing_corpus_is_named(make_config):
    config = make_config()
    assert resolve_config(config) == (config, None, None)
    missing = {"source": "nowhere.en", "target": "nowhere.de"}
    with pytest.raises(DataError, match=r"nowhere\.en"):
        resolve_config(automatic(make_config(data={"train": missing})))


@pytest.fixture
def short_timing(monkeypatch):
    """Time few steps."""
    monkeypatch.setattr(timing, "TIMED_STEPS", 1)
    monkeypatch.setattr(timing, "TIMED_SECONDS", 0.0)
    monkeypatch.setattr(timing, "STEADY", math.inf)


def written(run: Path) -> dict[str, Any]:
    return yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))


def test_a_run_limited_by_minutes_resumes_with_its_plan(make_config, tmp_path, short_timing, caplog):
    run = tmp_path / "run"
    with caplog.at_level(logging.INFO, "mtrain"):
        fit(automatic(make_config(), max_minutes=0.005, log_every=1), device="cpu")
    plan = written(run)
    table = [line for line in caplog.messages if line.startswith("  ")]
    for key in (*AUTOMATIC, "training.max_steps"):
        section, name = key.split(".")
        value = plan[section][name]
        if value is not None and name not in SIZES:
            assert any(line.split()[:2] == [key, str(value)] for line in table), key
    choices = (run / "choices.json").read_text()
    recorded = [[str(choice[name]) for name in ("key", "value", "reason")] for choice in json.loads(choices)]
    assert recorded == [line.split(maxsplit=2) for line in table]
    fit(automatic(make_config(), max_minutes=0.005, log_every=1), device="cpu")
    assert written(run) == plan
    # With another time, nothing else changes.
    fit(automatic(make_config(), max_minutes=0.01, log_every=1), device="cpu")
    extended = written(run)
    assert extended["training"].pop("max_minutes") == 2 * plan["training"].pop("max_minutes")
    assert extended == plan
    assert (run / "choices.json").read_text() == choices


def test_a_run_that_begins_anew_forgets_what_was_chosen_before(make_config, tmp_path):
    run = prepare_run(make_config(model={"preset": "auto"}))
    complete_config.complete_config(run.config, run.tokenizer, run.data, Ranks(torch.device("cpu")))
    file = tmp_path / "run/choices.json"
    chosen = {"key": "model.activation_dropout", "value": 0.0, "reason": "model.dropout suffices"}
    assert chosen in json.loads(file.read_text())
    prepare_run(make_config())
    assert not file.exists()


@pytest.mark.parametrize("limit", [{"max_minutes": 0.3}, {"patience": 3}])
@pytest.mark.parametrize("end", [{"max_steps": 2}, {"max_epochs": 2}])
def test_a_run_keeps_a_limit_at_which_its_schedule_ends(make_config, end, limit):
    fit(automatic(make_config(), **end), device="cpu")
    [(name, value)] = end.items()
    message = f"the run began with {name} {value}; give max_steps or max_epochs, too"
    with pytest.raises(UsageError, match=message):
        fit(automatic(make_config(), **limit), device="cpu")


def test_a_run_without_any_limit_ends_when_validation_stops_improving(
    make_config, tmp_path, scripted_scores, short_timing
):
    scripted_scores(*[with_bleu(score) for score in (3, 2, 1)])
    fit(automatic(make_config(), patience=2, validate_every=1), device="cpu")
    assert [line["step"] for line in read_metrics(tmp_path / "run") if "validation" in line] == [1, 2, 3]


def test_a_run_of_an_earlier_version_keeps_its_rate_and_warm_up(make_config, tmp_path):
    training = {"max_steps": 4, "learning_rate": 0.001, "warmup_steps": 2000}  # written as resolved values
    fit(make_config(training=training), device="cpu")
    raw = make_config(training={"max_steps": 8}).model_dump(mode="json", exclude_unset=True)
    for key in ("learning_rate", "warmup_steps"):
        del raw["training"][key]  # as in the config that the run was made with
    fit(Config.model_validate(raw), device="cpu")
    kept = written(tmp_path / "run")["training"]
    assert (kept["max_steps"], kept["learning_rate"], kept["warmup_steps"]) == (8, 0.001, 2000)


@pytest.fixture
def toy_config(make_config):
    """A config of the bundled corpus with `model.preset: auto`, and tokenizer keys to choose."""

    def make(run: str = "run", **tokenizer) -> Config:
        data = {"train": {"toy": "train"}, "validation": {"holdout": 8}, "test": {}, "max_length": 64}
        raw = make_config(run, data=data).model_dump(mode="json", exclude_unset=True)
        tied = "all" if tokenizer.get("joint", True) else "decoder"
        raw |= {"model": {"preset": "auto", "tie_embeddings": tied}, "tokenizer": tokenizer}
        return Config.model_validate(raw)

    return make


def size_in(file: Path) -> int:
    config = yaml.safe_load(file.read_text(encoding="utf-8"))
    return config.get("tokenizer", config)["vocab_size"]


@pytest.mark.parametrize(
    ("kind", "joint"),
    [
        ("unigram", True),
        ("bpe", False),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("unigram", False), ("bpe", True))),
    ],
)
def test_a_corpus_too_small_for_the_automatic_vocabulary_gets_the_largest_possible(
    toy_config, tmp_path, caplog, kind, joint
):
    config, run = toy_config(type=kind, joint=joint), tmp_path / "run"
    with caplog.at_level(logging.INFO, "mtrain"):
        tokenizer = tokenize(config)
    sizes = {tokenizer.source_vocab_size, tokenizer.target_vocab_size}
    assert max(sizes) < 4_000 and (len(sizes) == 1) == joint
    assert all(f"using {size}, the largest possible" in caplog.text for size in sizes)
    # The run states the size that was learned, of the larger side.
    assert size_in(run / "config.yaml") == size_in(run / "tokenizer/config.yaml") == max(sizes)
    with pytest.raises(UsageError, match=r"vocab_size is too large for this text.* given 4000; the largest"):
        tokenize(toy_config("given", type=kind, joint=joint, vocab_size=4_000))


def test_a_script_with_many_characters_gets_a_larger_vocabulary(make_config, tmp_path):
    rng = random.Random(0)
    characters = [chr(0x4E00 + number) for number in range(2_100)]
    lines = [f"a b\t{''.join(rng.choices(characters, k=9))}\n" for _ in range(1_500)]
    (tmp_path / "train.tsv").write_text("".join(lines), encoding="utf-8")
    config = automatic(make_config(data={"train": {"tsv": str(tmp_path / "train.tsv")}}), max_steps=1)
    assert tokenize(config).source_vocab_size == size_in(tmp_path / "run/config.yaml") > 2_000


@pytest.mark.slow
def test_several_ranks_time_the_share_of_one(make_config, monkeypatch):
    shares = []

    def measured(architecture, recipe, device, steps, alone, minutes):
        step = next(iter(steps(make_learner(build_model(architecture), recipe))))
        shares.append((alone, sum(batch.target_tokens for batch in step.batches) / step.tokens))
        return timing.Speed(1_000.0)

    monkeypatch.setattr(complete_config, "measure_speed", measured)
    data = {"train": {"toy": "train"}, "validation": {"holdout": 8}, "test": {}}
    run = prepare_run(automatic(make_config(data=data), max_minutes=1.0))
    ranks = Ranks(torch.device("cpu"))
    for ranks.size, share in ((1, 1.0), (4, 0.25)):
        shares.clear()
        complete_config.complete_config(run.config, run.tokenizer, run.data, ranks)
        assert shares and all(
            alone == (share == 1) and found == pytest.approx(share, rel=0.2) for alone, found in shares
        )


@pytest.mark.parametrize("after", [pytest.param(0, marks=pytest.mark.slow), 100])
def test_steps_with_and_without_r_drop_are_timed(make_config, monkeypatch, short_timing, after):
    weights, real = set(), Learner.step

    def step(self, *arguments, **keywords):
        weights.add(self.r_drop)
        return real(self, *arguments, **keywords)

    monkeypatch.setattr(Learner, "step", step)
    run = prepare_run(automatic(make_config(), max_minutes=0.1, r_drop=5.0, r_drop_after=after))
    ranks = Ranks(torch.device("cpu"))
    assert complete_config.complete_config(run.config, run.tokenizer, run.data, ranks).training.max_steps
    assert weights == ({5.0, 0.0} if after else {5.0})


def test_the_speed_without_r_drop_counts_for_the_steps_without_it():
    first = timing.Timing(timing.Speed(2_000.0), 0.1)
    later = timing.Timing(timing.Speed(1_000.0, slowdown=2.0), 0.2)
    assert timing.mean_speed(60.0, 300, first, later) == (1_500.0, 2.0)  # for 30 s each
    assert timing.mean_speed(20.0, 300, first, later) == (2_000.0, 2.0)


@pytest.mark.parametrize(("capturing", "expected"), [((1, 2, 5), 200.0), (range(1, 100), 2.5)])
def test_steps_that_capture_graphs_are_not_timed_unless_all_do(make_config, monkeypatch, capturing, expected):
    """A clock on which a step takes 0.5 s, or 40 s if it captures a graph."""
    clock, taken = [0.0], []

    def step(self, batches, tokens, rate):
        taken.append(tokens)
        captures = len(taken) in capturing
        self.captures += captures
        clock[0] += 40.0 if captures else 0.5
        return StepMetrics(torch.zeros(4), tokens)

    monkeypatch.setattr(Learner, "step", step)
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    config = make_config(training={"precision": "fp32"})
    steps = itertools.repeat(StepInput(1, 100, [], list, Position(0, 0)))
    model = ModelConfig(**PRESETS["micro"], source_vocab_size=50, target_vocab_size=50, max_positions=64)
    speed = timing.measure_speed(model, config.training, torch.device("cpu"), lambda _: steps)
    assert speed.now == expected


@pytest.mark.parametrize(
    ("seconds", "minutes", "duration"),
    [((1.0,), None, 6.0), ((0.5, 1.5), None, 20.0), ((0.5, 1.5), 5.0, 10.0), ((0.5, 1.5), 1.0, 4.0)],
)
def test_the_speed_is_measured_until_it_is_steady(
    make_config, monkeypatch, caplog, seconds, minutes, duration
):
    """For a limited time, of which some is not timed. On a clock on which steps take some `seconds`."""
    clock, durations = [0.0], itertools.cycle(seconds)

    def step(self, batches, tokens, rate):
        clock[0] += next(durations)
        return StepMetrics(torch.zeros(4), tokens)

    monkeypatch.setattr(Learner, "step", step)
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(timing, "thread_seconds", lambda: ThreadSeconds(clock[0] / 4, clock[0]))
    monkeypatch.setattr(timing, "cpu_limit", lambda: 2)
    steps = itertools.repeat(StepInput(1, 100, [], list, Position(0, 0)))
    model = ModelConfig(**PRESETS["micro"], source_vocab_size=50, target_vocab_size=50, max_positions=64)
    arguments = model, make_config().training, torch.device("cpu"), lambda _: steps, True, minutes
    with caplog.at_level(logging.INFO, "mtrain"):
        speed = timing.measure_speed(*arguments)
    assert duration <= clock[0] <= duration + 3
    assert speed.now == pytest.approx(100, rel=0.1) and speed.slowdown == pytest.approx(5)
    error = "0.0%" if seconds == (1.0,) else r"[1-9][0-9]?\.[0-9]%"
    found = (
        rf"speed: \d+ target tokens/s \(standard error {error}, measured for \d+ s\); [45]\d\d without other"
    )
    assert re.search(found, caplog.text)


@pytest.mark.slow
def test_steps_are_timed_without_segmenting_the_corpus_again(make_config, monkeypatch, short_timing):
    """With millions of pairs, it would take minutes each time."""
    data = {"train": {"toy": "train"}, "validation": {"holdout": 8}, "test": {}, "subword_sampling": 0.1}
    run = prepare_run(automatic(make_config(data=data), max_minutes=0.1))
    monkeypatch.setattr(Reencoder, "__call__", None)
    ranks = Ranks(torch.device("cpu"))
    assert complete_config.complete_config(run.config, run.tokenizer, run.data, ranks).training.max_steps


def test_an_existing_tokenizer_keeps_its_size_when_the_automatic_one_changes(make_config, tmp_path):
    rng = random.Random(0)
    lines = ["".join(rng.choices("abcdefghij", k=8)) + "\tb\n" for _ in range(2_500)]
    (tmp_path / "train.tsv").write_text("".join(lines))
    config = automatic(make_config(data={"train": {"tsv": str(tmp_path / "train.tsv")}}), max_steps=1)
    size = tokenize(config).source_vocab_size
    assert size > 2_000
    (tmp_path / "train.tsv").write_text("".join(lines[:1_500]))
    assert resolve_config(config, relearn=True).config.tokenizer.vocab_size == 2_000
    scanner = CorpusScanner(RawFiles(config.data), config.seed)
    assert resolve_config(config, scanner).config.tokenizer.vocab_size == size
    assert not scanner.files.digests  # the corpus was not read
    assert tokenize(config).source_vocab_size == size_in(tmp_path / "run/config.yaml") == size
    assert tokenize(config, force=True).source_vocab_size <= 2_000


def test_the_learned_vocabulary_size_is_written_before_the_text_is_encoded(toy_config, tmp_path, monkeypatch):
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("mtrain.training.setup.prepare_run.prepare_data", interrupt)
    with pytest.raises(KeyboardInterrupt):
        fit(toy_config(), device="cpu")
    assert size_in(tmp_path / "run/config.yaml") == Tokenizer(tmp_path / "run/tokenizer").source_vocab_size


@pytest.mark.slow
def test_a_run_with_a_reduced_vocabulary_resumes(toy_config, tmp_path):
    config, run = toy_config(), tmp_path / "run"
    size = tokenize(config).source_vocab_size
    for steps in (1, 2):  # a first run that finds the tokenizer, and one that resumes
        keys = config.training.model_copy(update={"max_steps": steps})
        fit(config.model_copy(update={"training": keys}), device="cpu")
        assert size_in(run / "config.yaml") == size_in(run / "model/config.yaml") == size
        assert Tokenizer(run / "model/tokenizer").source_vocab_size == size
