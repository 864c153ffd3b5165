"""Windows of lines, and the parts of lines that are too long."""

from collections.abc import Iterator
from itertools import chain, count, islice
from pathlib import Path
from types import SimpleNamespace

import pytest

from mtrain import Translator
from mtrain.config.sections.decoding import DecodingConfig
from mtrain.config.sections.tokenizer import TokenizerConfig
from mtrain.decoding.decode import DecodingTask
from mtrain.decoding.join import join_texts
from mtrain.decoding.split import Splitter, windows
from mtrain.decoding.translation import Translation
from mtrain.errors import DataError, UsageError
from mtrain.tokenizer.learn import train_tokenizer
from mtrain.tokenizer.tokenizer import TagIds, Tokenizer
from tests.support.training import PAIRS

SOURCES = [source for source, _ in PAIRS]


def test_windows_are_bounded_by_lines_and_by_characters() -> None:
    assert [len(texts) for texts, _ in windows(["a"] * 10, None, 4)] == [4, 4, 2]
    stream = (text for text in ["a"] * 9000)
    assert [len(texts) for texts, _ in windows(stream, None, 4096)] == [256, 512, 1024, 2048, 4096, 1064]
    assert [len(texts) for texts, _ in windows(["a" * 400_000] * 7, None, 4096)] == [3, 3, 1]
    assert [len(texts) for texts, _ in windows(["a" * 400_000] * 7, None, 8192)] == [5, 2]
    assert list(windows([], None, 4)) == []


def test_windows_end_where_the_input_pauses_and_only_full_ones_grow() -> None:
    pauses = iter([True, True, *[False] * 600])
    found = [len(texts) for texts, _ in windows(iter(["a"] * 400), None, 4096, lambda _: next(pauses))]
    assert found == [1, 1, 256, 142]


