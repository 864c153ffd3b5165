"""The translator as a library: what it returns, and that how lines are batched changes nothing."""

import logging
import math
import os
import random
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path

import pytest
import sacrebleu
import torch

from mtrain import Translator
from mtrain.config.load import override
from mtrain.decoding.alignment import align
from mtrain.decoding.mbr import rank, sentence_metric
from mtrain.decoding.score import score_pairs
from mtrain.decoding.split import split_line, windows
from mtrain.decoding.translation import Translation, join
from mtrain.decoding.workers import Helpers
from mtrain.errors import ModelError, UsageError
from mtrain.model.transformer import Transformer
from tests.support.training import PAIRS

SOURCES, TARGETS = ([pair[side] for pair in PAIRS] for side in (0, 1))


def words_of(count: int, seed: int = 0) -> list[str]:
    """Lines that training never showed, of 1 to 9 known words."""
    words, draw = " ".join(SOURCES).split(), random.Random(seed)
    return [" ".join(draw.choices(words, k=draw.randint(1, 9))) for _ in range(count)]


# ------------------------------------------------------------------------------------------------- batches


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("beam_size", [1, 4])
def test_in_few_bits_as_on_a_gpu_it_says_the_same(run_dir: Path, monkeypatch, precision, beam_size) -> None:
    plain = Transformer.for_decoding
    monkeypatch.setattr(Transformer, "for_decoding", lambda model, dtype: plain(model, dtype, stays_low=True))
    keys = [f"decoding.precision={precision}", f"decoding.beam_size={beam_size}", "decoding.workers=1"]
    few = Translator.load(run_dir, "cpu", keys)
    exact = few.with_settings(precision="fp32")
    found, expected = (each.translate(SOURCES, alignments=True) for each in (few, exact))
    assert [best.text for best in found] == TARGETS
    moved = [set(a.alignment) ^ set(b.alignment) for a, b in zip(found, expected, strict=True)]
    assert sum(map(len, moved)) <= 2  # one link: two positions may be all but equally likely
    scores = [best.score for best in found], [best.score for best in expected]
    assert scores[0] == pytest.approx(scores[1], abs=0.02) and scores[0] != scores[1]
    covered = [each.with_settings(coverage_penalty=0.05).translate(SOURCES) for each in (few, exact)]
    assert [best.text for best in covered[0]] == [best.text for best in covered[1]]
    given, wanted = ([line.log_prob for line in score_pairs(each, PAIRS)] for each in (few, exact))
    assert given == pytest.approx(wanted, abs=0.1) and given != wanted


def test_threads_may_share_a_translator(translator: Translator) -> None:
    lines = words_of(40, seed=2)
    expected = translator.translate(lines)
    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(lambda _: translator.translate(lines), range(8)):
            assert found == expected


def test_helper_processes_change_nothing_and_are_not_missed(
    translator: Translator, monkeypatch, caplog
) -> None:
    monkeypatch.setattr("mtrain.decoding.workers.WORTH_HELP", 0.0)
    lines, apart = words_of(120), {"workers": 2, "batch_tokens": 1024}
    expected = translator.with_settings(workers=1, batch_tokens=1024).translate(lines)
    helped = translator.with_settings(**apart)
    while not helped.decoder.helpers.ready:  # they start when two batches are to be decoded at once
        helped.translate(lines)
    helped.decoder.helpers.ready.result(timeout=60)
    sent, send = [], Helpers._send
    monkeypatch.setattr(Helpers, "_send", lambda *task: sent.append(task) or send(*task))
    assert helped.translate(lines) == expected and sent
    best = helped.with_settings(beam_size=2)  # whose helpers are the same
    assert best.decoder.helpers is helped.decoder.helpers
    assert best.translate(lines, n_best=2) == translator.with_settings(
        beam_size=2, workers=1, batch_tokens=1024
    ).translate(lines, n_best=2)
    [helper] = helped.decoder.helpers.executor._processes  # the system kills it, to get memory
    os.kill(helper, signal.SIGKILL)
    assert helped.translate(lines) == expected
    assert "a helper process failed" in caplog.text and helped.decoder.helpers.count == 0


