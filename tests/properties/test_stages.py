"""Stages mix corpora exactly as their shares say, in an order that does not depend on interruptions."""

import math
from collections import Counter, defaultdict
from fractions import Fraction
from itertools import accumulate, takewhile

import numpy as np
import torch
from hypothesis import strategies as st

from mtrain.config.load import validate
from mtrain.config.schema import Config
from mtrain.data.epochs.batching import Division
from mtrain.data.epochs.loader import Loader
from mtrain.data.epochs.schedule import Position
from mtrain.data.epochs.windows import WindowPlanner
from tests.support.encoding import TOY, config, prepare_data, use_sizes, write

EPOCHS = 5
NAMES = ("a", "b", "c")
SHARES = st.dictionaries(st.sampled_from(NAMES), st.integers(1, 30).map(lambda n: n / 10), min_size=1)


@st.composite
def stages(draw) -> list[dict]:
    """Stages of three corpora. All but the last one have limits."""
    found = []
    for number in range(count := draw(st.integers(1, 3))):
        shares = draw(SHARES)
        stage = {"shares": shares, "of": draw(st.none() | st.sampled_from(sorted(shares)))}
        if number < count - 1:
            limit = draw(st.sampled_from(["max_epochs", "max_steps", "both"]))
            stage |= {"max_epochs": draw(st.integers(1, 2))} if limit != "max_steps" else {}
            stage |= {"max_steps": draw(st.integers(1, 9))} if limit != "max_epochs" else {}
        found.append(stage)
    return found


SIZES = {
    "sizes": st.tuples(*[st.integers(1, 40)] * 3),
    "block": st.integers(1, 40),
    "shard": st.integers(1, 30),
    "bucket": st.integers(1, 40),
    "window_pairs": st.sampled_from([5, 40, 10_000]),
    "stages": stages(),
}


def prepare_stages(folder, tokenizer, sizes, window_pairs, stages, batch_tokens=64):
    """A function that makes loaders of corpora of these sizes."""
    train = [
        {**write(folder / f"{n}.tsv", TOY[:size]), "name": n} for n, size in zip(NAMES, sizes, strict=True)
    ]
    section = config(folder, train, max_length=64, window_pairs=window_pairs, stages=stages)
    raw = {"run_dir": str(folder), "data": section.model_dump(exclude_unset=True)}
    given = validate(Config, raw | {"training": {"batch_tokens": batch_tokens}}, "test")

    def loader(rank=0, world_size=1):
        corpus = prepare_data(section, tokenizer, folder / "data", seed=1).train
        planner = WindowPlanner(corpus, given, Division(64, rank=rank, world_size=world_size))
        return Loader(planner, tokenizer, torch.device("cpu"), lambda exact: None)

    return loader


def steps_of(loader: Loader, start: Position | None = None) -> list:
    """Stage, epoch, places and next position of the steps of the first epochs, from a position on."""
    found = takewhile(lambda step: step.epoch <= EPOCHS, loader.steps(start))
    return [(step.stage, step.epoch, step.locate(), step.next) for step in found]


def name_and_place(place: str) -> tuple[str, str]:
    return place.rpartition("/")[2].partition(".")[0], place


def test_each_epoch_has_the_shares_of_its_stage(tried, tokenizer, tmp_path_factory, monkeypatch):
    @tried(3, **SIZES)
    def check(sizes, block, shard, bucket, window_pairs, stages):
        use_sizes(monkeypatch, block, shard, bucket)
        loader = prepare_stages(tmp_path_factory.mktemp("any"), tokenizer, sizes, window_pairs, stages)
        size_of = dict(zip(NAMES, sizes, strict=True))
        epochs, numbers = defaultdict(Counter), defaultdict(set)
        seen = defaultdict(Counter)
        for stage, epoch, places, _ in steps_of(loader()):
            epochs[epoch].update(map(name_and_place, places))
            numbers[stage].add(epoch)
        assert sorted(epochs) == list(range(1, EPOCHS + 1))
        for number, stage in enumerate(stages, start=1):
            shares = {name: Fraction(str(share)) for name, share in stage["shares"].items()}
            counted = stage["of"] or min(shares)
            taken = defaultdict(int)
            for done, epoch in enumerate(sorted(numbers[number]), start=1):
                if "max_steps" in stage and epoch == max(numbers[number]):
                    continue  # it may be cut short
                found = epochs[epoch]
                assert {name for name, _ in found} <= shares.keys()
                pairs = {place: count for (name, place), count in found.items() if name == counted}
                assert len(pairs) == size_of[counted] and set(pairs.values()) == {1}
                for name, share in shares.items():
                    taken[name] += sum(count for (owner, _), count in found.items() if owner == name)
                    exact = done * size_of[counted] * share / shares[counted]
                    assert abs(taken[name] - exact) < 1
                    seen[name].update({p: count for (owner, p), count in found.items() if owner == name})
        if not any("max_steps" in stage for stage in stages):
            for name, counts in seen.items():
                times = [*counts.values(), *[0] * (size_of[name] - len(counts))]
                assert max(times) - min(times) <= 1


