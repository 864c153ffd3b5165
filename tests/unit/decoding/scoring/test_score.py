"""Scores of given translations equal the scores of search and of the full model."""

import json
import math
from functools import partial
from pathlib import Path

import pytest
import torch

from mtrain import Translator
from mtrain.decoding.scoring.score import attention, filter_scores, score_pairs, with_column
from mtrain.decoding.search.forced import forced_log_probs
from mtrain.errors import DataError, ModelError
from mtrain.model.incremental import DecodingTransformer
from tests.support.search import EOS, build, forced, sentences
from tests.support.training import PAIRS


def test_forced_log_probabilities_equal_those_of_the_full_model() -> None:
    models = [build(seed, vocab=9) for seed in (0, 1)]
    source, keep = sentences(models[0], [3, 8, 5])
    targets = torch.tensor([[4, 5, EOS], [6, EOS, 0], [8, 8, 8]])
    for model in models:
        ours = forced_log_probs([DecodingTransformer(model)], source, keep, targets)
        for row, length in enumerate([3, 2, 3]):
            ids = tuple(targets[row, :length].tolist())
            assert float(ours[row, :length].sum()) == pytest.approx(
                forced(model, source[row], keep[row], [ids])[0]
            )
    both = forced_log_probs([DecodingTransformer(model) for model in models], source, keep, targets).exp()
    single = [forced_log_probs([DecodingTransformer(model)], source, keep, targets).exp() for model in models]
    torch.testing.assert_close(both, (single[0] + single[1]) / 2)


def test_scores_that_are_not_finite_are_an_error(run_dir: Path) -> None:
    broken = Translator.load(run_dir, "cpu")
    [model] = broken.models
    model.bias = torch.full((model.config.target_vocab_size,), math.nan)
    with pytest.raises(ModelError, match="not finite"):
        list(score_pairs(broken, [("It rains.", "Es regnet.")]))


def test_progress_counts_each_pair_once_for_each_model(translator: Translator) -> None:
    counts: list[int] = []
    for reverse, models in ((None, 1), (translator, 2)):
        counts.clear()
        assert len(list(filter_scores(translator, reverse, PAIRS, counts.append))) == len(PAIRS)
        assert sum(counts) == models * len(PAIRS)


def score_lines(translator: Translator, lines: list[str], quotes: bool = False) -> list[str]:
    return [*with_column(lines, "t.tsv", partial(filter_scores, translator, None), quotes)]


def test_blank_lines_at_the_end_of_a_table_have_no_score(translator: Translator) -> None:
    lines = ["It rains.\tEs regnet.", "It rains.\tEs regnet."]
    scored = score_lines(translator, [*lines, "", " "])
    assert scored == [*score_lines(translator, lines), "\n", " \n"] and len(scored) == 4
    with pytest.raises(DataError, match=r"t\.tsv:2: 1 column\(s\); at least 2 expected"):
        score_lines(translator, [lines[0], "", lines[1]])


def test_quoted_fields_are_noticed_and_can_be_read(translator: Translator, caplog) -> None:
    plain = ['He says "it rains".\tEs regnet.', "It rains.\tEs regnet."]
    quoted = ['"He says ""it rains""."\t"Es regnet."\tx', '"It rains."\tEs regnet.']

    def scores(lines: list[str], quotes: bool) -> list[str]:
        return [line.rpartition("\t")[2] for line in score_lines(translator, lines, quotes)]

    expected = scores(plain, False)
    assert not caplog.messages and scores(quoted, True) == expected
    assert not caplog.messages and scores(quoted, False) != expected
    hint = "t.tsv: the fields seem to be in quotes, as csv writers write them; give --quotes"
    assert caplog.messages == [hint]
    with pytest.raises(DataError, match=r"t\.tsv:2: the quotes of column 0 do not end with it"):
        scores([plain[1], '"It rains.\tEs regnet.'], True)


def test_scores_equal_those_of_the_search(translator: Translator) -> None:
    sources = [source for source, _ in PAIRS] * 3
    found = translator.with_settings(beam_size=4).translate(sources, n_best=4)
    pairs = [(source, t.text) for source, best in zip(sources, found, strict=True) for t in best.n_best]
    given = list(score_pairs(translator.with_settings(batch_tokens=100), pairs))
    close = 0
    for scored, translation in zip(given, (t for best in found for t in best.n_best), strict=True):
        assert sum(scored.token_log_probs) == pytest.approx(scored.log_prob)
        assert scored.tokens[-1] == "</s>" and "".join(scored.tokens[:-1]).replace("\u2581", " ").strip()
        if len(scored.tokens) == translation.tokens:  # the search may have found another segmentation
            close += abs(scored.log_prob - translation.log_prob) < 1e-4
    assert close > len(pairs) * 0.6


def test_pairs_over_the_length_limit_have_no_score_and_empty_pairs_have_one(translator: Translator) -> None:
    long = "katze " * 100
    over, other, empty, good = score_pairs(translator, [(long, "a"), ("a", long), ("", ""), PAIRS[0]])
    assert math.isnan(over.log_prob) and math.isnan(other.log_prob) and over.tokens == []
    assert empty.tokens == ["</s>"] and empty.log_prob < 0
    assert good.log_prob > -5
    assert over.line() == "nan\t0\t\n" and json.loads(over.as_json())["log_prob"] is None
    fields = good.line().rstrip("\n").split("\t")
    assert float(fields[0]) == pytest.approx(good.log_prob, abs=1e-6) and int(fields[1]) == len(good.tokens)
    assert len(fields[2].split()) == len(good.tokens)


def test_attention_is_a_distribution_over_the_source_tokens(translator: Translator) -> None:
    source, target, matrix = attention(translator, *PAIRS[1])
    assert source[-1] == target[-1] == "</s>" and matrix.shape == (len(target), len(source))
    assert matrix.sum(axis=1) == pytest.approx(1, abs=1e-5)
