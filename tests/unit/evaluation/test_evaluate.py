"""Scores are sacreBLEU's own, on raw text, by the one path that also translates."""

import json
import subprocess
import sys

import pytest
import sacrebleu

from mtrain.config.languages import bleu_tokenizer
from mtrain.decoding.translate import Translator
from mtrain.errors import DataError, UsageError
from mtrain.evaluation.evaluate import configured_test_sets, evaluate_set, test_set_from_files
from mtrain.evaluation.metrics import make_metrics, score
from tests.support.training import PAIRS

test_set_from_files.__test__ = False  # not one of ours, whatever its name

HYPOTHESES = ["Der Hund rennt.", "Eine Katze", "Zwei Frauen reden heute ."]
REFERENCES = ["Der Hund rennt im Park.", "Eine Katze schläft.", "zwei Frauen reden ."]
OTHERS = ["Ein Hund rennt im Park.", "Die Katze schläft.", "Zwei Damen reden heute ."]


def test_scores_and_signatures_are_those_of_sacrebleu():
    metrics = make_metrics(["bleu", "chrf", "ter"], "de")
    results = {result.metric: result for result in score(HYPOTHESES, [REFERENCES, OTHERS], metrics)}
    theirs = {"bleu": sacrebleu.corpus_bleu, "chrf": sacrebleu.corpus_chrf, "ter": sacrebleu.corpus_ter}
    for name, corpus_score in theirs.items():
        assert results[name].score == corpus_score(HYPOTHESES, [REFERENCES, OTHERS]).score
    assert "nrefs:2|case:mixed|eff:no|tok:13a" in results["bleu"].signature
    assert results["bleu"].signature in results["bleu"].detail


def test_the_command_line_of_sacrebleu_gives_the_same_score(run_dir, corpus, tmp_path):
    noisy = ["decoding.max_length_ratio=0", "decoding.max_length_offset=10"]  # so that it is not 100
    options = f"--device cpu -i {corpus}/train.en --set {noisy[0]} --set {noisy[1]}".split()
    translate = [sys.executable, "-m", "mtrain", "translate", str(run_dir), *options]
    output = subprocess.run(translate, capture_output=True, check=True).stdout
    (tmp_path / "out.de").write_bytes(output)
    options = f"{corpus}/train.de -i {tmp_path}/out.de -f json -w 6".split()
    command = [sys.executable, "-m", "sacrebleu", *options]
    theirs = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    translator = Translator.load(run_dir, "cpu", noisy)
    test = configured_test_sets(run_dir)[0]
    [ours] = evaluate_set(test, translator, make_metrics(["bleu"], translator.target_lang))
    assert 10 < ours.score < 99 and ours.score == pytest.approx(theirs["score"], abs=1e-6)
    assert theirs["signature"] in ours.signature


CODES = {
    "de": "13a",
    "zh": "zh",
    "zh-TW": "zh",
    "ZH_cn": "zh",
    "ja": "ja-mecab",
    "ko": "ko-mecab",
    "zhx": "13a",
}


@pytest.mark.parametrize(("language", "tokenizer"), CODES.items())
def test_the_tokenizer_follows_the_target_language(language, tokenizer):
    assert bleu_tokenizer(language) == tokenizer


def test_chinese_is_scored_by_characters():
    zh = make_metrics(["bleu"], "zh")
    assert score(["我喜欢吃橙子。"], [["我喜欢吃橙子。"]], zh)[0].score == pytest.approx(100)
    assert "tok:zh" in score(["我喜欢橙子。"], [["我喜欢吃橙子。"]], zh)[0].signature


def test_lowercasing_and_another_tokenizer_are_in_the_signature():
    [plain] = score(["der hund rennt im park."], [["Der Hund rennt im Park."]], make_metrics(["bleu"], "de"))
    [lowered] = score(
        ["der hund rennt im park."], [["Der Hund rennt im Park."]], make_metrics(["bleu"], "de", True, "char")
    )
    assert plain.score < lowered.score == pytest.approx(100)
    assert "case:lc" in lowered.signature and "tok:char" in lowered.signature


def test_wrong_choices_name_the_right_ones():
    with pytest.raises(UsageError, match="choose from bleu, chrf, ter"):
        make_metrics(["bleu", "rouge"], "de")
    with pytest.raises(UsageError, match=r"choose from .*13a"):
        make_metrics(["bleu"], "de", tokenize="moses")


def test_a_tokenizer_that_is_not_installed_is_a_clear_error():
    if subprocess.run([sys.executable, "-c", "import MeCab"], capture_output=True).returncode == 0:
        pytest.skip("MeCab is installed here")
    with pytest.raises(UsageError, match="tokenizer ja-mecab is not installed"):
        make_metrics(["bleu"], "ja")


def test_counts_that_differ_are_errors(tmp_path):
    metrics = make_metrics(["bleu"], "de")
    with pytest.raises(DataError, match="reference 2 has 2 lines, not 3"):
        score(HYPOTHESES, [REFERENCES, OTHERS[:2]], metrics)
    with pytest.raises(DataError, match="nothing to score"):
        score([], [[]], metrics)
    (tmp_path / "a").write_text("x\ny\n")
    (tmp_path / "b").write_text("x\n")
    with pytest.raises(DataError, match=r"a has 2 lines but .*b has 1"):
        test_set_from_files(tmp_path / "a", [tmp_path / "b"], None)


def test_configured_test_sets_are_translated_and_scored(run_dir):
    [test] = configured_test_sets(run_dir)
    assert test.name == "seen" and test.sources == [pair[0] for pair in PAIRS]
    [result] = evaluate_set(test, Translator.load(run_dir, "cpu"), make_metrics(["bleu"], "de"))
    assert result.score == pytest.approx(100)
    with pytest.raises(UsageError, match="no test sets are configured"):
        configured_test_sets(run_dir / "model")
