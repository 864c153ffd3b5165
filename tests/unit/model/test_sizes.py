"""`model.preset: auto`: sizes from the corpus, unless they are given."""

import pytest
import yaml

from mtrain.config.schema import PRESETS
from mtrain.errors import DataError
from mtrain.training import init_from as origin
from mtrain.training.init_from import TABLE, resolved
from mtrain.training.loop import fit
from mtrain.training.run_folder import tokenize


def test_larger_corpora_get_larger_models_and_vocabularies():
    order = [PRESETS[preset]["d_model"] for _, preset, _ in TABLE]
    assert order == sorted(order) and sorted(TABLE) == list(TABLE)
    vocabularies = [pieces for _, _, pieces in TABLE]
    assert vocabularies == sorted(vocabularies)


@pytest.mark.parametrize(
    ("pairs", "d_model", "vocab_size"), [(8, 256, 8000), (9, 128, 4000), (100, 128, 4000), (5, 1024, 32000)]
)
def test_sizes_follow_the_number_of_pairs(make_config, monkeypatch, pairs, d_model, vocab_size):
    """The corpus of these tests has eight pairs."""
    table = {
        8: [(8, "tiny", 4000), (9, "small", 8000)],
        9: [(9, "tiny", 4000)],
        100: [(100, "tiny", 4000)],
        5: [(5, "tiny", 4000), (float("inf"), "big", 32000)],
    }
    monkeypatch.setattr(origin, "TABLE", table[pairs])
    config = make_config()
    raw = config.model_dump(mode="json", exclude_unset=True) | {"model": {"preset": "auto"}, "tokenizer": {}}
    chosen, _ = resolved(type(config).model_validate(raw))
    assert (chosen.model.d_model, chosen.tokenizer.vocab_size) == (d_model, vocab_size)
    assert chosen.model.preset is None and chosen.training == config.training


def test_given_sizes_win_and_the_run_holds_the_numbers(make_config, tmp_path):
    config = make_config(model={"preset": "auto", "dropout": 0.2})  # and the small sizes of these tests
    tokenize(config)
    fit(config, device="cpu", quiet=True)
    fit(config, device="cpu", quiet=True)  # resolves to the same, so it is the same run
    written = yaml.safe_load((tmp_path / "run/config.yaml").read_text())
    assert written["model"]["preset"] is None and written["model"]["d_model"] == 32
    assert written["tokenizer"]["vocab_size"] == 330 and written["model"]["dropout"] == 0.2


def test_a_config_with_sizes_is_left_alone_and_a_missing_corpus_is_named(make_config):
    config = make_config()
    assert resolved(config) == (config, None)
    missing = {"source": "nowhere.en", "target": "nowhere.de"}
    with pytest.raises(DataError, match=r"nowhere\.en"):
        resolved(make_config(model={"preset": "auto"}, data={"train": missing}))