def test_helpers_that_cannot_start_are_not_missed(translator: Translator, monkeypatch, caplog) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("mtrain.decoding.workers.WORTH_HELP", 0.0)
    monkeypatch.setattr("loky.ProcessPoolExecutor", refuse)
    lines = words_of(120)
    alone = translator.with_settings(workers=2, batch_tokens=1024)
    assert alone.translate(lines) == translator.with_settings(workers=1, batch_tokens=1024).translate(lines)
    assert "a helper process failed" in caplog.text and alone.decoder.helpers.count == 0


def test_rounded_weights_translate_what_was_learnt_alike(translator: Translator, monkeypatch) -> None:
    monkeypatch.setattr("mtrain.kernels.linear.MIN_MULTIPLICATIONS", 0)
    for beam_size in (1, 4):
        rounded = translator.with_settings(precision="bf16", workers=2, beam_size=beam_size)
        found = rounded.translate(SOURCES * 20)
        assert [t.text for t in found] == TARGETS * 20
        exact = translator.with_settings(beam_size=beam_size).translate(SOURCES)
        assert [t.log_prob for t in found[:8]] != [t.log_prob for t in exact]
        assert [t.log_prob for t in found[:8]] == pytest.approx([t.log_prob for t in exact], abs=0.2)


def test_settings_share_weights_and_threads(translator: Translator) -> None:
    other = translator.with_settings(beam_size=2)
    assert other.decoder.models is translator.decoder.models and other.decoder.pool is translator.decoder.pool
    rounded = translator.with_settings(precision="bf16")
    assert rounded.decoder.models is not translator.decoder.models
    assert rounded.with_settings(beam_size=1).decoder.models is rounded.decoder.models


@pytest.mark.parametrize(
    "settings", [{"beam_size": 1}, {"beam_size": 3}, {"beam_size": 3, "min_length_offset": 2}, {"samples": 2}]
)
@pytest.mark.parametrize("scored", [True, False])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_outputs_that_are_not_finite_are_an_error(
    run_dir: Path, settings: dict, scored: bool, value: float
) -> None:
    broken = Translator.load(run_dir, "cpu")
    [model] = broken.decoder.models
    model.output_bias = torch.nn.Parameter(torch.zeros(model.config.target_vocab_size))
    model.output_bias.data[7] = value
    with pytest.raises(ModelError, match="not finite"):
        broken.with_settings(**settings).translate(["It rains."], scored=scored)


@pytest.mark.parametrize("scored", [True, False])
def test_a_line_without_any_possible_translation_is_told(translator: Translator, scored: bool) -> None:
    impossible = {"no_repeat_ngram": 1, "min_length_offset": 400, "max_length_offset": 400}
    for beam_size in (1, 2):
        with pytest.raises(UsageError, match="what decoding bars leaves a line no translation"):
            translator.with_settings(**impossible, beam_size=beam_size).translate(
                ["It rains."], scored=scored
            )


@pytest.mark.parametrize(
    "settings",
    [{}, {"beam_size": 3}, {"min_length_offset": 6}, {"no_repeat_ngram": 2}, {"force_eos": True}],
    ids=str,
)
def test_without_scores_the_translations_are_the_same(translator: Translator, settings: dict) -> None:
    short = translator.with_settings(
        **{"beam_size": 1, "max_length_ratio": 0.0, "max_length_offset": 8, **settings}
    )
    texts = [*SOURCES, *words_of(20), ""]
    scored, plain = short.translate(texts), short.translate(texts, scored=False)
    assert [(t.text, t.tokens, t.finished) for t in plain] == [(t.text, t.tokens, t.finished) for t in scored]
    assert all(math.isnan(t.score) and math.isnan(t.log_prob) for t in plain[:-1])
    assert not any(math.isnan(t.score) for t in scored)


def test_many_short_lines_make_small_batches(translator: Translator, monkeypatch) -> None:
    """Each row has logits over the whole vocabulary, however short its source is."""
    sizes = []
    real = translator.decoder.batch
    wide = translator.with_settings(batch_tokens=1600)

    def count(parts, *arguments):
        sizes.append(len(parts))
        return real(parts, *arguments)

    monkeypatch.setattr(wide.decoder, "batch", count)
    monkeypatch.setattr(wide.decoder.helpers, "count", 0)  # other processes would not count
    wide.translate(["It"] * 300)
    assert max(sizes) <= 1600 // 5 // 16 and sum(sizes) == 300