def test_the_time_that_lines_have_waited_starts_with_each_window(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, waits = count(), list[float]()
    monkeypatch.setattr("mtrain.decoding.split.time", SimpleNamespace(monotonic=lambda: next(clock)))

    def paused(waited: float) -> bool:
        waits.append(waited)
        return False

    assert [len(texts) for texts, _ in windows(iter("abcdef"), None, 3, paused)] == [3, 3]
    assert waits == [1, 2, 1, 2]  # a full window ends without asking


@pytest.mark.parametrize("bad", ["lines", "prefixes"])
def test_an_error_comes_after_the_lines_before_it(bad: str) -> None:
    def broken() -> Iterator[str]:
        yield from "abc"
        raise DataError("line 4")

    lines, prefixes = (broken(), iter("abcd")) if bad == "lines" else (iter("abcd"), broken())
    found = windows(lines, prefixes, 2)
    assert [next(found), next(found)] == [(["a", "b"], ["a", "b"]), (["c"], ["c"])]
    with pytest.raises(DataError, match="line 4"):
        next(found)
    found = windows(iter("abc"), broken(), 4)  # the error is after the last prefix
    assert next(found) == (["a", "b", "c"], ["a", "b", "c"])
    with pytest.raises(DataError, match="line 4"):
        next(found)
    with pytest.raises(DataError, match="line 4"):  # at once if there are no lines before it
        next(windows(islice(broken(), 3, None), None, 2))


@pytest.mark.parametrize("longest", [9, 20, 63])
def test_parts_are_sentences_and_contain_every_token(translator: Translator, longest: int) -> None:
    tokenizer = translator.tokenizer
    text = [*SOURCES, "katze" * 30 + '!"', "Mr. Smith of the U. S. sleeps.", "Is it no... yes?", "It rains"]
    parts = Splitter(tokenizer, longest + 1, "en").split_line("  ".join(text))
    assert all(0 < len(part) <= longest for part in parts)
    sentences = tokenizer.encode_source(text)
    assert list(chain(*parts)) == list(chain(*sentences))
    whole = [ids for ids in sentences if len(ids) <= longest]
    assert [part for part in parts if part in whole] == whole
    cut = [part for part in parts if part not in whole]
    assert all(tokenizer.word_starts(part)[0] for part in cut)
    if longest == 63:
        assert len(cut) == 3 and max(map(len, cut)) == longest  # of one word of some 90 tokens
    [one, two] = Splitter(tokenizer, 64, "ja").split_line("猫が寝る。雨が降る！")
    assert [one, two] == tokenizer.encode_source(["猫が寝る。", "雨が降る！"])


@pytest.fixture(scope="module", params=["unigram", "bpe"])
def tagging(request, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer with symbols for two target languages and a placeholder."""
    folder: Path = tmp_path_factory.mktemp(request.param)
    config = TokenizerConfig(type=request.param, vocab_size=330, symbols=["<2de>", "<2fr>", "<polite>"])
    lines = [side for pair in PAIRS for side in pair]
    train_tokenizer(config, lambda: lines, lambda: lines, folder, seed=1)
    return Tokenizer(folder)


@pytest.mark.parametrize("tag", ["<2de>", "<2fr> <polite>", "<2fr><polite>"])
def test_a_tag_begins_each_part_of_a_line(tagging: Tokenizer, tag: str) -> None:
    parts = Splitter(tagging, 31, "en").split_line(f"{tag} It rains. The sun shines. A cat sleeps.")
    expected = [f"{tag} It rains.", f"{tag} The sun shines.", f"{tag} A cat sleeps."]
    assert [tagging.source.decode([ids])[0] for ids in parts] == expected
    assert parts == tagging.encode_source(expected)


@pytest.mark.parametrize("line", ["It rains <2de>. The sun shines.", "< 2de> It rains. The sun shines."])
def test_a_symbol_elsewhere_is_not_a_tag(tagging: Tokenizer, line: str) -> None:
    _, second = Splitter(tagging, 31, "en").split_line(line)
    assert tagging.source.decode([second]) == ["The sun shines."]


def test_parts_know_the_words_of_the_line_and_of_a_tag_in_it(tagging: Tokenizer) -> None:
    line = "<2fr> <polite> It rains.The sun  shines."
    [ids] = tagging.encode_source([line])
    first, second = Splitter(tagging, len(ids), "en", "sentences").parts_of([line], [], 0, True)
    assert (first.key, second.key) == ((0, 0), (0, 1))
    words = line.split()
    assert [sorted({word for word, _ in part.words}) for part in (first, second)] == [
        [0, 1, 2, 3],
        [0, 1, 3, 4, 5],
    ]
    for part in (first, second):
        assert len(part.words) == len(part.source) - 1
        for i, (word, _) in zip(part.source, part.words, strict=False):
            assert tagging.source.pieces[i].strip("▁") in words[word]
    tag = tagging.tag_ids("<2de>")
    [added] = Splitter(tagging, 300, "en", "long", TagIds(tag)).parts_of(["It rains."], [], 0, True)
    of_tag, of_text = added.words[: len(tag)], added.words[len(tag) :]
    assert list(of_tag) == [(-1, -1)] * len(tag) and set(of_text) == {(0, 1), (1, 2)}


def test_sentences_are_joined_by_the_rule_of_the_language_of_the_line(tagging: Tokenizer) -> None:
    """The default target language, Chinese, has no spaces between sentences."""
    lines = ["<2de> It rains. The sun shines.", "It rains. The sun shines."]
    splitter = Splitter(tagging, 300, "en", "sentences", TagIds(tagging.tag_ids("<2fr>")))
    task = DecodingTask(DecodingConfig(), splitter.parts_of(lines, [], 0), "zh")
    found = [
        [Translation(text, 0.0, 0.0, 1, True)]
        for text in ("Es regnet.", "Die Sonne scheint.", "雨。", "晴。")
    ]
    assert [each.text for each in join_texts(lines, task, found)] == [
        "Es regnet. Die Sonne scheint.",
        "雨。晴。",
    ]


def test_a_line_that_fits_is_split_only_in_sentences_mode(tagging: Tokenizer) -> None:
    lines = ["<2de> It rains. The sun shines.", "", "  ", "A cat sleeps", "A cat sleeps! Two? women. ..."]
    whole = Splitter(tagging, 300, "en").parts_of(lines, [], first=7)
    assert [part.line for part in whole] == [0, 3, 4]
    assert [part.source[:-1] for part in whole] == tagging.encode_source([lines[0], *lines[3:]])
    parts = Splitter(tagging, 300, "en", "sentences").parts_of(lines, [], first=7)
    texts = [
        "<2de> It rains.",
        "<2de> The sun shines.",
        "A cat sleeps",
        "A cat sleeps!",
        "Two?",
        "women.",
        "...",
    ]
    assert [part.source[:-1] for part in parts] == tagging.encode_source(texts)
    assert all(part.source[-1] == tagging.special.eos for part in parts)
    assert [part.line for part in parts] == [0, 0, 3, 4, 4, 4, 4]
    assert [part.key for part in parts] == [(7, 0), (7, 1), (10, 0), *((11, n) for n in range(4))]


@pytest.mark.parametrize(("mode", "longest"), [("sentences", 300), ("long", 16)])
def test_a_prefix_of_a_line_with_several_parts_is_an_error(tagging: Tokenizer, mode, longest: int) -> None:
    """The prefix may be longer than the translation of the first part."""
    splitter = Splitter(tagging, longest, "en", mode)
    lines = ["A cat.", " ", "It rains. The sun shines."]
    parts = splitter.parts_of(lines, ["Eine", "Es", ""], 0)
    assert [part.prefix for part in parts][:2] == [*tagging.encode_target(["Eine"]), []]
    message = "line 11 of the input has a prefix but is translated in [23] parts"
    with pytest.raises(DataError, match=message):
        splitter.parts_of(["A cat.\nA dog.", *lines[1:]], ["", "", "Es"], 7)


def test_a_prefix_that_leaves_no_position_is_an_error(tagging: Tokenizer) -> None:
    prefix = "Es regnet."
    tokens = len(tagging.encode_target([prefix])[0])
    [_, part] = Splitter(tagging, 300, "en", positions=tokens + 1).parts_of(["A.", "It."], ["", prefix], 0)
    assert len(part.prefix) == tokens
    message = f"line 9 of the input has a prefix of {tokens} tokens, but the model has only {tokens} "
    with pytest.raises(DataError, match=message):
        Splitter(tagging, 300, "en", positions=tokens).parts_of(["A.", "It."], ["", prefix], 7)


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer with language tags of both sides."""
    folder: Path = tmp_path_factory.mktemp("both")
    symbols = ["<en>", "<de>", "<2de>", "<2fr>", "<polite>"]
    config = TokenizerConfig(vocab_size=330, symbols=symbols)
    lines = [side for pair in PAIRS for side in pair]
    train_tokenizer(config, lambda: lines, lambda: lines, folder, seed=1)
    return Tokenizer(folder)


@pytest.mark.parametrize(
    ("tag", "given", "expected"),
    [
        ("<2fr>", "It rains.", "<2fr> It rains."),
        ("<2fr>", "<2fr> It rains.", "<2fr> It rains."),
        ("<2fr>", " <2fr>It rains.", "<2fr> It rains."),
        ("<2fr>", "<2de> It rains.", "<2de> It rains."),
        ("<2fr>", "<2de> <polite> It rains.", "<2de> <polite> It rains."),
        ("<2fr>", "<polite> It rains.", "<2fr> <polite> It rains."),
        ("<2fr>", "It <2de> rains.", "<2fr> It <2de> rains."),
        ("<2fr>", "<2 years> ago it rains.", "<2fr> <2 years> ago it rains."),  # no tag of the model
        ("<en> <2fr>", "It rains.", "<en> <2fr> It rains."),
        ("<en> <2fr>", "<2de> It rains.", "<en> <2de> It rains."),
        ("<en> <2fr>", "<de> <2fr> It rains.", "<de> <2fr> It rains."),
        ("<en> <2fr>", "<en> <2fr> It rains.", "<en> <2fr> It rains."),
        ("", "<2fr> It rains.", "<2fr> It rains."),
        ("<2fr>", "<2de> It rains.\nIt rains.", "<2de> It rains.\n<2fr> It rains."),  # each line has its own
        ("<2fr>", "It rains.\n<2de> It rains.", "<2fr> It rains.\n<2de> It rains."),
        ("", "<2de> <polite> It rains.\n\nIt rains.", "<2de> <polite> It rains.\nIt rains."),
    ],
)
def test_a_line_has_one_language_tag(both: Tokenizer, tag: str, given: str, expected: str) -> None:
    splitter = Splitter(both, 100, "en", "long", TagIds(both.tag_ids(tag)))
    parts = splitter.parts_of([given], [], 0)
    assert [part.source[:-1] for part in parts] == both.encode_source(expected.split("\n"))
    if "\n" not in given:
        eos = both.special.eos
        assert splitter.encode([given]) == [[*both.encode_source([expected])[0], eos]]


def test_a_line_of_only_a_tag_is_empty(both: Tokenizer) -> None:
    assert not Splitter(both, 100, "en", "long", TagIds(both.tag_ids("<2fr>"))).parts_of([" <2fr> "], [], 0)


def test_a_tag_that_contradicts_a_chosen_one_is_an_error(both: Tokenizer) -> None:
    splitter = Splitter(both, 100, "en", "long", TagIds(both.tag_ids("<en> <2fr>")), chosen=(True, True))
    for same in ("<2fr> It rains.", "<en> <2fr> It rains.", "It rains."):
        [part] = splitter.parts_of([same], [], 0)
        assert part.source[:-1] == both.encode_source(["<en> <2fr> It rains."])[0]
    for other, found in (("<2de> A cat.", "<2de>"), ("<de> <2fr> A cat.", "<de> <2fr>")):
        message = f"line 9 begins with {found}, but <en> <2fr> was chosen; remove the tag of the line"
        with pytest.raises(UsageError, match=message):
            splitter.parts_of(["It rains.", f"It rains.\n{other}"], [], 6)
        with pytest.raises(UsageError, match="line 2 begins with"):
            splitter.encode(["It rains.", other])


def test_the_longest_source_of_a_model_with_codes_follows_its_longest_translation() -> None:
    """NLLB-200 takes 1,024 tokens, but `generate` ends after 200."""
    fixed = DecodingConfig(max_length_ratio=0, max_length_offset=198)
    assert [fixed.longest_source(1024, tags) for tags in ("codes", "codes_last", "none")] == [198, 198, 1024]
    assert DecodingConfig().longest_source(1024, "codes") == 1024


def test_a_tag_may_name_another_language_on_the_side_that_is_not_chosen(both: Tokenizer) -> None:
    tags = TagIds(both.tag_ids("<en> <2fr>"))
    only_source = Splitter(both, 100, "en", "long", tags, chosen=(True, False))
    only_target = Splitter(both, 100, "en", "long", tags, chosen=(False, True))
    lines = {"<2de> A cat.": only_source, "<en> <2de> A cat.": only_source, "<de> <2fr> A cat.": only_target}
    for line, splitter in lines.items():
        expected = line if line.startswith(("<en>", "<de>")) else f"<en> {line}"
        assert splitter.encode([line])[0][:-1] == both.encode_source([expected])[0]
        other = only_target if splitter is only_source else only_source
        with pytest.raises(UsageError, match="but <en> <2fr> was chosen"):
            other.encode([line])
    one_tag = Splitter(both, 100, "en", "long", TagIds(both.tag_ids("<2fr>")), chosen=(True, False))
    assert one_tag.encode(["<2de> A cat."])[0][:-1] == both.encode_source(["<2de> A cat."])[0]
    with pytest.raises(UsageError, match="but <2fr> was chosen"):
        one_tag._replace(chosen=(False, True)).encode(["<2de> A cat."])


@pytest.mark.parametrize(
    ("language", "text", "count"),
    [
        ("en", "Prof. Smith met Dr. Jones at 5 p.m. yesterday. They talked, e.g. about 3.5 dogs! Yes.", 3),
        ("de", "Am 3. Oktober kam Dr. Meier z. B. nach Bonn. Es regnete.", 2),
        ("de_AT", "Es ist Nr. 5. Das ist ca. 10 km weit.", 2),
        ("fr", "Il dort. Il pleut !", 2),
        ("zh-CN", "猫在睡觉。下雨了！", 2),
        ("hi", "यह एक है। यह दो है।", 2),
        ("hin_Deva", "यह एक है।यह दो है।", 2),
        ("my", "သူ အိပ်သည်။သူ စားသည်။", 2),
        ("km", "ខ្ញុំទៅផ្សារ។ម្តាយទិញ «ផ្លែឈើ។» គេមិនយល់ទេ៕", 3),
        ("khm_Khmr", "ផ្លែឈើ បន្លែ ។ល។ ខ្ញុំទៅផ្សារ។", 2),
        ("am", "እኔ ወደ ቤት እሄዳለሁ።እሱ ይተኛል። እንዴት ነህ፧ ጥሩ።", 4),
        ("ur-PK", "میں گھر جاتا ہوں۔وہ سوتا ہے۔ کیا؟ ہاں۔", 4),
        ("hy", "Ես գնում եմ տուն։ Նա քնած է։", 2),
        ("und", "One. Two.", 2),
        ("en", "Take vitamin C\u00a0. It helps\u3000.", 2),
        ("ja", "C\u202f.", 1),
        ("en", "[X0X]It rains.[X1X] <b>It snows.</b> Yes.", 3),
        ("en", "<p>It rains.</p>", 1),
        ("zh", "[X0X]猫在睡觉。[X1X]下雨了！", 2),
    ],
)
def test_sentences_end_as_the_language_ends_them(translator: Translator, language, text, count) -> None:
    parts = Splitter(translator.tokenizer, 300, language, "sentences").parts_of([text], [], 0)
    assert len(parts) == count


def test_a_long_sentence_does_not_divide_the_next_one(translator: Translator) -> None:
    text = "a " * 1700 + "end. " + "It rains. " * 200
    splitter = Splitter(translator.tokenizer, 9000, "en", "sentences")
    assert len(splitter.parts_of([text], [], 0)) == 201


def test_a_line_of_symbols_is_a_part(tagging: Tokenizer) -> None:
    for mode in ("long", "sentences"):
        parts = Splitter(tagging, 31, "en", mode).parts_of(["<polite>", "It rains."], [], 0, alignments=True)
        assert [part.source[:-1] for part in parts] == tagging.encode_source(["<polite>", "It rains."])


def test_long_texts_have_the_sentences_of_short_ones(translator: Translator) -> None:
    """Their time is linear; sentencex alone would take seconds."""
    splitter = Splitter(translator.tokenizer, 300, "zh", "sentences")
    for text in ("猫在睡觉。下雨了！", "«One. Two» Three. "):
        few, many = (len(splitter.parts_of([count * text], [], 0)) for count in (10, 10_000))
        assert many == 1_000 * few


def test_a_long_text_is_segmented_in_blocks(translator: Translator) -> None:
    for text in ("word " * 5000, "x" * 25_000):
        parts = Splitter(translator.tokenizer, 100, "en").split_line(text)
        assert max(map(len, parts)) == 99
        [joined] = translator.tokenizer.source.decode([list(chain(*parts))])
        assert joined.replace(" ", "") == text.replace(" ", "")
