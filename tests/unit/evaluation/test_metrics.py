"""Scores and signatures are the same as from sacreBLEU."""

import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import sacrebleu

from mtrain.config.languages import bleu_tokenizer
from mtrain.errors import DataError, UsageError
from mtrain.evaluation.metrics import (
    counts_sentences,
    explain_tokenizer,
    make_metrics,
    score,
    score_sentences,
)

HYPOTHESES = ["Der Hund rennt.", "Eine Katze", "Zwei Frauen reden heute ."]
REFERENCES = ["Der Hund rennt im Park.", "Eine Katze schläft.", "zwei Frauen reden ."]
OTHERS = ["Ein Hund rennt im Park.", "Die Katze schläft.", "Zwei Damen reden heute ."]


def test_scores_and_signatures_equal_those_of_sacrebleu():
    metrics = make_metrics(["bleu", "chrf", "ter"], "de")
    results = {result.metric: result for result in score(HYPOTHESES, [REFERENCES, OTHERS], metrics)}
    theirs: dict[str, Callable] = {
        "bleu": sacrebleu.corpus_bleu,
        "chrf": sacrebleu.corpus_chrf,
        "ter": sacrebleu.corpus_ter,
    }
    for name, corpus_score in theirs.items():
        assert results[name].score == corpus_score(HYPOTHESES, [REFERENCES, OTHERS]).score
    assert "nrefs:2|case:mixed|eff:no|tok:13a" in results["bleu"].signature
    assert results["bleu"].signature in results["bleu"].detail


LANGUAGES = {
    "de": "13a",
    "zh": "zh",
    "zh-TW": "zh",
    "ZH_cn": "zh",
    "zho_Hans": "zh",
    "cmn": "zh",
    "yue": "zh",
    "deu": "13a",
    "th": "char",
    "km_KH": "char",
    "jpn_Jpan": "ja-mecab",
    "ja": "ja-mecab",
    "ko": "ko-mecab",
    "zhx": "13a",
}


@pytest.mark.parametrize(("language", "tokenizer"), LANGUAGES.items())
def test_the_target_language_selects_the_tokenizer(language, tokenizer):
    assert bleu_tokenizer(language) == tokenizer


@pytest.mark.parametrize(
    ("given", "language", "reference", "explanation"),
    [
        (None, "de", "Ein Hund.", "13a (target language de)"),
        (None, "zh", "一只狗。", "zh (target language zh)"),
        (None, None, "Ein Hund.", "13a (the target language is not known)"),
        ("intl", "zh", "一只狗。", "intl (--bleu-tokenize)"),
        (None, "th", "สุนัข", "char (target language th; words are not separated by spaces, so rely on chrF)"),
        (
            None,
            "hak",
            "狗仔",
            "13a (target language hak; words are not separated by spaces, so rely on chrF)",
        ),
        (
            *(None, None, "一只狗。"),
            "13a (the target language is not known; words are not separated by spaces, so rely on chrF)",
        ),
    ],
)
def test_the_choice_of_the_tokenizer_is_explained(given, language, reference, explanation):
    assert explain_tokenizer(given, language, [reference]) == explanation


def test_without_a_language_the_tokenizer_is_the_default_of_sacrebleu():
    [result] = score(HYPOTHESES, [REFERENCES], make_metrics(["bleu"]))
    assert result.score == sacrebleu.corpus_bleu(HYPOTHESES, [REFERENCES]).score
    assert "tok:13a" in result.signature


def test_chinese_is_split_into_characters():
    zh = make_metrics(["bleu"], "zh")
    assert score(["我喜欢吃橙子。"], [["我喜欢吃橙子。"]], zh)[0].score == pytest.approx(100)
    assert "tok:zh" in score(["我喜欢橙子。"], [["我喜欢吃橙子。"]], zh)[0].signature


@pytest.mark.parametrize(("language", "words"), [("zh", 7), ("ja", 7), ("de", 1), (None, 1)])
def test_ter_counts_characters_in_chinese_and_japanese(language, words):
    metrics = make_metrics(["ter"], language)
    [result] = score(["我喜欢吃苹子。"], [["我喜欢吃橙子。"]], metrics)
    assert result.score == pytest.approx(100 / words)
    assert ("norm:yes" in result.signature) == ("asian:yes" in result.signature) == (words > 1)
    theirs = sacrebleu.TER(normalized=words > 1, asian_support=words > 1)
    assert result.score == theirs.corpus_score(["我喜欢吃苹子。"], [["我喜欢吃橙子。"]]).score


@pytest.mark.parametrize(
    ("language", "reference", "expected"),
    [
        ("th", "สุนัข", True),
        ("zh", "一只狗。", False),
        ("de", "Ein Hund.", False),
        ("ko", "개", False),
        (None, "一只狗。", True),
    ],
)
def test_ter_counts_sentences_in_other_languages_without_spaces(language, reference, expected):
    assert counts_sentences(language, [reference]) == expected


