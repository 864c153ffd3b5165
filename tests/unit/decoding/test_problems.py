"""Translations that are probably wrong."""

import pytest

from mtrain.decoding.problems import ProblemCounter, count_problems, find_problem

LONG = "A man in a blue shirt is standing on a ladder and cleans a window."


@pytest.mark.parametrize(
    ("source", "translation"),
    [
        ("A dog.", "Ein Hund."),
        ("", ""),
        (" ", ""),
        ("Wait", "Warte ..."),
        ("OK", "In Ordnung, einverstanden"),
        ("no, no, no, no, no", "nein, nein, nein, nein, nein"),
        ("ha ha ha", "hahaha"),
        ("It costs 1000000000000.", "Es kostet 1000000000000."),
        ("very very very good", "sehr sehr sehr gut"),
        ("Section 4 ..............", "Abschnitt 4 .............."),
        (
            "我们在北京的一家餐馆里吃了一顿非常好的晚饭",
            "We had a very good dinner in a restaurant in Beijing.",
        ),
        (
            "We had a very good dinner in a restaurant in Beijing.",
            "पेइचिंग के एक रेस्तराँ में हमने बहुत अच्छा खाना खाया।",
        ),
        (LONG, "Ein Mann reinigt ein Fenster."),
        ("\u200b", ""),
    ],
)
def test_usual_translations_have_no_problem(source: str, translation: str):
    assert find_problem(source, translation) is None


@pytest.mark.parametrize(
    ("translation", "problem"),
    [
        ("", "empty"),
        (" \t", "empty"),
        ("Ein \ufffd Mann", "broken_characters"),
        ("Ein Mann Mann Mann Mann Mann", "looping"),
        ("Ein Mann, ein Mann, ein Mann, ein Mann, ein Mann.", "looping"),
        ("Ein Mann steht auf einer Leiter, auf einer Leiter, auf einer Leiter, auf einer Leiter", "looping"),
        ("Er ist schönönönönönön", "looping"),
        ("Ein Mann ................", "looping"),
        ("Es sind 5000 5000 5000 5000 5000", "looping"),  # each of which ends with a repetition
        ("Er lacht: hahaha! hahaha! hahaha! hahaha!", "looping"),
        ("男男男男男男男男男男", "looping"),
        ("वह वह वह वह वह वह।", "looping"),
        ("هو هو هو هو هو هو؟»", "looping"),
        ("Ein Mann MANN Mann mann mann!", "looping"),
        (f"Ein {'Mann in einem sehr blauen Hemd reinigt das Fenster und ' * 5}", "looping"),
        ("Ja.", "extreme_length"),
        (" ".join(f"Wort{n}" for n in range(60)), "extreme_length"),
    ],
)
def test_problems_are_found(translation: str, problem: str):
    assert find_problem(LONG, translation) == problem


@pytest.mark.parametrize("text", ["Es sind 1.000.000.000.", "EUR 1,000,000,000", "Nummer 555 555 555"])
def test_numbers_are_no_loops(text: str):
    assert find_problem("There is one billion.", text) is None


def test_a_translation_that_was_cut_is_looping():
    assert find_problem("A dog.", "Ein Hund.", finished=False) == "looping"
    assert find_problem("A dog.", "", finished=False) == "empty"


def test_a_replacement_character_of_the_source_is_no_problem():
    assert find_problem("A dog \ufffd.", "Ein Hund \ufffd.") is None


def test_a_text_of_any_length_is_examined_quickly():
    for text in ("ab" * 50_000, "word " * 50_000, "".join(map(chr, range(0x4E00, 0x9FA5))) * 3):
        find_problem(text, text)
    assert find_problem("a dog", "x" + "ab" * 200_000) == "looping"


def test_the_summary_names_the_first_lines_of_each_problem():
    counter = ProblemCounter()
    assert counter.summary(3) is None
    for line in range(1, 2001):
        counter.add(
            line, LONG, "Ja." if line > 1990 else "Ein Mann steht auf einer Leiter und reinigt etwas."
        )
    counter.add(2001, LONG, "")
    assert counter.as_dict() == {"empty": 1, "looping": 0, "extreme_length": 10, "broken_characters": 0}
    assert counter.summary(2001) == (
        "11 of 2,001 translations may be wrong: 1 empty (line 2,001), "
        "10 of extreme length (lines 1,991, 1,992, 1,993, 1,994, 1,995, ...)"
    )
    one = ProblemCounter()
    one.add(1, LONG, "cut", finished=False)
    assert one.summary(1) == (
        "1 of 1 translations may be wrong: 1 looping or cut at the maximum length (line 1)"
    )


def test_problems_of_texts_in_files_are_counted():
    assert count_problems([LONG] * 3, ["", "Ein Hund Hund Hund Hund Hund", "Ja."]) == {
        "empty": 1,
        "looping": 1,
        "extreme_length": 1,
        "broken_characters": 0,
    }