def test_stages_end_when_they_should_and_resuming_keeps_the_order(
    tried, tokenizer, tmp_path_factory, monkeypatch
):
    @tried(3, **SIZES, data=st.data())
    def check(sizes, block, shard, bucket, window_pairs, stages, data):
        use_sizes(monkeypatch, block, shard, bucket)
        loader = prepare_stages(tmp_path_factory.mktemp("any"), tokenizer, sizes, window_pairs, stages)
        whole = steps_of(loader())
        order = [stage for stage, *_ in whole]
        assert order == sorted(order) and order[0] == 1
        for number, stage in enumerate(stages[:-1], start=1):
            epochs = {epoch for found, epoch, *_ in whole if found == number}
            steps = order.count(number)
            if number + 1 in order:  # it has ended
                by_epochs = len(epochs) == stage.get("max_epochs")
                by_steps = steps == stage.get("max_steps")
                assert by_epochs or by_steps
            assert len(epochs) <= stage.get("max_epochs", EPOCHS) and steps <= stage.get("max_steps", 10**9)
        at = data.draw(st.integers(0, len(whole) - 2))
        assert steps_of(loader(), whole[at][-1]) == whole[at + 1 :]
        assert [batch[:3] for batch in whole] == [batch[:3] for batch in steps_of(loader())]


def test_ranks_share_the_pairs_of_each_step(tried, tokenizer, tmp_path_factory, monkeypatch):
    @tried(2, **SIZES, world_size=st.integers(2, 3))
    def check(sizes, block, shard, bucket, window_pairs, stages, world_size):
        use_sizes(monkeypatch, block, shard, bucket)
        folder = tmp_path_factory.mktemp("any")
        loader = prepare_stages(folder, tokenizer, sizes, window_pairs, stages, batch_tokens=256)
        alone = steps_of(loader())
        ranks = [steps_of(loader(rank, world_size)) for rank in range(world_size)]
        for one, *parts in zip(alone, *ranks, strict=True):
            assert sorted(one[2]) == sorted(place for part in parts for place in part[2])
            assert {(*part[:2], part[3]) for part in parts} == {(*one[:2], one[3])}


def test_windows_have_the_shares_of_the_stage(tokenizer, tmp_path, monkeypatch):
    use_sizes(monkeypatch, 40, 25, 10)
    given = {"shares": {"a": 0.5, "b": 0.3, "c": 0.2}, "of": "b"}
    corpus = prepare_stages(tmp_path, tokenizer, (300, 200, 100), 40, [given])().planner.corpus
    windows = [corpus.open(Position(0, number)) for number in range(corpus.count_windows())]
    assert len(windows) > 5 and all(len(window) <= 41 for window in windows)
    counts = []
    for window in windows:
        found = Counter(name_and_place(place)[0] for place in window.locate(range(len(window))))
        assert (window.weights == 1).all()
        counts.append([found[name] for name in NAMES])
    for a, b, c in accumulate(map(np.array, counts)):
        for found, share in ((a, 0.5), (c, 0.2)):
            assert math.isclose(found, b * share / 0.3, abs_tol=2)
    assert sum(map(np.array, counts)).tolist() == [333, 200, 133]
