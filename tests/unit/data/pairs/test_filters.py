"""Each rule of `data.filters` on pairs that it keeps and pairs that it rejects."""

import sys

import pytest

from mtrain.config.sections.data import DataConfig
from mtrain.data.pairs.filters import BlockFilter
from mtrain.data.pairs.rejections import REASONS
from mtrain.errors import UsageError
from tests.support.corpora import block_of


def reasons(pairs, languages=("en", "de"), scores=(), **filters):
    """The reason why each pair is rejected; None if it is kept."""
    source, target = languages
    corpus = {"tsv": "scored.tsv"} if "min_score" in filters else {"toy": "train"}
    data = DataConfig(
        source_lang=source, target_lang=target, train=corpus, validation={"holdout": 1}, filters=filters
    )
    block = block_of(pairs, first=7)._replace(scores=scores)
    return [REASONS[code - 1] if code else None for code in BlockFilter(data).apply(block, 0).codes]


LONG = "a" * 41
CASES: list[tuple] = [
    ({"min_words": 2}, [("a b", "c d"), ("a\u3000b", "c  d ")], [("a b", "c"), (" a ", "c d")]),
    ({"max_words": 2}, [("a b", "c\td"), (LONG, "c")], [("a b", "c d e"), ("a\u2028b c", "d")]),
    ({"max_words": 2}, [("ሰላም፡ለዓለም።", "c")], [("ሰላም፡ለዓለም፡ሁሉ፡፡", "c")]),  # Ethiopic wordspaces
    ({"max_word_length": 40}, [(LONG[1:] + " b", "c"), ("…" * 40, "d")], [(LONG, "c"), ("d", "b " + LONG)]),
    ({"max_ratio": 3.0}, [("abc", "d"), ("a", "b  "), (" a", "bcd")], [("a", "bcde"), ("é" * 7, "ab")]),
    (
        {"min_alphabetic": 0.5},
        [
            ("a1", "b 2"),
            ("हिन्दी", "b"),
            ("e\u0301", "ß"),
            ("ကျွန်ုပ်တို့ ယခု အိမ်ပြန်နေကြသည်။", "ពួកគេមិនយល់ទេ។"),
            ("a\u200d\u200d", "ක්\u200dරී"),  # joiners are invisible
            ("二〇〇〇", "a"),  # the Chinese zero
            ("葛\U000e0100 1", "a"),  # a variant of a Chinese character
        ],
        [
            ("1", "a"),
            ("a", "b 12"),
            ("?", "a"),
            ("🎉🎉a", "a"),
            ("!!! ??? ---", "a"),
            ("a", "☺\ufe0f☺\ufe0f"),  # a variation selector is no mark of a letter
            ("1\ufe0f\u20e3", "a"),
        ],
    ),
    ({"script": True}, [("ab 12", "Дaü"), ("12", "a"), ("漢ab", "?")], [("Дa д", "a"), ("a", "漢字a")]),
    (
        {"copied": True},
        [("12", "12"), ("Tom.", "Tom"), ("…", "…")],
        [("Tom", "Tom"), ("TOM ", "tom"), ("Straße", "STRAßE")],
    ),
    (
        {"same_numbers": True},
        [
            ("in 1,000 days", "in 1.000 Tagen"),
            ("1,000,000", "1000000"),
            ("10 000", "10\u202f000"),
            ("9:05", "09.05"),
            ("3.14", "3,14"),
            ("none", "keine"),
            ("5 or 5", "5"),
            ("٣٤", "34"),
            ("0", "00"),
            ("x²", "x"),
            ("१,००,०००", "100,000"),
            ("12,34,567", "1.234.567"),
            ("١٬٠٠٠", "1 000"),
            ("１，０００円", "1000"),
            ("۱۲", "၁၂"),
            ("𞥑𞥒", "१२"),
            ("٣٫١٤", "3.14"),
            ("1,000.5", "1.000,5"),
        ],
        [("in 3 days", "in 4 Tagen"), ("two", "2"), ("1,000", "100"), ("12", "21"), ("2010 500", "2010500")],
    ),
    (
        {"same_urls": True},
        [
            ("see https://a.b/c?d=1.", "„https://a.b/c?d=1“"),
            ("(www.a.b)", "www.a.b!"),
            ("www. x", "x"),
            ("none", "keine"),
            ("https://a.b/c. It", "请看https://a.b/c。它"),
        ],
        [
            ("https://a.b/c", "请看https://a.b/d。"),
            ("see http://a.b", "siehe http://a.c"),
            ("http://a.b", "x"),
            ("x", "www.a.b"),
        ],
    ),
]


