"""Names of corpora, and stages of training: what is accepted, and what errors say."""

import pytest

TRAIN = "data.train=[{tsv: a.tsv, name: a}, {tsv: b.tsv, name: b}, {tsv: c.tsv}]"


def test_names_are_those_of_files_unless_they_are_given(load_text):
    assert load_text(TRAIN).data.names == ["a", "b", "c.tsv"]
    same = "{source: x/train.en, target: x/train.fr}"
    corpora = f"data.train=[{same}, {{toy: train}}, {same}, {{tsv: y, name: x/train.en (2)}}, {same}]"
    expected = ["x/train.en", "toy train", "x/train.en (3)", "x/train.en (2)", "x/train.en (4)"]
    assert load_text(corpora).data.names == expected


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ("[{tsv: a, name: x}, {tsv: b, name: x}]", "two corpora of data.train have the name x"),
        ('{tsv: a, name: ""}', "data.train.0.name: expected a non-empty string"),
        ('{tsv: a, name: "a\\nb"}', "data.train.0.name: expected a non-empty string"),
        ("{tsv: a, name: 3}", "data.train.0.name: expected"),
    ],
)
def test_names_must_be_unique_lines(rejection, train: str, message: str):
    assert message in rejection(f"data.train={train}")


@pytest.mark.parametrize("key", ["validation", "test.mine"])
def test_only_training_corpora_have_names(rejection, key: str):
    message = "name is allowed in data.train only; the key of a test set is its name"
    assert message in rejection(f"data.{key}={{toy: test, name: x}}")


def test_stages_count_the_epochs_of_one_corpus(load_text):
    stages = "[{shares: {c.tsv: 1, b: 3}, max_epochs: 2}, {shares: {b: 1, c.tsv: 1}, of: c.tsv}]"
    data = load_text(TRAIN, f"data.stages={stages}").data
    assert [stage.counted(data.names) for stage in data.stages] == ["b", "c.tsv"]
    assert [stage.max_epochs for stage in data.stages] == [2, None]


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        (
            "[{shares: {a: 1, d: 1}}]",
            "stage 1: no corpus of data.train has the name d; the names are a, b, c.tsv",
        ),
        (
            "[{shares: {a: 1}, max_epochs: 1}, {shares: {c.tsw: 1}}]",
            "stage 2: no corpus of data.train has the name c.tsw; did you mean c.tsv?",
        ),
        ("[{shares: {a: 1}, of: c}]", "stage 1: no corpus of data.train has the name c"),
        ("[{shares: {a: 1}, of: b}]", "stage 1: `of` names b, which has no share in this stage; give it one"),
        (
            "[{shares: {a: 1}}, {shares: {b: 1}}]",
            "stage 1: needs max_epochs or max_steps; only the last stage has neither",
        ),
        (
            "[{shares: {a: 1}, max_steps: 5}]",
            "stage 1: the last stage ends with the training; give training.max_epochs or training.max_steps",
        ),
        ("[{shares: {a: 1}, max_epochs: 5}]", "stage 1: the last stage ends with the training"),
        (
            "[{shares: {a: 1}, max_epochs: 0}, {shares: {a: 1}}]",
            "data.stages.0.max_epochs: expected an integer",
        ),
        ("[{shares: {a: 0}}]", "data.stages.0.shares.a: expected a number from 0.001 to 1000"),
        ("[{shares: {a: .nan}}]", "data.stages.0.shares.a: expected a"),
        ("[{shares: {}}]", "data.stages.0.shares: "),
        ("[{of: a}]", "data.stages.0.shares: this key is required"),
        ("[]", "data.stages: "),
        ("[{share: {a: 1}}]", "unknown key 'share'; did you mean 'shares'?"),
    ],
)
def test_stages_that_cannot_be_followed_are_named(rejection, stages: str, message: str):
    assert message in rejection(TRAIN, f"data.stages={stages}")


def test_weights_and_stages_exclude_each_other(rejection, load_text):
    train, stages = "data.train=[{tsv: a, weight: 2}, {tsv: b}]", "data.stages=[{shares: {a: 1, b: 1}}]"
    message = rejection(train, stages)
    assert "weight and stages are mutually exclusive; give one of them" in message
    load_text(train.replace("weight: 2", "weight: 1"), stages)