def test_windows_are_bounded_by_lines_and_by_characters() -> None:
    assert [len(texts) for texts, _ in windows(["a"] * 10, None, 4)] == [4, 4, 2]
    stream = (text for text in ["a"] * 9000)
    assert [len(texts) for texts, _ in windows(stream, None, 4096)] == [256, 512, 1024, 2048, 4096, 1064]
    assert [len(texts) for texts, _ in windows(["a" * 400_000] * 7, None, 4096)] == [3, 3, 1]
    assert list(windows([], None, 4)) == []


# ------------------------------------------------------------------------------------------------- results


def test_n_best_are_the_best_so_many_of_the_beam(translator: Translator) -> None:
    wide = translator.with_settings(beam_size=6)
    [best, empty] = wide.translate(["It rains.", "  "], n_best=3)
    assert best.text == "Es regnet." and best.n_best[0].text == best.text and len(best.n_best) == 3
    assert [t.score for t in best.n_best] == sorted((t.score for t in best.n_best), reverse=True)
    assert (empty.text, empty.tokens, len(empty.n_best)) == ("", 0, 1)
    assert wide.translate(["It rains."])[0].n_best == ()
    with pytest.raises(UsageError, match="0 translations of each line: ask for 1 or more"):
        translator.translate(["It rains."], n_best=0)
    with pytest.raises(UsageError, match="7 translations of each line: only 6 are decoded"):
        wide.translate(["It rains."], n_best=7)


def test_prefixes_begin_the_translations(translator: Translator) -> None:
    given = ["Eine Katze", "", "Zwei"]
    found = translator.translate(SOURCES[:3], prefixes=given)
    assert found[0].text.startswith("Eine Katze") and found[1].text == TARGETS[1]
    other = translator.translate(SOURCES[:1], prefixes=["Kinder spielen"])
    assert other[0].text.startswith("Kinder spielen") and other[0].log_prob < found[0].log_prob
    for wrong, message in ((["Eine"], "fewer prefixes"), (["Eine", "", "", ""], "more prefixes")):
        with pytest.raises(UsageError, match=message):
            translator.translate(SOURCES[:3], prefixes=wrong)


def test_settings_are_checked_and_leave_the_original_alone(translator: Translator) -> None:
    assert translator.with_settings(beam_size=2).decoding.beam_size == 2
    assert translator.decoding.beam_size == 5
    with pytest.raises(UsageError, match="did you mean 'beam_size'"):
        translator.with_settings(beamsize=2)
    with pytest.raises(UsageError, match="set samples, too"):
        translator.with_settings(top_k=4)
    with pytest.raises(UsageError, match="mbr needs several hypotheses"):
        translator.with_settings(mbr="chrf", beam_size=1)
    with pytest.raises(UsageError, match="must not exceed"):
        translator.with_settings(min_length_ratio=3)


# ------------------------------------------------------------------------------------------------ long lines


@pytest.mark.parametrize("longest", [9, 20, 63])
def test_parts_are_sentences_and_lose_nothing(translator: Translator, longest: int) -> None:
    tokenizer = translator.tokenizer
    text = [*SOURCES, "katze" * 30 + '!"', "Mr. Smith of the U. S. sleeps.", "Is it no... yes?", "It rains"]
    parts = split_line("  ".join(text), tokenizer, longest)
    assert all(0 < len(part) <= longest for part in parts)
    sentences = tokenizer.encode_source(text)
    assert list(chain(*parts)) == list(chain(*sentences))
    whole = [ids for ids in sentences if len(ids) <= longest]
    assert [part for part in parts if part in whole] == whole
    cut = [part for part in parts if part not in whole]
    assert all(tokenizer.word_starts(part)[0] for part in cut)
    if longest == 63:
        assert len(cut) == 3 and max(map(len, cut)) == longest  # of one word of some 90 pieces
    [one, two] = split_line("猫が寝る。雨が降る！", tokenizer, longest=63)
    assert [one, two] == tokenizer.encode_source(["猫が寝る。", "雨が降る！"])


