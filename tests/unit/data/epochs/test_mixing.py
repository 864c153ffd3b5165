"""How the pairs of a stage are chosen: what is read, what is verified, and how large windows are."""

import os
from fractions import Fraction

import pytest

from mtrain.data.epochs.mixing import Mixer
from mtrain.data.epochs.schedule import Position
from mtrain.data.store.shards import shard_file
from mtrain.errors import DataError
from tests.support.encoding import TOY, config, prepare_data, use_sizes, write


@pytest.fixture
def mixed(tmp_path, tokenizer, monkeypatch):
    """Prepare a corpus of 20 pairs and one of 200, in 22 buckets and 9 shards, with the given stages."""
    use_sizes(monkeypatch, block=40, shard=25, bucket=10)

    def prepare(*stages, window_pairs=10_000):
        named = {"small": TOY[:20], "large": TOY[20:220]}
        train = [{**write(tmp_path / f"{name}.tsv", pairs), "name": name} for name, pairs in named.items()]
        data = config(tmp_path, train, stages=list(stages), window_pairs=window_pairs)
        return prepare_data(data, tokenizer, tmp_path / "data", seed=1).train

    return prepare


def choose(mixer: Mixer, epoch: int) -> tuple[list, list[tuple[int, int]]]:
    """The rows of a one-window epoch of the first stage, and the buckets that are read."""
    read = []
    chosen = list(mixer.choose((0,), epoch, 0, lambda i, buckets: read.extend((i, b) for b in buckets)))
    return chosen, read


def test_only_the_buckets_with_chosen_pairs_are_read(mixed):
    mixer = mixed({"shares": {"small": 2, "large": 1}, "of": "small"}).mixer
    of_large = [{bucket for i, bucket in choose(mixer, epoch)[1] if i > 0} for epoch in range(20)]
    assert max(map(len, of_large)) <= 4  # of 22, for 10 of 200 pairs
    assert len(set.union(*of_large)) == 22


def test_pairs_that_occur_more_than_once_are_stored_once(mixed):
    train = mixed({"shares": {"small": 1, "large": 1}, "of": "large"})
    weights = [train.open(Position(epoch)).weights.tolist() for epoch in (0, 1)]
    assert weights == [[10.0] * 20 + [1.0] * 200] * 2
    assert train.mixer.mixture((0,)).pairs == {0: 200, 1: 200}
    train = mixed({"shares": {"small": 0.1, "large": 0.8}, "of": "large"})
    weights = [train.open(Position(epoch)).weights.tolist()[:20] for epoch in (0, 1)]
    assert [sorted(found) for found in weights] == [[1.0] * 15 + [2.0] * 5] * 2
    assert weights[0] != weights[1]  # other pairs occur twice


def test_small_stages_have_few_windows(mixed):
    stages = {"shares": {"large": 1}, "max_steps": 5}, {"shares": {"small": 1, "large": 2}}
    train = mixed(*stages, window_pairs=60)
    assert [train.count_windows(starts) for starts in ((0,), (0, 1))] == [6, 1]
    assert train.mixer.mixture((0, 1)).epoch_pairs == 60
    assert not train.fits_one_window


def test_mean_weights_average_over_the_epochs_of_a_run(mixed):
    stages = (
        {"shares": {"small": 1}, "max_epochs": 3},
        {"shares": {"small": 1, "large": 1}, "max_steps": 9},
        {"shares": {"large": 1}},
    )
    mixer = mixed(*stages).mixer
    exact = {
        None: (4, Fraction(11, 10), 5),
        2: (2, 0, 2),
        4: (4, Fraction(1, 10), 4),
        6: (4, Fraction(21, 10), 6),
    }
    for epochs, (small, large, total) in exact.items():
        assert mixer.mean_weights(epochs) == pytest.approx([small / total, float(large) / total])


def test_damaged_pairs_of_a_stage_are_named(mixed, tmp_path):
    train = mixed({"shares": {"small": 1}, "max_steps": 5}, {"shares": {"large": 1}}, window_pairs=60)
    file = shard_file(tmp_path / "data", 4)
    with file.open("r+b") as stream:
        stream.seek(-1, os.SEEK_END)
        stream.write(b"x")
    train.open(Position())  # of the other corpus
    with pytest.raises(DataError, match=f"{file}: damaged .*; run again to encode this shard again"):
        for window in range(train.count_windows((0, 1))):
            train.open(Position(1, window, starts=(0, 1)))
