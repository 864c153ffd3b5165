"""The page that shows translations side by side."""

from collections import Counter

import pytest

from mtrain.config.languages import Direction
from mtrain.evaluation.evaluate import Output
from mtrain.evaluation.evaluate import TestSet as Sentences
from mtrain.evaluation.metrics import make_metrics
from mtrain.evaluation.results import SetResult, score_systems
from mtrain.report import comparison
from mtrain.report.comparison import comparison_page
from tests.support.html import Elements

pytestmark = pytest.mark.usefixtures("few_trials")

REFERENCES = ["A <dog> runs.", "A cat & a bird sleep.", "Nobody is here.", "It rains."]
SYSTEMS = {
    "old <model>": ["A <dog> runs.", "A cat & a dog sleep.", "Somebody was there", "It rains."],
    "new": ["A <dog> walks.", "A cat & a bird sleep.", "Nobody was here.", "It rains."],
}


def result_of(systems: dict[str, list[str]], metrics: list[str], sources: list[str]) -> SetResult:
    outputs = {name: Output(texts, None) for name, texts in systems.items()}
    test = Sentences("set", sources, [REFERENCES])
    return score_systems(test, outputs, make_metrics(metrics), by_length=False, by_sentence=True)


def page_of(names: list[str], sources: list[str] | None = None, sets: int = 1) -> str:
    return comparison_page([result_of(SYSTEMS, names, sources or [])] * sets)


def test_sentences_are_sorted_by_the_difference_of_their_scores():
    elements = Elements(page_of(["chrf", "bleu"]))
    lines = [text.partition(":")[0] for text in elements.texts["h4"]]
    gains = [float(text.split()[-1]) for text in elements.texts["h4"]]
    assert sorted(lines) == ["Line 1", "Line 2", "Line 3"]  # line 4 is the same in both
    assert [abs(gain) for gain in gains] == sorted((abs(gain) for gain in gains), reverse=True)
    kinds = {line: article["class"] for line, article in zip(lines, elements.of("article"), strict=True)}
    assert kinds == {"Line 1": "worse", "Line 2": "better", "Line 3": "better"}


def test_a_lower_ter_is_better():
    elements = Elements(page_of(["ter"]))
    kinds = {
        text[:6]: article["class"]
        for text, article in zip(elements.texts["h4"], elements.of("article"), strict=True)
    }
    assert kinds == {"Line 1": "worse", "Line 2": "better", "Line 3": "better"}


def test_words_that_differ_are_marked():
    elements = Elements(page_of(["chrf"]))
    assert {"runs", "dog"} <= {*elements.texts["del"]} and {"walks", "bird"} <= {*elements.texts["ins"]}


def test_each_text_has_its_own_direction():
    sources = ["هل يعمل iPhone؟", "b", "c", "d"]
    elements = Elements(page_of(["bleu"], sources))
    directions = [each["dir"] for each in elements.of("p") if "dir" in each]
    assert directions.count("rtl") == 1 and len(directions) == 3 * 4


def test_each_text_has_its_own_language():
    """That of a set with a direction of its own is not the one of the model."""
    plain = result_of(SYSTEMS, ["bleu"], ["a", "b", "c", "d"])
    directed = plain._replace(test=plain.test._replace(direction=Direction("cs", "de_AT")))
    texts = [each for each in Elements(comparison_page([plain, directed], "fr")).of("p") if "dir" in each]
    languages = Counter(each.get("lang") for each in texts)
    assert languages == {None: 3, "fr": 9, "cs": 3, "de-AT": 9}


def test_text_is_escaped():
    page = page_of(["bleu"], ["<script>alert(1)</script>", "a", "b", "c"])
    assert "<script" not in page and "<dog" not in page and "<model" not in page
    assert "&lt;script&gt;alert(1)" in page and "old &lt;model&gt;" in page and "&lt;dog&gt;" in page


def test_the_page_needs_no_network_and_has_a_structure_that_screen_readers_use():
    page = page_of(["bleu", "chrf"], sets=2)
    elements = Elements(page)
    assert "http" not in page and not elements.of("script") and not elements.of("link")
    assert [tag for tag in ("h1", "main", "nav", "title") if len(elements.of(tag)) != 1] == []
    assert len(elements.of("table")) == len(elements.of("caption")) == 4
    assert all("scope" in cell for cell in elements.of("th"))
    assert elements.of("html")[0]["lang"] == "en"
    ids = [attributes["id"] for _, attributes in elements.found if "id" in attributes]
    assert len(ids) == len({*ids})
    links = [link["href"] for link in elements.of("a")]
    assert all(link is not None and link.removeprefix("#") in ids for link in links)


@pytest.mark.parametrize(
    ("names", "shown"),
    [
        (["runs/old", "runs/new"], "new compared with old"),
        (["/a/b/old.de", "/a/c/new.de"], "c/new.de compared with b/old.de"),
        (["/model", "/runs/b"], "runs/b compared with model"),
        (["old.de", "runs/new"], "runs/new compared with old.de"),
        (["runs/old", "/runs/new"], "/runs/new compared with runs/old"),
        (["/old", "<stdin>"], "&lt;stdin&gt; compared with /old"),
        (["runs/a/b", "runs/a"], "a compared with a/b"),
        (["caf\udce9.de", "b.de"], "b.de compared with caf?.de"),  # a file name that is not valid UTF-8
    ],
)
def test_systems_are_named_without_their_common_folder(names, shown):
    systems = dict(zip(names, SYSTEMS.values(), strict=True))
    page = comparison_page([result_of(systems, ["chrf"], [])])
    assert f"<h1>{shown}</h1>" in page


def test_the_largest_differences_of_a_large_test_set_are_shown(monkeypatch):
    monkeypatch.setattr(comparison, "SHOWN", 2)
    page = page_of(["chrf"])
    assert (
        page.count("<article") == 2 and "Of the others, the 2 with the largest differences are shown." in page
    )
