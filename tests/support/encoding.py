"""Corpora that are encoded, and what became of them."""

import logging
import re
from pathlib import Path

import pytest

from mtrain.config.schema import DataConfig, TokenizerConfig
from mtrain.data import Pair
from mtrain.data.encode import EncodedCorpus, PreparedData
from mtrain.data.toy import toy_pairs
from mtrain.tokenizer.learn import train_tokenizer
from mtrain.tokenizer.tokenizer import Tokenizer

TOY = toy_pairs("train")[:300]


def learn(folder: Path, vocab_size: int = 400, **keys) -> Tokenizer:
    pairs = toy_pairs("train")[:2000]
    config = TokenizerConfig(vocab_size=vocab_size, **keys)
    train_tokenizer(config, lambda: (p.source for p in pairs), lambda: (p.target for p in pairs), folder, 1)
    return Tokenizer(folder)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return learn(tmp_path_factory.mktemp("tokenizer"))


def write(path: Path, pairs: list[Pair] | list[tuple[str, str]]) -> dict[str, str]:
    path.write_bytes("".join(f"{source}\t{target}\n" for source, target in pairs).encode())
    return {"tsv": str(path)}


def config(tmp_path: Path, train=None, validation=None, **keys) -> DataConfig:
    if train is None:
        train = write(tmp_path / "train.tsv", TOY)
    validation = validation or write(tmp_path / "validation.tsv", TOY[:3])
    return DataConfig(source_lang="en", target_lang="fr", train=train, validation=validation, **keys)


def rows(prepared: PreparedData, epoch: int | None = None) -> list[tuple[list[int], list[int]]]:
    return rows_of(prepared.train if epoch is None else prepared.train.epoch(epoch))


def rows_of(corpus: EncodedCorpus) -> list[tuple[list[int], list[int]]]:
    source, target = corpus.fetch(list(range(len(corpus))))
    return list(zip(source.to_pylist(), target.to_pylist(), strict=True))


def text_of(prepared: PreparedData, tokenizer: Tokenizer) -> list[tuple[str, str]]:
    return [
        (tokenizer.source.decode([source[:-1]])[0], tokenizer.target.decode([target[:-1]])[0])
        for source, target in rows(prepared)
    ]


def dropped(caplog: pytest.LogCaptureFixture) -> dict[str, int]:
    """The counts by reason, as the last log line tells the user."""
    line = next(r.getMessage() for r in reversed(caplog.records) if "dropped" in r.getMessage())
    counts = re.search(r"dropped: (.*?)\)", line)[1]
    return {reason: int(n.replace(",", "")) for n, reason in re.findall(r"([\d,]+) ([a-z ]+)", counts)}


@pytest.fixture
def logs(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, "mtrain")