@pytest.mark.parametrize(("filters", "good", "bad"), CASES, ids=[next(iter(case[0])) for case in CASES])
def test_a_rule_rejects_the_pairs_that_break_it(filters, good, bad):
    found = reasons([*good, *bad], **filters)
    assert found == [None] * len(good) + list(filters) * len(bad)


def test_scores_that_are_low_or_no_number_are_rejected():
    scores = [0.5, 0.49, float("nan"), float("inf"), -1.0]
    found = reasons([("a", "b")] * 5, scores=scores, min_score={"column": 2, "value": 0.5})
    assert found == [None, "min_score", "min_score", None, "min_score"]


def test_the_first_rule_in_the_order_of_the_config_is_the_reason():
    pairs = [("x x x", "x x x"), ("1 1 1", "漢"), ("", "漢"), (" \u3000", "1 1 1")]
    assert reasons(pairs, copied=True, max_words=2) == ["max_words", "max_words", "empty", "empty"]
    assert reasons(pairs, copied=True, script=True) == ["copied", "script", "empty", "empty"]


def test_words_are_not_counted_in_languages_without_spaces():
    pairs = [("漢" * 200, "a b"), ("漢", "a b c"), ("漢", LONG)]
    limits = {"min_words": 2, "max_words": 2, "max_word_length": 40}
    assert reasons(pairs, languages=("zh", "de"), **limits) == [None, "max_words", "min_words"]
    assert reasons(pairs, languages=("zho_Hans", "tha_Thai"), **limits) == [None] * 3


@pytest.mark.parametrize(
    ("language", "good", "bad"),
    [
        ("ja", "これはペンです", "this is"),
        ("ko", "한국어", "漢字"),
        ("sr", "ćevapi", "日本"),
        ("sr-Cyrl", "Ћевапи", "ćevapi"),
        ("el", "Ελλάδα", "Ellada"),
        ("hi", "हिन्दी", "Hindi"),
        ("tlh-Latn", "tlhIngan", "Клингон"),
        ("en", "Ｈｅｌｌｏ", "Ηελλο"),  # full-width
        ("ja", "ﾃﾞｰﾀ", "Data"),  # half-width
        ("zh", "ㄋㄧˇㄏㄠˇ", "Nihao"),
        ("bn", "বাড়ি ঢাকা", "bari"),
        ("ms", "Selamat pagi", "Доброе утро"),
        ("ha", "Ina kwana", "Доброе утро"),
        ("ff", "𞤀𞤣𞤤𞤢𞤥", "Адлам"),
        ("ff-Adlm", "𞤀𞤣𞤤𞤢𞤥", "Adlam"),
        ("ka", "ᲥᲐᲠᲗᲣᲚᲘ ქართული", "kartuli"),
        ("ur-Aran", "اردو", "Urdu"),
    ],
)
def test_the_script_is_that_of_the_language(language, good, bad):
    assert reasons([(good, "a"), (bad, "a")], languages=(language, "de"), script=True) == [None, "script"]