def test_lowercasing_and_the_tokenizer_are_in_the_signature():
    hypotheses, references = ["der hund rennt im park."], [["Der Hund rennt im Park."]]
    [cased] = score(hypotheses, references, make_metrics(["bleu"], "de"))
    [lowercased] = score(
        hypotheses, references, make_metrics(["bleu"], "de", lowercase=True, tokenize="char")
    )
    assert cased.score < lowercased.score == pytest.approx(100)
    assert "case:lc" in lowercased.signature and "tok:char" in lowercased.signature


def test_unknown_metrics_and_tokenizers_are_answered_with_the_choices():
    with pytest.raises(UsageError, match=r"--metrics bleu,rouge: choose from bleu, chrf, chrf\+\+, ter"):
        make_metrics(["bleu", "rouge"], "de")
    with pytest.raises(UsageError, match=r"--bleu-tokenize moses: choose from .*13a"):
        make_metrics(["bleu"], "de", tokenize="moses")


def test_a_tokenizer_that_is_not_installed_is_named():
    if subprocess.run([sys.executable, "-c", "import MeCab"], capture_output=True).returncode == 0:
        pytest.skip("MeCab is installed here")
    with pytest.raises(UsageError, match="the BLEU tokenizer ja-mecab is not installed"):
        make_metrics(["bleu"], "ja")


def test_different_numbers_of_lines_are_errors():
    metrics = make_metrics(["bleu"], "de")
    with pytest.raises(DataError, match="reference 2 has 2 lines but there are 3 translations"):
        score(HYPOTHESES, [REFERENCES, OTHERS[:2]], metrics)
    with pytest.raises(DataError, match="nothing to score: there are no translations"):
        score([], [[]], metrics)


def test_chrf_with_words_is_that_of_sacrebleu():
    [result] = score(HYPOTHESES, [REFERENCES], make_metrics(["chrf++"]))
    assert result.score == sacrebleu.corpus_chrf(HYPOTHESES, [REFERENCES], word_order=2).score
    assert "nw:2" in result.signature and result.detail.startswith("chrF2++|")


def test_sentence_scores_are_those_of_sacrebleu():
    scores = score_sentences(HYPOTHESES, [REFERENCES, OTHERS], make_metrics(["bleu", "chrf", "ter"]))
    theirs: dict[str, Callable] = {
        "bleu": sacrebleu.sentence_bleu,
        "chrf": sacrebleu.sentence_chrf,
        "ter": sacrebleu.sentence_ter,
    }
    rows = list(zip(HYPOTHESES, zip(REFERENCES, OTHERS, strict=True), strict=True))
    for name, sentence_score in theirs.items():
        assert scores[name] == [sentence_score(text, list(others)).score for text, others in rows]


BLANK = ["", *OTHERS[1:2], " \u3000"]
MISSING = [None, *OTHERS[1:2], None]


@pytest.mark.parametrize(
    ("references", "present"),
    [
        ([REFERENCES, BLANK], [REFERENCES, MISSING]),
        ([BLANK, REFERENCES, OTHERS], [MISSING, REFERENCES, OTHERS]),  # the order does not matter
        ([REFERENCES, ["", "\t", ""]], [REFERENCES]),
        ([[*OTHERS[:2], ""], [*REFERENCES[:2], " "]], [[*OTHERS[:2], ""], [*REFERENCES[:2], " "]]),
        ([[*OTHERS[:2], ""]], [[*OTHERS[:2], ""]]),
    ],
)
def test_a_blank_line_of_several_references_is_not_a_reference(references, present):
    """Unless all are blank: an empty source has an empty translation."""
    for hypotheses in (HYPOTHESES, [*HYPOTHESES[:2], ""]):
        metrics = make_metrics(["bleu", "chrf", "chrf++", "ter"])
        theirs: list = [sacrebleu.BLEU(), sacrebleu.CHRF(), sacrebleu.CHRF(word_order=2), sacrebleu.TER()]
        for ours, metric in zip(score(hypotheses, references, metrics), theirs, strict=True):
            assert ours.score == metric.corpus_score(hypotheses, present).score
            assert ours.signature == str(metric.get_signature())
        sentences = score_sentences(hypotheses, references, metrics)
        theirs[0].effective_order = True
        rows = [[text for text in row if text is not None] for row in zip(*present, strict=True)]
        for name, metric in zip(metrics, theirs, strict=True):
            expected = [metric.sentence_score(*row).score for row in zip(hypotheses, rows, strict=True)]
            assert sentences[name] == expected
    assert ("nrefs:var" in ours.signature) == any(None in lines for lines in present[:2] if len(present) > 1)


def test_a_tokenizer_that_cannot_be_downloaded_is_named(tmp_path):
    """sacreBLEU reads the name of its folder when it is imported, so this is another process."""
    code = "from mtrain.evaluation.metrics import make_metrics; make_metrics(['bleu'], tokenize='flores200')"
    environment = {**os.environ, "SACREBLEU": str(tmp_path), "https_proxy": "http://127.0.0.1:9"}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert "UsageError: the BLEU tokenizer flores200 cannot be downloaded: <urlopen error" in result.stderr
