"""Languages by code or name, and in the names of files and columns."""

import pytest

from mtrain.config.language_names import (
    find_language,
    language_name,
    languages_in,
    languages_of_pair,
    words_of,
)


@pytest.mark.parametrize(
    ("word", "code"),
    [
        *(("de", "de"), ("DE", "de"), ("deu", "de"), ("ger", "de"), ("German", "de"), ("cmn", "zh")),
        *(("pt_BR", "pt-BR"), ("zh-Hans", "zh-Hans"), ("zho_Hans", "zh-Hans"), ("es-419", "es-419")),
        *(("zh_Hant_TW", "zh-Hant-TW"), ("sr-Latn-RS", "sr-Latn-RS"), ("ace_Latn", "ace-Latn")),
        *(("pt-br", "pt-BR"), ("zh_hans", "zh-Hans"), ("ca-valencia", "ca-valencia"), ("zh-tw", "zh-TW")),
        *(("zh-hant-tw", "zh-Hant-TW"), ("EN-us", "en-US"), ("SR-LATN-rs", "sr-Latn-RS"), ("ko-kr", "ko-KR")),
        *(("ca-es-VALENCIA", "ca-ES-valencia"), ("en-de", None), ("my-file", None), ("my-corpus", None)),
        *(
            ("cni", "cni"),
            ("CSB", "csb"),
            ("Kashubian", "csb"),
            ("arq", "arq"),
            ("ber", "ber"),
            ("tib", "bo"),
        ),
        *(
            ("und", None),
            ("mul", None),
            ("xyz", None),
            ("Central Tarahumara", "tar"),
            ("ary_Arab", "ary-Arab"),
        ),
        *(("scottish gaelic", "gd"), ("xx", None), ("corpus", None), ("", None), ("de-at-home", None)),
    ],
)
def test_languages_are_found_by_code_and_name(word, code):
    assert find_language(word) == code


@pytest.mark.parametrize(
    ("name", "codes"),
    [
        ("train.de-en.de", ["de", "en", "de"]),
        ("europarl-v7.de-en.en.gz", ["de", "en", "en"]),
        ("train_de.txt", ["de"]),
        ("English.txt", ["en"]),
        ("zh_CN/train.zh_CN", ["zh-CN", "zh-CN"]),
        ("eng_Latn.dev", ["en-Latn"]),
        ("translation.en", ["en"]),
        ("raw_DE.txt", ["de"]),
        ("DE-EN.tsv", ["de", "en"]),
        ("corpus.txt", []),
        ("eng_Latn-ace_Latn.tsv", ["en-Latn", "ace-Latn"]),
        ("sr_Latn_RS.txt", ["sr-Latn-RS"]),
        ("train.new.txt", []),
        ("train.pt-br.txt", ["pt-BR"]),
        ("EN-US_zh-hant-tw.txt", ["en-US", "zh-Hant-TW"]),
        ("zh-hant-en.tsv", ["zh-Hant", "en"]),
        ("en-pt_br.ca-valencia", ["en", "pt-BR", "ca-valencia"]),
        ("en-tc.txt", ["en"]),
        ("my-file.en-thai", ["my", "en", "th"]),
        ("sv-fi.ca-es.tr-ku.tsv", ["sv", "fi", "ca", "es", "tr", "ku"]),
    ],
)
def test_languages_in_names(name, codes):
    assert languages_in(words_of(name)) == codes


def test_names_of_languages():
    assert language_name("de") == "German"
    assert language_name("pt-BR") == "Portuguese (BR)"
    assert language_name("zho_Hans") == "Chinese (Hans)"
    assert language_name("nds") == "Low German"
    assert language_name("tar") == "Central Tarahumara"
    assert language_name("xyz") == "xyz"
    assert [language_name(code) for code in ("el", "hbs", "arb", "ms", "or")] == [
        *("Greek", "Serbo-Croatian", "Arabic", "Malay", "Odia")
    ]


@pytest.mark.parametrize(
    ("name", "codes"),
    [
        ("news.en-fr.tsv", ["en", "fr"]),
        ("news.fr-ca.tsv", ["fr", "ca"]),
        ("news.en-pt-br.tsv", ["en", "pt-BR"]),
        ("pl-csb.tsv.gz", ["pl", "csb"]),
        ("AmericasNLP.quy_cni.tsv", ["quy", "cni"]),
        ("en-to-de.tsv.gz", ["en", "de"]),
        ("german-to-english.tsv", ["de", "en"]),
        ("en-to.tsv", ["en", "to"]),  # Tongan
        ("train.tsv", []),
        ("dev-val.tsv", []),
        ("all-en.tsv", []),
        ("en-en.tsv", []),
        ("old-cni-new.tsv", []),
    ],
)
def test_the_languages_of_a_table_in_its_name(name, codes):
    assert languages_of_pair(name) == codes
