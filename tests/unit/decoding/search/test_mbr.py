"""Minimum Bayes risk: the translation most similar to the others wins."""

from importlib.util import find_spec

import pytest
import sacrebleu

from mtrain import Translator
from mtrain.config.languages import Direction
from mtrain.config.sections.decoding import DecodingConfig
from mtrain.decoding import decode
from mtrain.decoding.decode import DecodingEnsemble, DecodingTask, Ensemble, decode_batch
from mtrain.decoding.search.mbr import rank, sentence_metric
from mtrain.decoding.split import Part
from mtrain.errors import UsageError
from mtrain.model.transformer import Transformer
from tests.support.translation import words_of


@pytest.mark.parametrize("name", ["chrf", "bleu"])
def test_the_text_most_similar_to_the_others_is_chosen(name: str) -> None:
    texts = ["Die Katze schläft.", "Ein Hund bellt laut.", "Eine Katze schläft.", "Die Katze schläft nicht."]
    metric = sentence_metric(name, "de")
    means = [
        sum(getattr(sacrebleu, f"sentence_{name}")(text, [other]).score for other in texts) for text in texts
    ]
    assert rank(texts, metric) == sorted(range(4), key=lambda i: -means[i])
    assert rank(texts, metric)[-1] == 1
    repeated = [texts[1]] * 5 + texts
    assert repeated[rank(repeated, metric)[0]] == texts[1]
    assert rank(["a", "a"], metric) == [0, 1]


@pytest.mark.parametrize("name", ["chrf", "bleu"])
def test_mbr_reorders_the_hypotheses(translator: Translator, name: str) -> None:
    lines = words_of(6, seed=5)
    plain = translator.with_settings(samples=8, temperature=2.0)
    drawn = plain.translate(lines, n_best=8)
    chosen = plain.with_settings(mbr=name).translate(lines, n_best=8)
    metric = sentence_metric(name, "de")
    for before, after in zip(drawn, chosen, strict=True):
        texts = [t.text for t in before.n_best]
        assert after.text == texts[rank(texts, metric)[0]]
        assert sorted(t.text for t in after.n_best) == sorted(texts)
    assert [t.text for t in drawn] != [t.text for t in chosen]


def test_mbr_compares_all_beams_however_many_translations_are_wanted(translator: Translator) -> None:
    lines = words_of(6, seed=5)
    compared = translator.with_settings(beam_size=4, mbr="chrf")
    chosen = [t.text for t in compared.translate(lines)]
    assert chosen == [t.text for t in compared.translate(lines, n_best=4)]
    assert chosen != [t.text for t in compared.with_settings(mbr=None).translate(lines)]


def test_the_language_determines_how_bleu_tokenizes() -> None:
    assert sentence_metric("bleu", "zh-CN").sentence_score("我爱你", ["我爱他"]).score > 0


def _ensemble(translator: Translator) -> Ensemble[Transformer]:
    models = [model.transformer for model in translator.models]
    return Ensemble(models, translator.tokenizer, translator.device)


def test_a_tokenizer_that_is_not_installed_is_an_error_before_decoding(translator: Translator) -> None:
    if find_spec("MeCab") is not None:
        pytest.skip("MeCab is installed here")
    japanese = Translator(_ensemble(translator), translator.decoding, Direction("en", "ja"), 64)
    with pytest.raises(UsageError, match="the BLEU tokenizer ja-mecab is not installed"):
        japanese.with_settings(mbr="bleu")


def test_hypotheses_are_ranked_in_the_language_that_is_chosen(translator: Translator, monkeypatch) -> None:
    free = Translator(_ensemble(translator), translator.decoding, Direction("und", "und"), 64)
    languages = []

    def recorded(name: str, language: str) -> object:
        languages.append(language)
        return sentence_metric(name, language)

    monkeypatch.setattr(decode, "sentence_metric", recorded)
    for chosen in (free.between("en", "zh"), free.with_settings(samples=2, mbr="bleu").between("en", "zh")):
        chosen.with_settings(samples=2, mbr="bleu", workers=1).translate(["a b"])
    assert languages == ["zh", "zh"]


def test_hypotheses_of_a_line_are_ranked_in_the_language_of_its_tag(
    translator: Translator, monkeypatch
) -> None:
    """Or in the default one if its tokenizer is not installed."""
    languages = []

    def recorded(name: str, language: str) -> object:
        languages.append(language)
        if language == "ja":
            raise UsageError("the BLEU tokenizer ja-mecab is not installed")
        return sentence_metric(name, language)

    monkeypatch.setattr(decode, "sentence_metric", recorded)
    ensemble = DecodingEnsemble(translator.models, translator.tokenizer, translator.device)
    eos = translator.tokenizer.special.eos
    parts = [Part(0, [5, eos], [], (i, 0), (), language) for i, language in enumerate(("zh", "ja", None))]
    decode_batch(ensemble, DecodingTask(DecodingConfig(mbr="bleu", beam_size=2), parts, "de"))
    assert languages == ["zh", "ja", "de", "de"]
