"""Corpora to encode, and the text and counts of encoded ones."""

import logging
import re
from pathlib import Path

import pytest
from hypothesis import strategies as st

from mtrain.config.sections.data import DataConfig
from mtrain.data import Pair
from mtrain.data import prepare as preparation
from mtrain.data.epochs.schedule import Position
from mtrain.data.prepare import PreparedData
from mtrain.data.preparing import encode_folder, encode_shards
from mtrain.data.reading.files import toy_pairs
from mtrain.data.scanning.scanner import CorpusScanner
from mtrain.data.store.folder import DataFolder
from mtrain.data.store.shards import EncodedCorpus
from mtrain.tokenizer.tokenizer import Tokenizer
from tests.support.tokenizers import train

TOY = toy_pairs("train")[:300]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A joint tokenizer of the toy corpus with 400 pieces."""
    return train(tmp_path_factory.mktemp("tokenizer"))


def write(path: Path, pairs: list[Pair] | list[tuple[str, str]]) -> dict[str, str]:
    """Write pairs as TSV; returns the corpus section for a config."""
    path.write_bytes("".join(f"{source}\t{target}\n" for source, target in pairs).encode())
    return {"tsv": str(path)}


def config(tmp_path: Path, train=None, validation=None, **keys) -> DataConfig:
    """A data section; the training pairs are `TOY` unless given."""
    if train is None:
        train = write(tmp_path / "train.tsv", TOY)
    validation = validation or write(tmp_path / "validation.tsv", TOY[:3])
    return DataConfig(source_lang="en", target_lang="fr", train=train, validation=validation, **keys)


# Strategies for the number of pairs in each of some corpora, and for the arguments of `use_sizes`.
CORPORA = {
    "sizes": st.lists(st.integers(0, 60), min_size=1, max_size=3).filter(any),
    "block": st.integers(1, 40),
    "shard": st.integers(1, 70),
    "bucket": st.integers(1, 60),
}


def use_sizes(monkeypatch: pytest.MonkeyPatch, block: int, shard: int, bucket: int) -> None:
    """Set the number of pairs in a block, in a shard, and in a bucket of the whole corpus."""
    monkeypatch.setattr(encode_shards, "BLOCK", block)
    monkeypatch.setattr(encode_shards, "SHARD", shard)
    monkeypatch.setattr(encode_folder, "BUCKET", bucket)


def prepare_data(
    data: DataConfig,
    tokenizer: Tokenizer,
    folder: Path,
    seed: int,
    trained_on: str | None = None,
    scanner: CorpusScanner | None = None,
    workers: int | None = None,
    run_dir: Path | None = None,
) -> PreparedData:
    """Open a data folder, by default `RUN/data`, and call the function of the same name. The text is scanned
    in this process, also if `workers` encode it."""
    opened = DataFolder(folder, run_dir or folder.parent, data.folder is not None)
    scanner = scanner or preparation.make_scanner(data, opened, seed)
    if workers:
        assert scanner.result.pairs
        scanner.workers = workers
    return preparation.prepare_data(data, tokenizer, opened, scanner, seed, trained_on)


def rows(prepared: PreparedData, epoch: int | None = None) -> list[tuple[list[int], list[int]]]:
    """Source and target ids of all training pairs, as segmented in an epoch."""
    return rows_of(prepared.train.encoded() if epoch is None else prepared.train.open(Position(epoch)))


def rows_of(corpus: EncodedCorpus) -> list[tuple[list[int], list[int]]]:
    """Source and target ids of all pairs of an encoded corpus."""
    source, target = corpus.fetch(list(range(len(corpus))))
    return list(zip(source.to_lists(), target.to_lists(), strict=True))


def text_of(prepared: PreparedData, tokenizer: Tokenizer) -> list[tuple[str, str]]:
    """The decoded training pairs."""
    return [
        (tokenizer.source.decode([source[:-1]])[0], tokenizer.target.decode([target[:-1]])[0])
        for source, target in rows(prepared)
    ]


def dropped(caplog: pytest.LogCaptureFixture) -> dict[str, int]:
    """The number of dropped pairs by reason, from the last log line that reports it."""
    line = next(r.getMessage() for r in reversed(caplog.records) if "dropped" in r.getMessage())
    counts = re.search(r"dropped: (.*?)\)", line)[1]
    return {reason: int(n.replace(",", "")) for n, reason in re.findall(r"([\d,]+) ([a-z ]+)", counts)}


@pytest.fixture
def logs(caplog: pytest.LogCaptureFixture):
    """Capture the log messages of mtrain from level INFO on."""
    caplog.set_level(logging.INFO, "mtrain")