@pytest.mark.parametrize(
    ("language", "text"),
    [
        ("th", "วันนี้ฉันซื้อหนังสือ ๓ เล่มที่ https://a.org/bนะ"),
        ("lo", "ມື້ນີ້ຂ້ອຍຊື້ປຶ້ມ ໓ ຫົວ https://a.org/b."),
        ("km", "ថ្ងៃនេះខ្ញុំទិញសៀវភៅ៣ក្បាលនៅ https://a.org/b។"),
        ("my", "ဒီနေ့ ကျွန်တော် စာအုပ် ၃ အုပ် ဝယ်ခဲ့တယ် https://a.org/b။"),
        ("bo", "དེ་རིང་ངས་དཔེ་ཆ་ ༣ ཉོས་པ་ཡིན། https://a.org/b །"),
        ("ja", "今日は本を３冊ﾈｯﾄで買いました（https://a.org/b）。"),
        ("zh-TW", "今天下午我和我的妹妹一起在https://a.org/b買了3本書。"),
        ("ko", "오늘 https://a.org/b에서 책 3권을 샀어요."),
        ("hi-IN", "आज मैंने https://a.org/b से ३ किताबें खरीदीं।"),
        ("bn", "আজ আমি https://a.org/b থেকে ৩টি বই কিনেছি।"),
        ("ta", "இன்று நான் https://a.org/b இல் 3 புத்தகங்கள் வாங்கினேன்."),
        ("si", "අද මම https://a.org/b වලින් පොත් 3ක් මිලදී ගත්තා, ශ්\u200dරී."),
        ("am", "ዛሬ፡3፡መጻሕፍት፡ገዛሁ፡፡ https://a.org/b።"),
        ("ka", "დღეს https://a.org/b-ზე 3 წიგნი ვიყიდე."),
        ("ar", "اشتريت اليوم ٣ كتب من https://a.org/b، هل تصدق؟"),
        ("fas_Arab", "امروز ۳ کتاب از https://a.org/b می\u200cخرم."),
        ("he", "הַיּוֹם קָנִיתִי 3 סְפָרִים ב־https://a.org/b, צה״ל."),
        ("ur", "آج میں نے https://a.org/b سے ۳ کتابیں خریدیں۔"),
        ("el", "Σήμερα αγόρασα 3 βιβλία από το https://a.org/b;"),
        ("hy", "Այսօր https://a.org/b-ից 3 գիրք գնեցի և կարդացի։"),
        ("ff-Adlm", "𞤢𞤣𞤤𞤢𞤥 𞥓 𞤥𞤢𞤥 𞤢𞤣𞤤𞤢𞤥 https://a.org/b"),
        ("chr-Cher", "ᎣᏏᏲ ꭳꮟᏺ 3 ᏣᎳᎩ ᎤᏃᎯᏳᎯ https://a.org/b"),
        ("nqo-Nkoo", "ߒߞߏ ߒߞߏ ߃ ߒߞߏ ߒߞߏ ߒߞߏ https://a.org/b߹"),
        ("az", "Bu gün https://a.org/b saytından 3 kitab aldım."),
    ],
)
def test_good_text_of_each_script_is_kept(language, text):
    filters = {"min_words": 1, "max_words": 15, "max_word_length": 20, "max_ratio": 4, "min_alphabetic": 0.4}
    filters |= {"script": True, "copied": True, "same_numbers": True, "same_urls": True}
    pairs = [(text, "Today I bought 3 books from https://a.org/b.")]
    assert reasons(pairs, languages=(language, "en"), **filters) == [None]


def test_a_script_that_is_not_known():
    with pytest.raises(ValueError, match="the script of en-Dsrt is not known; write en-Latn, for example"):
        reasons([("𐐨𐐩𐐪", "a")], languages=("en-Dsrt", "de"), script=True)


def test_language_identification():
    pairs = [
        ("This is a sentence about the weather.", "Das ist ein Satz über das Wetter."),
        ("This is a sentence about the weather.", "Ceci est une phrase sur le temps qu'il fait."),
        ("Das ist ein Satz über das Wetter.", "Das ist ein Satz über das Wetter."),
        ("12", "?"),
        ("Hi.", "Hallo!"),  # too short to be sure
    ]
    found = reasons(pairs, languages=("en-US", "de"), language="py3langid")
    assert found == [None, "language", "language", None, None]
    with pytest.raises(UsageError, match="py3langid does not know tlh; it knows ace, "):
        reasons(pairs, languages=("tlh", "de"), language="py3langid")


def test_language_identification_without_its_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "py3langid", None)
    with pytest.raises(UsageError, match=r"py3langid, which is not installed; run `pip install 'mtrain\["):
        reasons([], language="py3langid")


def test_a_corpus_without_filters_may_have_any_language():
    train = [{"toy": "train"}, {"toy": "train", "source_lang": "nds", "filters": "off"}]
    keys = {"train": train, "validation": {"holdout": 1}, "filters": {"language": "py3langid"}}
    data = DataConfig(source_lang="en", target_lang="de", **keys)
    assert not BlockFilter(data).apply(block_of([("a", "b")]), 1).codes.any()


def test_long_lines():
    digits, words = "1.000" * 50_000 + "x", "a " * 200_000
    limits = {"max_words": 300_000, "same_numbers": True, "same_urls": True, "copied": True, "script": True}
    assert reasons([(digits, digits[:-1]), (words, words + "b")], **limits) == [None, None]
