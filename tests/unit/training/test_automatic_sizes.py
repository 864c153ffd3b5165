"""`model.preset: auto` takes the sizes from the number of training pairs, unless the config gives them."""

import pytest
import yaml

from mtrain.config.presets import PRESETS
from mtrain.errors import DataError
from mtrain.training.init_from import resolved
from mtrain.training.loop import fit
from mtrain.training.run_folder import tokenize


@pytest.mark.parametrize(("pairs", "vocab_size"), [(1_999, 1_000), (2_000, 4_000)])
def test_sizes_follow_the_number_of_training_pairs(make_config, tmp_path, pairs, vocab_size):
    (tmp_path / "train.tsv").write_text("a\tb\n" * pairs)
    config = make_config(model={"preset": "auto"}, data={"train": {"tsv": str(tmp_path / "train.tsv")}})
    raw = config.model_dump(mode="json", exclude_unset=True) | {"model": {"preset": "auto"}, "tokenizer": {}}
    chosen, _ = resolved(type(config).model_validate(raw))
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
    assert resolved(config) == (config, None)
    missing = {"source": "nowhere.en", "target": "nowhere.de"}
    with pytest.raises(DataError, match=r"nowhere\.en"):
        resolved(make_config(model={"preset": "auto"}, data={"train": missing}))
