"""Translation: one output line per input line for any bytes; batching changes nothing."""

import io
import random
import sys
from contextlib import redirect_stdout
from copy import copy
from itertools import cycle
from unittest.mock import patch

import pytest
from hypothesis import strategies as st

from mtrain import Translator
from mtrain.cli import main
from mtrain.decoding.alignment import word_spans
from tests.support.training import PAIRS

words = st.sampled_from(" ".join(source for source, _ in PAIRS).split())
sentences = st.lists(words, max_size=9).map(" ".join) | st.text(max_size=12)
SEARCHES = [{"beam_size": 1}, {"beam_size": 4}, {"samples": 2, "seed": 7}]


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("search", SEARCHES, ids=["greedy", "beam", "samples"])
def test_translations_do_not_depend_on_batches_order_or_threads(tried, run_dir, search, workers):
    """In fp64 the texts are identical."""
    double = Translator.load(run_dir, "cpu").with_settings(**search, workers=workers)
    for model in double.models:
        model.transformer.double()

    @tried(
        2,
        lines=st.lists(sentences, min_size=2, max_size=20),
        batch_tokens=st.sampled_from([1, 70, 10_000]),
        window=st.integers(1, 9),
        seed=st.integers(0, 2**30),
    )
    def check(lines, batch_tokens, window, seed):
        def texts(translations):
            return [translation.text for translation in translations]

        expected = texts(double.with_settings(workers=1).translate(lines))
        assert texts(double.with_settings(batch_tokens=batch_tokens).translate(lines)) == expected
        ends = cycle([False] * (window - 1) + [True])
        assert texts(double.stream(iter(lines), paused=lambda _: next(ends))) == expected
        if "samples" not in search:  # their random numbers depend on the position of the line
            order = random.Random(seed).sample(range(len(lines)), len(lines))
            assert texts(double.translate([lines[i] for i in order])) == [expected[i] for i in order]


def test_any_bytes_give_one_line_per_line_or_a_data_error(tried, run_dir):
    some = st.binary(max_size=12) | st.text(max_size=9).map(
        lambda text: text.encode("utf-8", "surrogatepass")
    )
    ends = st.sampled_from([b"\n", b"\r\n", b"\n\n", b"\r", b""])

    @tried(15, parts=st.lists(st.tuples(some, ends), max_size=5))
    def check(parts):
        given = b"".join(line + end for line, end in parts)
        out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", newline="")
        stdin = io.TextIOWrapper(io.BytesIO(given), encoding="utf-8")
        with patch.object(sys, "stdin", stdin), redirect_stdout(out), pytest.raises(SystemExit) as stop:
            main(["translate", str(run_dir), "--device", "cpu", "--beam-size", "1", "--quiet"])
        out.flush()
        lines = given.count(b"\n") + (not given.endswith(b"\n") and given != b"")
        try:
            clean = "\0" not in given.decode("utf-8")
        except UnicodeDecodeError:
            clean = False
        assert stop.value.code == (0 if clean else 3)
        assert not clean or out.buffer.getvalue().count(b"\n") == lines


@pytest.mark.parametrize("mode", ["sentences", "long"])
def test_alignments_are_word_numbers_of_the_line_as_given(tried, translator: Translator, mode: str) -> None:
    """Wherever it is split, and whatever the tokenizer makes of its characters."""
    pieces = [
        *"\t  \u3000\u00a0\u200b\u0085\x1c.!。aXß我½´\ufdfa\u0301\x01",
        "It rains.",
        "sun " * 9,
        "x" * 40,
        "我。" * 9,
    ]
    short = copy(translator)
    short.max_length = 12
    short = short.with_settings(split=mode, beam_size=1)

    @tried(
        12, lines=st.lists(st.lists(st.sampled_from(pieces), max_size=9).map("".join), min_size=1, max_size=3)
    )
    def check(lines: list[str]) -> None:
        for line, found in zip(lines, short.translate(lines, alignments=True), strict=True):
            assert found.alignment is not None
            assert {source for source, _ in found.alignment} <= set(range(len(word_spans(line))))
            assert {target for _, target in found.alignment} <= set(range(len(word_spans(found.text))))
