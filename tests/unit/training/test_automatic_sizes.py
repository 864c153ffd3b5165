"""`model.preset: auto` takes the sizes from the number of training pairs, unless the config gives them."""

import logging
from pathlib import Path

import pytest
import yaml

from mtrain.config.presets import PRESETS
from mtrain.config.schema import Config
from mtrain.errors import DataError, UsageError
from mtrain.tokenizer.tokenizer import Tokenizer
from mtrain.training.fit import fit
from mtrain.training.prepare_tokenizer import tokenize
from mtrain.training.resolve_config import resolve_config


@pytest.mark.parametrize(("pairs", "vocab_size"), [(1_999, 1_000), (2_000, 4_000)])
def test_sizes_follow_the_number_of_training_pairs(make_config, tmp_path, pairs, vocab_size):
    (tmp_path / "train.tsv").write_text("a\tb\n" * pairs)
    config = make_config(model={"preset": "auto"}, data={"train": {"tsv": str(tmp_path / "train.tsv")}})
    raw = config.model_dump(mode="json", exclude_unset=True) | {"model": {"preset": "auto"}, "tokenizer": {}}
    chosen, _ = resolve_config(type(config).model_validate(raw))
    assert {key: getattr(chosen.model, key) for key in PRESETS["tiny"]} == PRESETS["tiny"]
    assert chosen.tokenizer.vocab_size == vocab_size
    assert chosen.model.preset is None and chosen.training == config.training


def test_given_sizes_win_and_the_run_holds_the_numbers(make_config, tmp_path):
    config = make_config(model={"preset": "auto", "dropout": 0.2})  # with the small sizes of these tests
    tokenize(config)
    fit(config, device="cpu", quiet=True)
    fit(config, device="cpu", quiet=True)  # resolves to the same sizes, so it is the same run
    written = yaml.safe_load((tmp_path / "run/config.yaml").read_text())
    assert written["model"]["preset"] is None and written["model"]["d_model"] == 32
    assert written["tokenizer"]["vocab_size"] == 330 and written["model"]["dropout"] == 0.2


def test_a_config_with_sizes_is_not_changed_and_a_missing_corpus_is_named(make_config):
    config = make_config()
    assert resolve_config(config) == (config, None)
    missing = {"source": "nowhere.en", "target": "nowhere.de"}
    with pytest.raises(DataError, match=r"nowhere\.en"):
        resolve_config(make_config(model={"preset": "auto"}, data={"train": missing}))


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


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
@pytest.mark.parametrize("joint", [True, False])
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


def test_a_run_with_a_reduced_vocabulary_resumes(toy_config, tmp_path):
    config, run = toy_config(), tmp_path / "run"
    size = tokenize(config).source_vocab_size
    for steps in (1, 2):  # a first run that finds the tokenizer, and one that resumes
        keys = config.training.model_copy(update={"max_steps": steps})
        fit(config.model_copy(update={"training": keys}), device="cpu", quiet=True)
        assert size_in(run / "config.yaml") == size_in(run / "model/config.yaml") == size
        assert Tokenizer(run / "model/tokenizer").source_vocab_size == size
