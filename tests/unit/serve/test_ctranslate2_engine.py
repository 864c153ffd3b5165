"""Decoding by CTranslate2, with the text, the parts and the joining of mtrain."""

import pytest

from mtrain import Translator
from mtrain.errors import UsageError
from mtrain.serve.batching import Batcher
from mtrain.serve.ctranslate2_engine import ctranslate2_decoder
from tests.support.training import PAIRS

pytest.importorskip("ctranslate2")


def test_the_engine_translates_as_mtrain_does(run_dir):
    batcher = Batcher()
    with Translator.load(run_dir, "cpu", workers=1) as translator:
        decode = ctranslate2_decoder(run_dir, translator, 1)
        texts = [source for source, _ in PAIRS] + ["", "It rains.\nThe sun shines."]
        found = batcher.submit(translator, texts, n_best=2, alignments=True, decode=decode).result()
    batcher.close()
    assert [one.text for one in found] == [
        *(target for _, target in PAIRS),
        "",
        "Es regnet.\nDie Sonne scheint.",
    ]
    assert all(len(one.n_best) == 2 for one in found[:8])
    for text, one in zip(texts, found, strict=True):
        assert all(i < len(text.split()) and j < len(one.text.split()) for i, j in one.alignment)
        assert bool(one.alignment) == bool(text)


def test_sampling_is_refused(run_dir):
    with (
        Translator.load(run_dir, "cpu", ["decoding.samples=2"]) as translator,
        pytest.raises(UsageError, match="--engine ctranslate2"),
    ):
        ctranslate2_decoder(run_dir, translator, 1)
