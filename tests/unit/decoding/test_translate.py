"""The translator as a library: what it returns, and that results do not depend on batches."""

import copy
import json
import logging
import math
import pickle
import shutil
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mtrain import Translator
from mtrain.checkpoint.model_folder import load_model
from mtrain.config.languages import Direction
from mtrain.config.load import override
from mtrain.decoding.alignment_layer import choose_alignment_layer
from mtrain.decoding.decode import Ensemble
from mtrain.decoding.scoring.score import score_pairs
from mtrain.errors import DataError, ModelError, UsageError
from mtrain.model.transformer import Transformer
from tests.support.training import PAIRS
from tests.support.translation import words_of

SOURCES, TARGETS = ([pair[side] for pair in PAIRS] for side in (0, 1))


# ---------------------------------------------------------------------------------------------------- batches


@pytest.mark.parametrize(
    ("precision", "beam_size"),
    [
        ("bf16", 4),
        ("fp16", 1),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("bf16", 1), ("fp16", 4))),
    ],
)
def test_low_precision_as_on_a_gpu_gives_the_same_translations(
    run_dir: Path, monkeypatch, precision, beam_size
) -> None:
    monkeypatch.setattr("mtrain.kernels.linear.MIN_WEIGHT_ELEMENTS", 0)
    monkeypatch.setattr("mtrain.kernels.linear.PackedLinear.stays_low", True)
    keys = [f"decoding.precision={precision}", f"decoding.beam_size={beam_size}", "decoding.workers=1"]
    low = Translator.load(run_dir, "cpu", keys)
    exact = low.with_settings(precision="fp32")
    found, expected = (each.translate(SOURCES, alignments=True) for each in (low, exact))
    assert [best.text for best in found] == TARGETS
    moved = [set(a.alignment) ^ set(b.alignment) for a, b in zip(found, expected, strict=True)]
    assert sum(map(len, moved)) <= 2  # one link: two positions may have nearly equal weights
    scores = [best.score for best in found], [best.score for best in expected]
    assert scores[0] == pytest.approx(scores[1], abs=0.02) and scores[0] != scores[1]
    covered = [each.with_settings(coverage_penalty=0.01).translate(SOURCES) for each in (low, exact)]
    assert [best.text for best in covered[0]] == [best.text for best in covered[1]]
    given, wanted = ([line.log_prob for line in score_pairs(each, PAIRS)] for each in (low, exact))
    assert given == pytest.approx(wanted, abs=0.1) and given != wanted


def test_low_precision_gives_the_same_translations(translator: Translator, monkeypatch) -> None:
    monkeypatch.setattr("mtrain.kernels.linear.MIN_WEIGHT_ELEMENTS", 0)
    for beam_size in (1, 4):
        rounded = translator.with_settings(precision="bf16", beam_size=beam_size)
        found = rounded.translate(SOURCES * 5)
        assert [t.text for t in found] == TARGETS * 5
        exact = translator.with_settings(beam_size=beam_size).translate(SOURCES)
        assert [t.log_prob for t in found[:8]] != [t.log_prob for t in exact]
        assert [t.log_prob for t in found[:8]] == pytest.approx([t.log_prob for t in exact], abs=0.2)


