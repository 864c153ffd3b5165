"""Windows of any size contain each pair once an epoch, in an order that does not depend on interruptions."""

from collections import Counter
from itertools import pairwise, takewhile

import numpy as np
import torch
from hypothesis import strategies as st

from mtrain.config.load import validate
from mtrain.config.schema import Config
from mtrain.config.sections.augment import Augment
from mtrain.data.epochs.batching import Division, plan_batches
from mtrain.data.epochs.loader import Loader
from mtrain.data.epochs.schedule import ONE_WINDOW, Position, WindowLayout
from mtrain.data.epochs.windows import WindowPlanner
from tests.support.encoding import CORPORA, TOY, config, prepare_data, use_sizes, write

AUGMENT = list(Augment.model_fields)
LAYOUTS = {
    "pairs": st.integers(1, 10**9),
    "buckets": st.integers(1, 300),
    "window_pairs": st.integers(1, 10**8),
}


def test_windows_contain_each_bucket_once_and_grow_from_a_single_one(tried):
    @tried(60, **LAYOUTS, seed=st.integers(0, 2**40), epoch=st.integers(0, 99))
    def check(pairs, buckets, window_pairs, seed, epoch):
        layout = WindowLayout.of(pairs, buckets, window_pairs)
        assert (layout == ONE_WINDOW) == (pairs <= window_pairs or buckets == 1)
        if layout == ONE_WINDOW:
            return
        windows = layout.windows(seed, epoch)
        assert windows == layout.windows(seed, epoch)
        assert sorted(bucket for window in windows for bucket in window) == list(range(buckets))
        sizes = list(map(len, windows))
        assert sizes[0] == 1 and all(size <= 2 * last for last, size in pairwise(sizes))
        assert max(sizes) == 1 or max(sizes) * pairs / buckets <= window_pairs


def test_the_order_of_the_buckets_is_independent_of_the_batches():
    """NumPy fills seeds with zeros."""
    layout, same = WindowLayout(buckets=40, largest=1), 0
    for epoch in range(100):
        order = [bucket for [bucket] in layout.windows(1, epoch)]
        seeds = ([1, epoch], [1, epoch, 0], [1, epoch, 0, 0], [1, epoch, 1])
        same += order in [np.random.default_rng(seed).permutation(40).tolist() for seed in seeds]
    assert not same


def steps_of_epochs(loader: Loader, epochs: int, start: Position) -> list:
    """The positions and pairs of the steps of the first epochs, from a position on."""
    steps = takewhile(lambda step: step.epoch <= epochs, loader.steps(start))
    return [(step.next, [batch.labels.tolist() for batch in step.batches], step.locate()) for step in steps]


def test_each_pair_occurs_once_an_epoch_and_resuming_keeps_the_order(
    tried, tokenizer, tmp_path_factory, monkeypatch
):
    @tried(
        3,
        **CORPORA,
        window_pairs=st.integers(1, 100),
        batch_tokens=st.integers(64, 400),
        sampling=st.sampled_from([None, 0.3]),
        augment=st.fixed_dictionaries({}, optional=dict.fromkeys(AUGMENT, st.sampled_from([0.1, 1]))),
        world_size=st.integers(1, 4),
        data=st.data(),
    )
    def check(sizes, block, shard, bucket, window_pairs, batch_tokens, sampling, augment, world_size, data):
        use_sizes(monkeypatch, block, shard, bucket)
        folder = tmp_path_factory.mktemp("any")
        train = [write(folder / f"{i}.tsv", TOY[:size]) for i, size in enumerate(sizes)]
        keys = {"max_length": 64, "window_pairs": window_pairs, "subword_sampling": sampling}
        keys["augment"] = augment
        section = config(folder, train, **keys)
        prepared = prepare_data(section, tokenizer, folder / "data", seed=1)
        raw = {"run_dir": str(folder), "data": section.model_dump(exclude_unset=True)}
        given = validate(Config, raw | {"training": {"batch_tokens": batch_tokens}}, "test")

        def loader():
            corpus = prepare_data(section, tokenizer, folder / "data", seed=1).train
            return Loader(
                WindowPlanner(corpus, given, Division(64)), tokenizer, torch.device("cpu"), lambda exact: None
            )

        whole = steps_of_epochs(loader(), 2, Position())
        assert len(prepared.train) == sum(sizes)
        pairs = Counter(place for _, _, places in whole for place in places)
        noise = pairs.pop("data.augment.noise", 0)
        assert noise >= 2 * sum(sizes) * 0.7 if augment.get("noise") == 1 else noise < 2 * sum(sizes)
        assert pairs == {f"{folder}/{i}.tsv:{n + 1}": 2 for i, size in enumerate(sizes) for n in range(size)}
        for number in range(len(prepared.train.windows(epoch=0))):
            position = Position(0, number)
            window = prepared.train.open(position)
            sides = window.source_lengths, window.target_lengths
            key = (1, *prepared.train.key(position))
            divisions = [Division(64, rank=rank, world_size=world_size) for rank in range(world_size)]
            plans = [plan_batches(sides, batch_tokens, division, key) for division in divisions]
            rows = [row for plan in plans for step in plan.steps for part in step for row in part.tolist()]
            assert sorted(rows) == list(range(len(window)))
        at = data.draw(st.integers(0, len(whole) - 2))
        assert steps_of_epochs(loader(), 2, whole[at][0]) == whole[at + 1 :]