def test_a_long_line_is_translated_in_parts_and_joined(translator: Translator, caplog) -> None:
    text = " ".join(SOURCES * 3)
    with caplog.at_level(logging.WARNING):
        [found, short] = translator.translate([text, "It rains."], alignments=True)
    assert "1 line(s), longer than the model's 64 tokens, were translated in parts" in caplog.text
    assert found.text.count(".") >= 12 and "\n" not in found.text and short.text == "Es regnet."
    assert found.alignment is not None
    source, target = len(text.split()), len(found.text.split())
    assert [j for _, j in found.alignment] == list(range(target))
    assert max(i for i, _ in found.alignment) > source * 2 // 3
    assert found.tokens > 60 and found.log_prob < 0
    assert found.score == pytest.approx(found.log_prob / found.tokens)
    total = translator.with_settings(length_penalty=0.0).translate([text])[0]
    assert total.score == pytest.approx(total.log_prob)
    with pytest.raises(TypeError, match="strings"):
        translator.translate([b"It rains."])  # type: ignore[list-item]


# ---------------------------------------------------------------------------------------------- alignments


def test_each_target_word_goes_to_the_word_it_looks_at_most() -> None:
    attention = torch.tensor(
        [[0.3, 0.3, 0.4, 0.0], [0.1, 0.1, 0.8, 0.0], [0.5, 0.1, 0.3, 0.1], [0.0, 0.0, 0.0, 1.0]]
    ).numpy()
    # Source words: pieces 0 and 1, piece 2; the fourth is EOS. Target words: piece 0, pieces 1 and 2; EOS.
    assert align(attention, [True, False, True], [True, True, False]) == ((0, 0), (1, 1))
    assert align(attention[:, [2, 0, 1, 3]], [True, True, False], [True, False, True]) == ((0, 0), (1, 1))
    assert align(attention, [], [True]) == align(attention, [True], []) == ()


def test_alignments_name_words_of_both_sides(translator: Translator) -> None:
    for source, found in zip(SOURCES, translator.translate(SOURCES, alignments=True), strict=True):
        assert found.alignment is not None
        assert [j for _, j in found.alignment] == list(range(len(found.text.split())))
        assert all(0 <= i < len(source.split()) for i, _ in found.alignment)
    assert translator.translate(["It rains."])[0].alignment is None
    found = translator.translate(["It rains."], n_best=3, alignments=True)[0]
    assert all(len(t.alignment or ()) == len(t.text.split()) for t in found.n_best)


def test_words_are_what_spaces_separate(translator: Translator) -> None:
    tokenizer = translator.tokenizer
    space, letter = (tokenizer.target.pieces.index(piece) for piece in ("▁", "a"))
    word = next(i for i, piece in enumerate(tokenizer.target.pieces) if len(piece) > 1 and piece[0] == "▁")
    for ids in (
        [word, word],
        [word, space, letter],
        [word, space, word],
        [space, word],
        [word, space, space],
    ):
        starts = tokenizer.word_starts(ids, target=True)
        text = "".join(tokenizer.target.pieces[i] for i in ids).replace("▁", " ")
        assert starts[0] and sum(starts) == len(text.split()), ids
    assert tokenizer.word_starts([word, space, letter], target=True) == [True, True, False]


def test_parts_joined_without_a_space_share_a_word() -> None:
    parts = [
        Translation("一二 三", -1, -1, 4, True, ((0, 0), (1, 1))),
        Translation("四", -1, -1, 2, True, ((0, 0),)),
    ]
    joined = join(parts, [2, 1], tag=0, space="", length_penalty=1.0)
    assert joined.text.split() == ["一二", "三四"] and joined.alignment == ((0, 0), (1, 1), (2, 1))
    assert join(parts, [2, 1], tag=0, space=" ", length_penalty=1.0).alignment == ((0, 0), (1, 1), (2, 2))


# ----------------------------------------------------------------------------------------------- ensembles


