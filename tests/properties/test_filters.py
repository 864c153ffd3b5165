"""Filters keep or reject each pair exactly once, for one reason, however the work is divided."""

import io
import re
import unicodedata
from collections import Counter

import numpy as np
import pytest
from hypothesis import strategies as st

from mtrain.data.clean import clean
from mtrain.data.pairs import duplicates
from mtrain.data.reading.digests import RawFiles
from mtrain.data.scanning import scanner as scan
from mtrain.data.scanning.scanner import CorpusScanner
from mtrain.data.store.folder import read_summary
from tests.support.encoding import CORPORA, TOY, config, prepare_data, rows, use_sizes, write

FILTERS = {
    **{"min_words": 1, "max_words": 6, "max_word_length": 8, "max_ratio": 2.5, "min_alphabetic": 0.6},
    **{"script": True, "copied": True, "same_numbers": True, "duplicates": "pairs"},
}
ODD = st.text("ab Zß1٣.,\u2028\u3000\x1c漢д😀e\u0301\U0001d400", max_size=12)
PAIRS = st.lists(st.sampled_from([*TOY[:8], ("", "x"), ("Tom", "Tom")]) | st.tuples(ODD, ODD), max_size=40)


def share_of_letters(text):
    visible = [c for c in text if not c.isspace()]
    return sum(unicodedata.category(c)[0] in "LM" for c in visible) / len(visible)


def is_latin(text):
    letters = unicodedata.normalize("NFKC", "".join(c for c in text if c.isalpha()))
    kinds = Counter(unicodedata.name(c, "?").split()[0] for c in letters)
    return not kinds or max(kinds, key=kinds.__getitem__) == "LATIN"


def reason_of(source, target):
    """A straightforward implementation of the rules in FILTERS, without duplicates."""
    sides = source, target
    if not all(map(str.strip, sides)):
        return "empty"
    lengths = sorted(len(side.strip()) for side in sides)
    broken = {
        "max_words": any(len(side.split()) > 6 for side in sides),
        "max_word_length": any(len(word) > 8 for side in sides for word in side.split()),
        "max_ratio": lengths[1] > 2.5 * lengths[0],
        "min_alphabetic": any(share_of_letters(side) < 0.6 for side in sides),
        "script": not all(map(is_latin, sides)),
        "copied": source.strip().casefold() == target.strip().casefold() and any(map(str.isalpha, source)),
        "same_numbers": {int(n) for n in re.findall(r"\d+", source)}
        != {int(n) for n in re.findall(r"\d+", target)},
    }
    return next((reason for reason, is_broken in broken.items() if is_broken), None)


def judge(corpora, unfiltered):
    """The pairs that are kept, and the number of others by reason."""
    kept, counts, seen = [], Counter(), set()
    for number, pairs in enumerate(corpora):
        for pair in pairs:
            reason = reason_of(*pair)
            if number in unfiltered and reason != "empty":
                reason = None
            elif reason is None and pair in seen:
                reason = "duplicates"
            if reason is None:
                kept.append(pair)
                seen.add(pair)
            else:
                counts[reason] += 1
    return kept, counts


def test_pairs_are_rejected_for_one_reason_whatever_the_blocks(tried, tmp_path_factory, monkeypatch):
    @tried(25, corpora=st.lists(PAIRS, min_size=1, max_size=3), block=st.integers(1, 30), off=st.booleans())
    def check(corpora, block, off):
        folder = tmp_path_factory.mktemp("any")
        monkeypatch.setattr(scan, "BLOCK", block)
        train = [write(folder / f"{i}.tsv", pairs) for i, pairs in enumerate(corpora)]
        train[-1] |= {"filters": "off"} if off else {}
        kept, counts = judge(corpora, {len(corpora) - 1} if off else ())
        rejections = CorpusScanner(RawFiles(config(folder, train, filters=FILTERS)), seed=1).result.rejections
        assert rejections.counts() == counts
        assert list(rejections.sizes) == list(map(len, corpora))
        codes = np.split(rejections.codes, np.cumsum(rejections.sizes)[:-1])
        left = [
            pair
            for side, pairs in zip(codes, corpora, strict=True)
            for code, pair in zip(side, pairs, strict=True)
            if not code
        ]
        assert left == kept


def test_any_shards_contain_the_pairs_that_are_kept(tried, tokenizer, tmp_path_factory, monkeypatch):
    @tried(4, **CORPORA)
    def check(sizes, block, shard, bucket):
        use_sizes(monkeypatch, block, shard, bucket)
        monkeypatch.setattr(scan, "BLOCK", block)
        folder = tmp_path_factory.mktemp("any")
        corpora = [[*TOY[:size], ("I am 1.", "J'ai 2 ans.")] for size in sizes]
        corpora[0] = [("Hello!", "Salut !"), *corpora[0]]
        train = [write(folder / f"{i}.tsv", pairs) for i, pairs in enumerate(corpora)]
        data = config(folder, train, filters=FILTERS)
        kept, counts = judge(corpora, ())
        encoded = [(tokenizer.encode_source([s])[0], tokenizer.encode_target([t])[0]) for s, t in kept]
        for _ in range(2):  # encoded, then reused
            prepared = prepare_data(data, tokenizer, folder / "data", seed=1)
            assert [(source[:-1], target[:-1]) for source, target in rows(prepared)] == encoded
        assert read_summary(folder / "data")["dropped"] == counts


def test_clean_writes_each_pair_to_one_file(tried, tmp_path_factory, monkeypatch):
    @tried(10, pairs=PAIRS, block=st.integers(1, 30))
    def check(pairs, block):
        monkeypatch.setattr(scan, "BLOCK", block)
        folder = tmp_path_factory.mktemp("any")
        kept, counts = judge([pairs], ())
        if not kept:
            return
        out, rejected = io.StringIO(), io.StringIO()
        clean(config(folder, write(folder / "all.tsv", pairs), filters=FILTERS), out, rejected, 1, True)
        lines = [line.split("\t") for line in rejected.getvalue().split("\n")[:-1]]
        assert Counter(reason for reason, *_ in lines) == counts
        assert out.getvalue() == "".join(f"{source}\t{target}\n" for source, target in kept)
        both = Counter(kept) + Counter((source, target) for _, source, target in lines)
        assert both == Counter(map(tuple, pairs))


def test_repeated_keys_are_found_in_any_parts(tried):
    keys = st.lists(st.integers(0, 9) | st.integers(2**64 - 9, 2**64 - 1) | st.integers(0, 2**64 - 1))

    @tried(50, keys=keys, part=st.integers(1, 9), chunk=st.integers(1, 9), data=st.data())
    def check(keys, part, chunk, data):
        codes = data.draw(st.lists(st.sampled_from([0, 0, 3]), min_size=len(keys), max_size=len(keys)))
        expected, seen = [], set()
        for row, (key, code) in enumerate(zip(keys, codes, strict=True)):
            expected += [row] if code == 0 and key in seen else []
            seen |= {key} if code == 0 else set()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(duplicates, "_PART", part)
            patch.setattr(duplicates, "_CHUNK", chunk)
            found = [*duplicates.find_repeated(np.array(keys, np.uint64), np.array(codes, np.uint8))]
        assert sorted(row for rows in found for row in rows.tolist()) == expected
