"""Shards and buckets of any size contain each pair once, in the same order."""

from mtrain.data.store.shards import EncodedCorpus, Shard
from tests.support.encoding import (
    CORPORA,
    TOY,
    config,
    prepare_data,
    rows,
    rows_of,
    text_of,
    use_sizes,
    write,
)


def test_each_pair_is_in_one_bucket(tried, tokenizer, tmp_path_factory, monkeypatch):
    @tried(6, **CORPORA)
    def check(sizes, block, shard, bucket):
        use_sizes(monkeypatch, block, shard, bucket)
        folder = tmp_path_factory.mktemp("any")
        train = [write(folder / f"{i}.tsv", TOY[:size]) for i, size in enumerate(sizes)]
        data = config(folder, train)
        for _ in range(2):  # encoded, then reused
            prepared = prepare_data(data, tokenizer, folder / "data", seed=1)
            assert text_of(prepared, tokenizer) == [pair for size in sizes for pair in TOY[:size]]
        shards = [Shard(file) for file in sorted((folder / "data").glob("shard-*"))]
        buckets = range(len(shards[0].buckets) - 1)
        assert len(buckets) == -(-sum(sizes) // bucket)
        parts = [row for i in buckets for row in rows_of(EncodedCorpus.open(shards, data.train, [i]))]
        assert sorted(parts) == sorted(rows(prepared))