@pytest.mark.parametrize(
    ("settings", "precision"),
    [
        ({"beam_size": 1}, "fp32"),
        ({"beam_size": 5}, "bf16"),
        ({"samples": 3, "temperature": 2.0, "top_p": 0.9}, "fp32"),
        pytest.param({"beam_size": 2, "coverage_penalty": 0.1}, "fp32", marks=pytest.mark.slow),
        pytest.param({"samples": 1, "temperature": 2.0}, "fp32", marks=pytest.mark.slow),
        pytest.param({"beam_size": 5}, "fp32", marks=pytest.mark.slow),
        pytest.param({"beam_size": 1}, "bf16", marks=pytest.mark.slow),
        pytest.param({"beam_size": 2, "coverage_penalty": 0.1}, "bf16", marks=pytest.mark.slow),
        pytest.param({"samples": 1, "temperature": 2.0}, "bf16", marks=pytest.mark.slow),
        pytest.param({"samples": 3, "temperature": 2.0, "top_p": 0.9}, "bf16", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_translations_do_not_depend_on_the_batch(
    translator: Translator, monkeypatch, settings: dict, precision: str
) -> None:
    """To the last bit of the scores: rows of a batch share no rounding."""
    monkeypatch.setattr("mtrain.kernels.linear.MIN_WEIGHT_ELEMENTS", 0)
    short = {"max_length_ratio": 0.5, "max_length_offset": 6}  # most of the random lines would never end
    fixed = translator.with_settings(precision=precision, workers=1, **short, **settings)
    lines = [*words_of(7, seed=8), " ".join(words_of(5, seed=0))]
    lines += ["a"]  # a single token
    assert len(fixed.tokenizer.encode_source(["a"])[0]) == 1
    count = fixed.decoding.hypotheses
    alone = fixed.with_settings(batch_tokens=1).translate(lines, n_best=count)  # one line at a time
    for tokens in (100, 100_000)[count > 1 :]:
        assert fixed.with_settings(batch_tokens=tokens).translate(lines, n_best=count) == alone
    if "samples" not in settings:  # samples are numbered by line
        assert fixed.translate(lines[::-1], n_best=count) == alone[::-1]
    assert len({found.score for found in alone}) > 6


def test_settings_share_weights_and_workers(translator: Translator) -> None:
    other = translator.with_settings(beam_size=2)
    assert other.workers is translator.workers
    rounded = translator.with_settings(precision="bf16")
    assert rounded.workers is not translator.workers
    assert rounded.with_settings(beam_size=1).workers is rounded.workers


@pytest.mark.parametrize(
    "settings", [{"beam_size": 1}, {"beam_size": 3}, {"beam_size": 3, "min_length_offset": 2}, {"samples": 2}]
)
@pytest.mark.parametrize(("scored", "value"), [(True, math.nan), (False, math.nan), (True, math.inf)])
def test_outputs_that_are_not_finite_are_an_error(
    run_dir: Path, settings: dict, scored: bool, value: float
) -> None:
    broken = Translator.load(run_dir, "cpu")
    [model] = broken.models
    model.bias = torch.zeros(model.config.target_vocab_size)
    model.bias[7] = value
    with pytest.raises(ModelError, match="not finite"):
        broken.with_settings(**settings).translate(["It rains."], scored=scored)


def test_progress_counts_each_line_and_token_while_a_window_is_translated(translator: Translator) -> None:
    lines = [*SOURCES, "", "It rains. " * 40, *SOURCES, ""]  # one is translated in parts
    small = translator.with_settings(batch_tokens=64, beam_size=1)
    counted: list[tuple[int, int]] = []
    stream = small.stream(lines, progress=lambda *counts: counted.append(counts))
    found = [next(stream)]
    assert sum(lines for lines, _ in counted) == len(lines)  # all are one window
    found += stream
    assert [sum(counts) for counts in zip(*counted, strict=True)] == [
        len(lines),
        sum(translation.tokens for translation in found),
    ]
    assert len(counted) > len(lines)


@pytest.mark.parametrize(("workers", "most"), [(1, 4096), (2, 4096), (4, 8192)])
def test_each_worker_has_enough_lines_of_a_window(translator: Translator, workers: int, most: int) -> None:
    read = yielded = ahead = 0

    def lines() -> Iterator[str]:
        nonlocal read
        for _ in range(20_000):
            read += 1
            yield ""

    for _ in translator.with_settings(workers=workers).stream(lines()):
        ahead = max(ahead, read - yielded)
        yielded += 1
    assert (yielded, ahead) == (20_000, most)


@pytest.mark.parametrize("scored", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_constraints_that_exclude_every_translation_are_an_error(
    translator: Translator, scored: bool
) -> None:
    words = list(range(60, translator.tokenizer.target_vocab_size))  # the remaining ones are soon used up
    impossible = {"no_repeat_ngram": 1, "min_length_offset": 400, "max_length_offset": 400}
    impossible["forbidden_ids"] = words
    for beam_size in (1, 2):
        constrained = translator.with_settings(**impossible, beam_size=beam_size)
        with pytest.raises(UsageError, match="decoding constraints exclude every translation of line 3; rel"):
            constrained.translate(["", "", "It rains.", ""], scored=scored)


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


@pytest.mark.parametrize("beam_size", [1, 3])
def test_lines_as_long_as_learned_positions_allow_are_translated(run_dir: Path, beam_size: int) -> None:
    """The number of positions, 10, is not a multiple of what sources are padded to."""
    loaded = load_model(run_dir, (f"decoding.beam_size={beam_size}",))
    torch.manual_seed(0)
    positions = {"positions": "learned", "max_positions": 10}
    model = Transformer(loaded.config.model.model_copy(update=positions)).eval()
    ensemble = Ensemble([model], loaded.tokenizer, torch.device("cpu"))
    learned = Translator(ensemble, loaded.config.decoding, Direction("en", "de"), 10, processes=False)
    lines = ["a a a a a a a a a", "a", "a a a", "a " * 30]
    assert [len(ids) + 1 for ids in loaded.tokenizer.encode_source(lines)] == [10, 2, 4, 31]
    found = learned.translate(lines, alignments=True)
    assert [best.text for best in found] == [learned.translate([line])[0].text for line in lines]
    assert found[0].tokens <= 10
    one, other = score_pairs(learned, [(lines[0], lines[0]), (lines[3], lines[3])])
    assert len(one.tokens) == 10 and not other.tokens
    pairs = [(line, line) for line in lines]
    assert choose_alignment_layer(model, loaded.tokenizer, pairs, torch.device("cpu")) in (0, 1)


# ---------------------------------------------------------------------------------------------------- results


def test_n_best_are_the_best_of_the_beam(translator: Translator) -> None:
    wide = translator.with_settings(beam_size=6)
    [best, empty] = wide.translate(["It rains.", "  "], n_best=3)
    assert best.text == "Es regnet." and best.n_best[0].text == best.text and len(best.n_best) == 3
    assert [t.score for t in best.n_best] == sorted((t.score for t in best.n_best), reverse=True)
    assert (empty.text, empty.tokens, len(empty.n_best)) == ("", 0, 1)
    assert wide.translate(["It rains."])[0].n_best == ()
    with pytest.raises(UsageError, match="0 translations of each line were requested; ask for 1 or more"):
        translator.translate(["It rains."], n_best=0)
    with pytest.raises(
        UsageError, match="7 translations of each line were requested, but only 6 are decoded"
    ):
        wide.translate(["It rains."], n_best=7)


def test_translations_begin_with_the_given_prefixes(translator: Translator) -> None:
    given = ["Eine Katze", "", "Zwei"]
    found = translator.translate(SOURCES[:3], prefixes=given)
    assert found[0].text.startswith("Eine Katze") and found[1].text == TARGETS[1]
    other = translator.translate(SOURCES[0], prefixes="Kinder spielen")
    assert other[0].text.startswith("Kinder spielen") and other[0].log_prob < found[0].log_prob
    for wrong, message in ((["Eine"], "fewer prefixes"), (["Eine", "", "", ""], "more prefixes")):
        with pytest.raises(UsageError, match=message):
            translator.translate(SOURCES[:3], prefixes=wrong)
    surplus: list[Any] = [*given, None]
    with pytest.raises(UsageError, match="more prefixes"):
        translator.translate(SOURCES[:3], prefixes=surplus)
    missing: list[Any] = ["Eine", None, ""]
    with pytest.raises(TypeError, match="prefixes must be strings"):
        translator.translate(SOURCES[:3], prefixes=missing)


def test_settings_are_checked_and_leave_the_original_alone(translator: Translator) -> None:
    assert translator.with_settings(beam_size=2).decoding.beam_size == 2
    assert translator.decoding.beam_size == 5
    with pytest.raises(UsageError, match="did you mean 'beam_size'"):
        translator.with_settings(beamsize=2)
    with pytest.raises(UsageError, match="affect sampling only; set samples, too"):
        translator.with_settings(top_k=4)
    with pytest.raises(UsageError, match="mbr needs several hypotheses"):
        translator.with_settings(mbr="chrf", beam_size=1)
    with pytest.raises(UsageError, match="must not exceed"):
        translator.with_settings(min_length_ratio=3)
    with pytest.raises(UsageError, match="no token has the id 99999"):
        translator.with_settings(forbidden_ids=[99999])


def test_single_values_are_taken_for_lists(run_dir: Path, translator: Translator) -> None:
    device, model = torch.device("cpu", 0), str(run_dir / "model")
    both = Translator.load(run_dir, device, "decoding.beam_size=2", ensemble=model)
    assert both.decoding.beam_size == 2 and len(both.models) == 2
    assert both.translate("It rains.")[0].text == "Es regnet."


def test_json_has_null_for_what_was_not_computed(translator: Translator) -> None:
    greedy = translator.with_settings(beam_size=1)
    [found] = greedy.translate(["It rains."], scored=False)
    parsed = json.loads(found.as_json(), parse_constant=pytest.fail)  # NaN and Infinity are not JSON
    assert parsed == {
        "text": "Es regnet.",
        "score": None,
        "log_prob": None,
        "tokens": found.tokens,
        "finished": True,
    }
    [found] = greedy.translate(["It rains."], alignments=True)
    parsed = json.loads(found.as_json())
    assert parsed["log_prob"] == pytest.approx(found.log_prob)
    assert [tuple(link) for link in parsed["alignment"]] == list(found.alignment or ())
    [found] = translator.with_settings(beam_size=2).translate(["It rains."], n_best=2)
    assert [best["text"] for best in json.loads(found.as_json())["n_best"]] == [t.text for t in found.n_best]


@pytest.mark.parametrize("settings", [{"samples": 20, "temperature": 20.0}, {"beam_size": 20}], ids=str)
def test_generated_bytes_are_no_control_characters(translator: Translator, settings: dict) -> None:
    """Only byte pieces are allowed, so most translations would contain control characters."""
    target = translator.tokenizer.target
    allowed = target.unlearned() - {target.special.unk} | {target.special.eos}
    forbidden = [i for i in range(len(target)) if i not in allowed]
    short = {"max_length_ratio": 0.0, "max_length_offset": 9, "min_length_offset": 5}
    chosen = translator.with_settings(forbidden_ids=forbidden, **short, **settings)
    found = chosen.translate(SOURCES[:3], n_best=20)
    text = "".join(one.text for line in found for one in line.n_best)
    assert " " in text and not any(unicodedata.category(c) == "Cc" for c in text)


# --------------------------------------------------------------------------------------------- several lines


@pytest.mark.parametrize(
    "text",
    ["{}\n{}", "{}\r\n{}\n", "\n\n{}\n \r\n{}\n\n", "\r\n", "\n", "{}\u2028{}\n{}\x85\x0b\x0c\r{}"],
    ids=ascii,
)
def test_a_text_of_several_lines_keeps_its_line_breaks(translator: Translator, text: str) -> None:
    text, settings = text.format(*SOURCES), {"samples": 2, "temperature": 0.5} if " " in text else {}
    chosen = translator.with_settings(**settings)
    sources = text.replace("\r\n", "\n").split("\n")
    lines = chosen.translate(sources, n_best=2, alignments=True)
    [found, after] = chosen.translate([text, SOURCES[0]], n_best=2, alignments=True)
    assert after == chosen.translate([*sources, SOURCES[0]], n_best=2, alignments=True)[-1]
    for k, whole in enumerate(found.n_best):
        expected = [line.n_best[min(k, len(line.n_best) - 1)] for line in lines]
        assert whole.text.replace("\r\n", "\n").split("\n") == [one.text for one in expected]
        assert whole.text.count("\r\n") == text.count("\r\n")
        assert whole.tokens == sum(one.tokens for one in expected) and whole.finished
        assert whole.log_prob == pytest.approx(sum(one.log_prob for one in expected))
    assert found.text == found.n_best[0].text and found.alignment is not None
    words = len(text.split()), len(found.text.split())
    assert all(i < words[0] and j < words[1] for i, j in found.alignment)
    assert len(found.alignment) == sum(len(line.alignment or ()) for line in lines)


def test_the_alignment_of_several_lines_counts_all_words(translator: Translator) -> None:
    [first, second] = translator.translate(SOURCES[:2], alignments=True)
    [found] = translator.translate(["\n\n".join(SOURCES[:2])], alignments=True)
    shift = len(SOURCES[0].split()), len(TARGETS[0].split())
    moved = tuple((i + shift[0], j + shift[1]) for i, j in second.alignment or ())
    assert found.alignment == (first.alignment or ()) + moved


def test_the_prefix_of_a_text_of_several_lines_is_an_error(translator: Translator) -> None:
    [found] = translator.translate([f"\n{SOURCES[0]}\n"], prefixes=[TARGETS[0]])  # only one has text
    assert found.text == f"\n{TARGETS[0]}\n"
    with pytest.raises(DataError, match="line 2 of the input has a prefix but is translated in 2"):
        translator.translate([SOURCES[0], "\n".join(SOURCES[:2])], prefixes=["", "Eine"])


def test_unpaired_surrogates_are_replaced(translator: Translator) -> None:
    """`json.loads` returns unpaired surrogates for broken JSON. A pair of surrogates is a character."""
    broken, right = ["It \ud83d rains.", "\udcff", "\ud83d\ude00 It"], ["It \ufffd rains.", "\ufffd", "😀 It"]
    for settings in ({}, {"split": "sentences"}):
        chosen = translator.with_settings(beam_size=1, **settings)
        assert chosen.translate(broken, prefixes=broken) == chosen.translate(right, prefixes=right)
    pairs = zip(broken, broken, strict=True), zip(right, right, strict=True)
    assert list(score_pairs(translator, pairs[0])) == list(score_pairs(translator, pairs[1]))
    with pytest.raises(UsageError, match="translates into de"):
        translator.between(None, "\ud83d")


# ------------------------------------------------------------------------------------------------- long lines


def test_a_long_line_is_translated_in_parts_and_joined(translator: Translator, caplog) -> None:
    text = " ".join(SOURCES * 3)
    with caplog.at_level(logging.WARNING):
        [found, short] = translator.translate([text, "It rains."], alignments=True)
    assert "1 line(s) exceed the limit of 64 tokens and were translated in parts" in caplog.text
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
        translator.translate([b"It rains."])


@pytest.mark.parametrize("settings", [{"beam_size": 2}, {"samples": 2, "temperature": 0.5}], ids=str)
def test_a_paragraph_is_translated_sentence_by_sentence(translator: Translator, caplog, settings) -> None:
    paragraphs = [" ".join(SOURCES[:3]), "", SOURCES[3], " ".join(SOURCES[4:])]
    split = translator.with_settings(split="sentences", **settings)
    with caplog.at_level(logging.WARNING):
        found = split.translate(paragraphs, n_best=2, alignments=True)
    assert not caplog.text  # no line exceeds the maximum
    if "samples" not in settings:
        single = split.translate(SOURCES, n_best=2, alignments=True)
        groups = [single[:3], [], single[3:4], single[4:]]
        for line, parts in zip(found, groups, strict=True):
            assert line.text == " ".join(part.text for part in parts)
            assert line.tokens == sum(part.tokens for part in parts)
            assert line.finished and line.alignment is not None
            assert len(line.alignment) == sum(len(part.alignment or ()) for part in parts)
            for rank, best in enumerate(line.n_best):
                assert best.text == " ".join(part.n_best[rank].text for part in parts)
        whole = translator.with_settings(**settings).translate(paragraphs)
        assert whole[2].text == found[2].text and whole[0].text != found[0].text
    assert all(line.n_best[0].text == line.text for line in found)
    assert len(json.loads(found[0].as_json())["n_best"]) == 2
    # The result does not depend on the other lines, nor on where an interrupted translation is resumed.
    resumed = split.stream(paragraphs[2:], n_best=2, alignments=True, first=2)
    assert list(resumed) == found[2:]


@pytest.mark.parametrize(("language", "separator"), [("th", " "), ("ko", " "), ("ja", ""), ("zho_Hans", "")])
def test_sentences_are_joined_as_the_target_language_does(
    run_dir: Path, language: str, separator: str
) -> None:
    loaded = load_model(run_dir, ("decoding.split=sentences",))
    ensemble = Ensemble([loaded.model], loaded.tokenizer, torch.device("cpu"))
    into = Translator(ensemble, loaded.config.decoding, Direction("en", language), 64, processes=False)
    assert into.translate(["It rains. The sun shines."])[0].text == f"Es regnet.{separator}Die Sonne scheint."


# -------------------------------------------------------------------------------------------------- ensembles


def test_models_of_an_ensemble_must_have_the_same_vocabulary(
    run_dir: Path, tmp_path: Path, translator: Translator
) -> None:
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
        (folder / "tokenizer/joint.model").write_bytes(model + b"\x82\x7d\x00")  # an unknown field

    write_folder(other, fill)
    with pytest.raises(ModelError, match="its vocabularies are not the same as in"):
        Translator.load(run_dir, "cpu", ensemble=[other])


def test_an_ensemble_computes_logits_in_full_precision(
    run_dir: Path, translator: Translator, monkeypatch
) -> None:
    monkeypatch.setattr("mtrain.kernels.linear.MIN_WEIGHT_ELEMENTS", 0)
    single = translator.with_settings(precision="bf16")
    twice = Translator.load(run_dir, "cpu", ["decoding.precision=bf16"], ensemble=[run_dir / "model"])
    assert [model.projects_in_low_precision() for model in (*single.models, *twice.models)] == [
        True,
        False,
        False,
    ]
    assert [found.text for found in twice.translate(SOURCES)] == TARGETS


def test_models_of_an_ensemble_must_translate_in_the_same_direction(run_dir: Path, tmp_path: Path) -> None:
    from mtrain.storage.manifest import write_manifest

    other = shutil.copytree(run_dir / "model", tmp_path / "other")
    text = (other / "config.yaml").read_text()
    for language, message in (
        ("fr", r"its languages \(fr-de, not en-de\) are not the same as in .*; the models of an ensemble"),
        ("en-GB", ""),
        ("und", ""),
    ):
        (other / "config.yaml").write_text(text.replace("source_lang: en", f"source_lang: {language}"))
        (other / "manifest.json").unlink()
        write_manifest(other)
        if message:
            with pytest.raises(ModelError, match=message):
                Translator.load(run_dir, "cpu", ensemble=[other])
        else:
            Translator.load(run_dir, "cpu", ensemble=[other])


def test_overrides_reach_the_search(run_dir: Path) -> None:
    raw = override({"decoding": {}}, "decoding.no_repeat_ngram=1")
    assert raw["decoding"]["no_repeat_ngram"] == 1
    loaded = Translator.load(run_dir, "cpu", ["decoding.no_repeat_ngram=1", "decoding.max_length_ratio=3"])
    ids = loaded.tokenizer.encode_target([t.text for t in loaded.translate(words_of(10))])
    assert loaded.decoding.no_repeat_ngram == 1 and all(len(row) <= 3 * 40 for row in ids)


def test_a_single_string_is_translated_as_one_line(translator: Translator) -> None:
    ways = (translator.translate(SOURCES[0]), translator.stream(SOURCES[0]))
    assert [[best.text for best in way] for way in ways] == [[TARGETS[0]]] * 2


# ---------------------------------------------------------------------------------------------------- copies


def test_a_pickle_names_the_folders_and_the_settings(run_dir: Path, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.chdir(run_dir.parent)
    two = Translator.load(run_dir.name, "cpu", ensemble=[run_dir / "model"], workers=1)
    sent = two.with_settings(beam_size=2, length_penalty=0.3).between("en", "de")
    pickled = pickle.dumps(sent)
    assert len(pickled) < 2000
    monkeypatch.chdir(tmp_path)
    for received in (pickle.loads(pickled), copy.deepcopy(sent)):
        assert (received.decoding, received.direction) == (sent.decoding, sent.direction)
        assert received.fingerprint == sent.fingerprint and received.models[0] is not sent.models[0]
        assert received.translate(SOURCES[:2]) == sent.translate(SOURCES[:2])
        assert pickle.dumps(received) == pickled


def test_what_cannot_be_pickled_is_an_error(run_dir: Path) -> None:
    loaded = load_model(run_dir)
    ensemble = Ensemble([loaded.model], loaded.tokenizer, torch.device("cpu"))
    made = Translator(ensemble, loaded.config.decoding, Direction("en", "de"), 64, processes=False)
    with pytest.raises(TypeError, match=r"made by Translator\.load can be pickled"):
        pickle.dumps(made)
    shared = copy.copy(made)
    made.close()
    assert shared.translate(SOURCES[:1])[0].text == TARGETS[0]
    with pytest.raises(ValueError, match="closed"):
        pickle.dumps(made)