def test_an_ensemble_needs_one_vocabulary(run_dir: Path, tmp_path: Path, translator: Translator) -> None:
    twice = Translator.load(run_dir, "cpu", ensemble=[run_dir / "model"])
    expected = translator.translate(SOURCES)
    for ours, same in zip(twice.translate(SOURCES), expected, strict=True):
        assert ours.text == same.text and ours.log_prob == pytest.approx(same.log_prob, abs=1e-4)
    other = shutil.copytree(run_dir / "model", tmp_path / "other")
    from mtrain.storage.atomic import write_folder

    def fill(folder: Path) -> None:
        shutil.copytree(run_dir / "model", folder, dirs_exist_ok=True)
        (folder / "manifest.json").unlink()
        model = (folder / "tokenizer/joint.model").read_bytes()
        (folder / "tokenizer/joint.model").write_bytes(model + b"\x82\x7d\x00")  # a field nobody knows

    write_folder(other, fill)
    with pytest.raises(ModelError, match="its vocabulary is not that of"):
        Translator.load(run_dir, "cpu", ensemble=[other])


def test_an_ensemble_needs_one_direction(run_dir: Path, tmp_path: Path) -> None:
    from mtrain.storage.manifest import write_manifest

    other = shutil.copytree(run_dir / "model", tmp_path / "other")
    text = (other / "config.yaml").read_text()
    for language, message in (("fr", "translates fr-de, and .* en-de"), ("en-GB", ""), ("und", "")):
        (other / "config.yaml").write_text(text.replace("source_lang: en", f"source_lang: {language}"))
        (other / "manifest.json").unlink()
        write_manifest(other)
        if message:
            with pytest.raises(ModelError, match=message):
                Translator.load(run_dir, "cpu", ensemble=[other])
        else:
            Translator.load(run_dir, "cpu", ensemble=[other])


# ------------------------------------------------------------------------------------- minimum Bayes risk


def test_the_text_most_like_the_others_is_chosen() -> None:
    texts = ["Die Katze schläft.", "Ein Hund bellt laut.", "Eine Katze schläft.", "Die Katze schläft nicht."]
    for name in ("chrf", "bleu"):
        metric = sentence_metric(name, "de")
        means = [
            sum(getattr(sacrebleu, f"sentence_{name}")(text, [other]).score for other in texts)
            for text in texts
        ]
        assert rank(texts, metric) == sorted(range(4), key=lambda i: -means[i])
        assert rank(texts, metric)[-1] == 1
    votes = [texts[1]] * 5 + texts
    assert votes[rank(votes, sentence_metric("chrf", "de"))[0]] == texts[1]
    assert rank(["a", "a"], None) == [0, 1]


@pytest.mark.parametrize("utility", ["chrf", "bleu"])
def test_mbr_chooses_among_what_was_found(translator: Translator, utility: str) -> None:
    lines = words_of(12, seed=5)
    plain = translator.with_settings(samples=8, temperature=2.0)
    drawn = plain.translate(lines, n_best=8)
    chosen = plain.with_settings(mbr=utility).translate(lines, n_best=8)
    metric = sentence_metric(utility, "de")
    for before, after in zip(drawn, chosen, strict=True):
        texts = [t.text for t in before.n_best]
        assert after.text == texts[rank(texts, metric)[0]]
        assert sorted(t.text for t in after.n_best) == sorted(texts)
    assert [t.text for t in drawn] != [t.text for t in chosen]


def test_overrides_reach_the_search(run_dir: Path) -> None:
    raw = override({"decoding": {}}, "decoding.no_repeat_ngram=1")
    assert raw["decoding"]["no_repeat_ngram"] == 1
    loaded = Translator.load(run_dir, "cpu", ["decoding.no_repeat_ngram=1", "decoding.max_length_ratio=3"])
    ids = loaded.tokenizer.encode_target([t.text for t in loaded.translate(words_of(10))])
    assert loaded.decoding.no_repeat_ngram == 1 and all(len(row) <= 3 * 40 for row in ids)


def test_a_text_is_one_line_not_its_letters(translator: Translator) -> None:
    ways = (translator.translate(SOURCES[0]), translator.stream(SOURCES[0]))
    assert [[best.text for best in way] for way in ways] == [[TARGETS[0]]] * 2
