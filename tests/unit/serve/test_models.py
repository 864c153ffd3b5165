"""Which languages models translate between, by the codes that clients use."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mtrain.config.languages import Direction
from mtrain.errors import ModelError, UsageError
from mtrain.serve.models import Models, ServedModel, served_models


def model(name, source, target, tags="none", pieces=(), codes=()):
    """A model as a server sees it. Its translators are tuples of its name and of their languages."""
    vocabulary = SimpleNamespace(symbol_names=list(pieces), codes={code: i for i, code in enumerate(codes)})
    translator = SimpleNamespace(
        own_direction=Direction(source, target),
        language_tags=tags,
        tokenizer=SimpleNamespace(source=vocabulary),
        between=lambda *codes: (name, *codes),
    )
    return ServedModel.of(Path(name), translator)


def together(*models):
    """Models that one server has, and whose codes it chooses."""
    return Models(served_models([(Path(each.name), each.translator) for each in models]))


def found(models, *arguments) -> Any:
    """The name of the model for a direction, and its codes."""
    return models.find(*arguments)


def directions(models):
    return {(code, target) for code in models.sources for target in models.targets_of(code)}


def test_several_models_make_several_directions():
    models = Models([model("a", "en", "de"), model("b", "de", "en"), model("c", "en", "fr")])
    assert directions(models) == {("en", "de"), ("de", "en"), ("en", "fr")}
    assert found(models, "en", "fr") == ("c", "en", "fr")
    assert found(models, "EN", "fr-CA") == ("c", "en", "fr")
    for wrong in (("fr", "en"), ("de", "fr"), ("en", "en"), ("xx", "de")):
        with pytest.raises(UsageError):
            models.find(*wrong)


def test_codes_of_a_multilingual_model_have_short_names():
    codes = ["eng_Latn", "deu_Latn", "zho_Hans", "zho_Hant"]
    models = Models([model("many", "eng_Latn", "deu_Latn", "codes", codes=codes)])
    assert [each["code"] for each in models.languages()] == ["en", "de", "zh-Hans", "zh-Hant"]
    assert models.targets_of("en") == ["de", "zh-Hans", "zh-Hant"]
    assert models.directions["many:zh-Hans-zh-Hant"][1:] == ("zh-Hans", "zh-Hant")
    assert "many:de-de" not in models.directions
    assert found(models, "de", "zh-Hant") == ("many", "deu_Latn", "zho_Hant")
    assert found(models, "eng_Latn", "zho_Hans") == ("many", "eng_Latn", "zho_Hans")


@pytest.mark.parametrize(
    ("asked", "codes", "expected"),
    [
        ("zh", ("zh-Hans", "zh-Hant"), "zh-Hans"),
        ("zh_CN", ("zh-Hans", "zh-Hant"), "zh-Hans"),
        ("zh-TW", ("zh-Hans", "zh-Hant"), "zh-Hant"),
        ("zh-HK", ("zh-Hans", "zh-Hant"), "zh-Hant"),
        ("zt", ("zh-Hans", "zh-Hant"), "zh-Hant"),
        ("zh", ("zh-CN", "zh-TW"), "zh-CN"),
        ("zt", ("zh-CN", "zh-TW"), "zh-TW"),
        ("zh-Hans", ("zh-CN", "zh-TW"), "zh-CN"),
        ("zh-Hant", ("zh-CN", "zh-TW"), "zh-TW"),
        ("zh-HK", ("zh-CN", "zh-TW"), "zh-TW"),
        ("zh-SG", ("zh-CN", "zh-TW"), "zh-CN"),
        ("zh-Hant-HK", ("zh-CN", "zh-TW"), "zh-TW"),
        ("zh-TW", ("zh", "zh-TW"), "zh-TW"),
        ("zt", ("zh", "zt"), "zt"),
        ("pb", ("pb",), "pb"),
        ("pt-BR", ("pt", "pt-BR"), "pt-BR"),
        ("pb", ("pt-PT", "pt-BR"), "pt-BR"),
        ("pt", ("pt-PT", "pt-BR"), "pt-PT"),
        ("pb", ("pt",), "pt"),
        ("nb", ("no",), "no"),
        ("no", ("nb", "nn"), "nb"),
        ("nn", ("no", "nn"), "nn"),
        ("sr", ("sr-Latn", "sr-Cyrl"), "several codes of the model fit: sr-Latn, sr-Cyrl"),
        ("zt", ("zh",), "zh"),
        ("zh", ("zh-Hans",), "zh-Hans"),
        ("zh-Hant", ("zh-Hans",), "zh-Hant"),
        ("sr-Cyrl", ("sr-Latn",), "sr-Cyrl"),
        ("sr", ("sr-Latn",), "sr-Latn"),
    ],
)
def test_codes_that_clients_use_are_understood(asked, codes, expected):
    models = together(*(model(code, "en", code) for code in codes))
    if expected in codes:
        assert found(models, "en", asked) == (expected, "en", expected)
        assert models.is_same(asked, expected)
    else:
        with pytest.raises(UsageError, match=expected):
            models.find("en", asked)


def test_codes_are_short_unless_they_are_names_of_the_user_s_own():
    models = together(model("a", "eng", "en-US-formal"), model("b", "de-AT", "toki-pona"))
    assert models.codes == ["en", "de", "en-US-formal", "toki-pona"]
    assert found(models, "eng", "en-US-formal") == ("a", "eng", "en-US-formal")
    assert found(models, "de", "toki-pona") == ("b", "de-AT", "toki-pona")


@pytest.mark.parametrize("codes", [("zh_CN", "zh_TW"), ("zh-CN", "zh-TW"), ("zho_Hans", "zho_Hant")])
def test_regions_and_scripts_tell_the_models_of_a_language_apart(codes):
    models = together(*(model(code, "en", code) for code in codes))
    short = [code.replace("zho", "zh").replace("_", "-") for code in codes]
    assert models.targets_of("en") == short
    for code, name in zip(codes, short, strict=True):
        assert found(models, "en", code) == found(models, "en", name) == (code, "en", code)
    assert not models.is_same(*short)


def test_only_scripts_that_a_code_alone_stands_for_are_left_out():
    """A client that finds `zh` in the list would also ask for Traditional Chinese."""
    codes = ("zho_Hans", "srp_Latn", "kaz_Cyrl", "deu_Latn", "arb_Arab")
    models = together(*(model(code, "eng_Latn", code) for code in codes))
    assert models.targets_of("en") == ["zh-Hans", "sr-Latn", "kk", "de", "ar"]
    assert together(model("a", "eng_Latn", "srp_Cyrl")).targets_of("en") == ["sr"]


def test_a_region_does_not_matter_if_no_model_has_another():
    models = together(model("a", "en", "de"), model("b", "en_GB", "fr"))
    assert found(models, "en", "fr") == found(models, "en-GB", "fr") == ("b", "en_GB", "fr")


def test_tags_name_the_languages():
    one_to_many = model("a", "en", "de", "target", ["<2de>", "<2fr>", "<other>"])
    assert directions(Models([one_to_many])) == {("en", "de"), ("en", "fr")}
    assert found(Models([one_to_many]), "en", "de") == ("a", "en", "de")  # chosen, whatever tag a text has
    many_to_many = model("a", "en", "de", "target", ["<2de>", "<2en>"])
    assert directions(Models([many_to_many])) == {("en", "de"), ("de", "en")}
    both = model("a", "en", "de", "both", ["<en>", "<cs>", "<other>", "<2de>", "<2en>", "@@"])
    assert directions(Models([both])) == {("en", "de"), ("cs", "de"), ("cs", "en")}
    assert found(Models([both]), "cs", "en") == ("a", "cs", "en")


def test_a_model_is_called_as_its_folder_is(tmp_path):
    assert model("runs/mine", "en", "de").name == "mine"
    assert model("runs/mine/model", "en", "de").name == "mine"
    (tmp_path / "released").symlink_to(tmp_path)  # so that a model of the same name can be served
    assert model(tmp_path / "released", "en", "de").name == "released"
    with pytest.raises(UsageError, match="the same name"):
        Models([model("a/x", "en", "de"), model("b/x", "de", "en")])
    models = Models([model("a", "en", "de"), model("b", "en", "de")])
    assert models.directions["b:en-de"][0].name == "b"
    assert found(models, "en", "de") == ("a", "en", "de")


def test_the_languages_of_a_model_must_be_known():
    with pytest.raises(
        ModelError, match=r"mine: the languages of the model are unknown; train it with codes"
    ):
        model("mine", "und", "de")


def test_the_source_language_is_detected_among_those_that_can_be_translated():
    pytest.importorskip("py3langid")
    models = Models(
        [model("a", "en", "de"), model("b", "fr", "de"), model("c", "de", "en"), model("d", "es", "en")]
    )
    text = "Le chien court dans le parc."
    for target in ("de", None):
        [found] = models.detect(text, target)  # others are too unlikely
        assert found["language"] == "fr" and found["confidence"] in range(90, 101)
    assert models.detect(text, "en")[0]["language"] in ("de", "es")
    with pytest.raises(UsageError, match="no model translates into ja"):
        models.detect(text, "ja")


def test_a_text_in_the_target_language_is_recognized():
    pytest.importorskip("py3langid")
    models = Models([model("a", "en", "fr"), model("b", "de", "fr")])
    [best] = models.detect("Le chien noir court dans le parc avec les enfants.", "FR")[:1]
    assert best["language"] == "fr" and best["confidence"] > 90
    assert models.detect("Tom", "fr")[0]["language"] in ("en", "de")  # not certain
    assert models.is_same("French", "fr") and not models.is_same("en", "fr")
    assert not models.is_same("xx", "xx")
    longer = Models([model("a", "eng", "deu")])
    plain = Models([model("a", "en", "zh")])
    assert plain.is_same("zh-Hant", "zh") and not plain.is_same("zh-Hant", "zh-Hans")
    assert longer.is_same("deu", "deu") and longer.is_same("de", "deu") and not longer.is_same("eng", "deu")
    assert plain.is_same("zt", "zh") and not plain.is_same("zt", "zh-Hans")
    assert models.is_same("fr", "fr-CA") and not models.is_same("en", "fr-CA")


def test_of_several_codes_for_a_language_the_first_or_the_target_is_detected():
    pytest.importorskip("py3langid")
    codes = {"zh-Hans": "zh-Hans", "zh-Hant": "zh-Hant"}
    chinese = ServedModel("a", model("a", "en", "de").translator, {"en": "en"}, codes)
    text = "一只黑狗在公园里和孩子们一起跑步。"
    assert Models([chinese]).detect(text)[0]["language"] == "zh-Hans"
    assert Models([chinese]).detect(text, "zh-Hant")[0]["language"] == "zh-Hant"
    reverse = ServedModel("b", model("b", "en", "de").translator, codes, {"en": "en"})
    assert Models([reverse]).detect(text, "en")[0]["language"] == "zh-Hans"
    assert Models([chinese, reverse]).is_same("zh-Hans", "zh")  # clients mean this one
    assert not Models([chinese, reverse]).is_same("zh-Hant", "zh")


def test_a_model_must_translate_into_another_language():
    with pytest.raises(UsageError, match="simpler: no model translates into another language"):
        Models([model("simpler", "en", "en")])


def test_without_language_identification_a_single_source_is_known(monkeypatch):
    monkeypatch.setattr("mtrain.data.text.identify_language.can_identify", lambda: False)
    models = Models([model("a", "en", "de"), model("c", "de", "en"), model("d", "es", "en")])
    assert models.detect("?", "de") == [{"language": "en", "confidence": 100.0}]
    with pytest.raises(UsageError, match="install py3langid"):
        models.detect("It rains.", "en")
