"""The page about runs."""

import json
import re
import shutil
from itertools import pairwise

import pytest

from mtrain.decoding.translate import Translator
from mtrain.errors import UsageError
from mtrain.evaluation.metrics import make_metrics
from mtrain.report.report import report_page
from mtrain.runs.results import score_test_sets
from tests.support.html import Elements
from tests.support.training import read_metrics

SECTIONS = [
    "Summary",
    "Curves",
    "Settings",
    "Data and tokenizer",
    "Validation samples",
    "BLEU by length",
    "Best and worst sentences",
    "Attention",
]


@pytest.fixture
def other(run_dir, tmp_path):
    """A copy of the run with another dropout."""
    other = shutil.copytree(run_dir, tmp_path / "other <run>")
    text = (other / "config.yaml").read_text()
    (other / "config.yaml").write_text(re.sub(r"  dropout: \S+", "  dropout: 0.25", text))
    return other


def curve_data(page):
    return json.loads(re.findall(r'id="curve-data">(.*?)</script>', page)[0])


def test_the_page_of_two_runs(run_dir, other):
    page = report_page([run_dir, other])
    elements = Elements(page)
    assert elements.texts["h2"] == SECTIONS
    assert "<run>" not in page and "other &lt;run&gt;" in page
    assert not re.findall(r'(?:src|href)="(?!#)', page) and not elements.of("link")  # no network
    rows = re.findall(
        r'<tr><th scope="row">((?:[^<]|<wbr>)*)</th><td>([^<]*)</td><td>([^<]*)</td></tr>', page
    )
    assert ("model.dropout", "0.0", "0.25") in [(key.replace("<wbr>", ""), *values) for key, *values in rows]
    charts = curve_data(page)["charts"]
    places = [place["data-chart"] for place in elements.of("div") if "data-chart" in place]
    assert sorted(places) == sorted(charts) and {"loss", "bleu"} <= charts.keys()
    assert [line["label"] for line in charts["loss"]["series"]] == ["by-heart", "other <run>"]
    assert "Zwei Frauen reden." in page and "LEAK" in page


def test_the_page_has_a_structure_that_screen_readers_use(run_dir):
    elements = Elements(report_page([run_dir]))
    assert [tag for tag in ("h1", "main", "nav", "title") if len(elements.of(tag)) != 1] == []
    assert len(elements.of("table")) == len(elements.of("caption"))
    assert all("scope" in cell for cell in elements.of("th"))
    ids = [attributes["id"] for _, attributes in elements.found if "id" in attributes]
    assert len(ids) == len({*ids})
    assert all(str(link["href"]).removeprefix("#") in ids for link in elements.of("a"))
    charts = [place for place in elements.of("div") if "data-chart" in place]
    assert all(place["tabindex"] == "0" and place["aria-label"] for place in charts)
    assert all(canvas["aria-label"] for canvas in elements.of("canvas"))
    levels = [int(tag[1]) for tag, _ in elements.found if re.fullmatch("h[1-6]", tag)]
    assert all(after <= before + 1 for before, after in pairwise(levels))


def test_the_sentences_whose_attention_is_drawn_can_be_given(run_dir):
    page = report_page([run_dir], ["The sun rains."])
    assert page.count("data-attention>") == 1 and '<h3 dir="ltr" lang="en">The sun rains.</h3>' in page


def test_attention_is_drawn_of_short_sentences_with_or_without_spaces(run_dir, tmp_path):
    run = shutil.copytree(run_dir, tmp_path / "run")
    sources = ["猫在睡觉" * 20, "It rains all day. " * 9, "猫在睡觉", "It rains.", "雨", "Snow."]
    sentences = [{"source": source, "reference": "x", "translation": "y"} for source in sources]
    (run / "samples.jsonl").write_text(json.dumps({"step": 1, "sentences": sentences}) + "\n")
    drawn = re.findall(r'data-attention><h3 dir="ltr" lang="en">(.*?)</h3>', report_page([run]))
    assert drawn == sources[2:5]


def test_each_target_language_of_a_model_with_codes_has_a_column(run_dir, tmp_path):
    run = shutil.copytree(run_dir, tmp_path / "run")
    config = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(config.replace("  language_tags: none", "  language_tags: codes"))
    sentences = [
        {"source": f"to {language}", "reference": "x", "translation": "y", "target_lang": language}
        for language in ("de", "fr")
    ]
    for name in ("samples.jsonl", "best_validation.json"):
        (run / name).write_text(json.dumps({"step": 1, "sentences": sentences}) + "\n")
    page = report_page([run])
    assert '<th scope="col">run, de</th>' in page and '<th scope="col">run, fr</th>' in page
    assert re.findall(r'data-attention><h3 dir="ltr" lang="en">(.*?)</h3>', page) == ["to de"]


def test_a_report_needs_no_package_that_divides_text_into_words(run_dir, monkeypatch):
    """As for runs into Japanese."""

    def make(names, language, *given):
        if "bleu" in names:
            raise UsageError("BLEU for ja needs sacrebleu[ja]")
        return make_metrics(names, language, *given)

    monkeypatch.setattr("mtrain.report.data_sections.make_metrics", make)
    assert "<p>by-heart: BLEU for ja needs sacrebleu[ja]</p>" in report_page([run_dir])


def test_an_old_run_has_a_page_that_names_what_is_missing(run_dir, tmp_path):
    old = tmp_path / "old"
    old.mkdir()
    for name in ("config.yaml", "metrics.jsonl"):
        shutil.copy(run_dir / name, old / name)
    page = report_page([old])
    assert Elements(page).texts["h2"] == SECTIONS[:4]
    assert "Not recorded by old: the findings of the data check (check.json), validation samples" in page
    for name in ("model", "data"):  # but without checkpoints, which take much space
        shutil.copytree(run_dir / name, old / name)
    assert report_page([old]).count("data-attention>") == 3  # of the first pairs in the data folder
    both = report_page([old, run_dir])
    assert Elements(both).texts["h2"] == SECTIONS


def test_the_summary_counts_the_steps_after_the_last_logged_one(run_dir, tmp_path):
    run = shutil.copytree(run_dir, tmp_path / "run")
    lines = [line for line in read_metrics(run) if "validation" in line or line["step"] <= 100]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert max(line["step"] for line in lines if "loss" in line) == 100
    row = re.search("<caption>Runs, .*?</table>", report_page([run]), re.DOTALL)[0]
    assert ">200<" in row and ">100<" not in row


def test_the_page_of_a_long_run_is_small(run_dir, tmp_path):
    run = shutil.copytree(run_dir, tmp_path / "long")
    training = json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[0])
    validation = {"nll": 1.23456789, "perplexity": 3.456789, "bleu": 31.23456789, "chrf": 56.789}
    sample = json.loads((run_dir / "samples.jsonl").read_text().splitlines()[0])
    sentences = [{**each, "translation": "word " * 40} for each in sample["sentences"]]
    steps = range(10, 100_001, 10)
    with (run / "metrics.jsonl").open("w") as metrics, (run / "samples.jsonl").open("w") as samples:
        for step in steps:
            line = {**training, "step": step, "loss": 1 / step, "nll": 2 / step, "target_tokens": 3771 * step}
            metrics.write(json.dumps({**line, "seconds": step * 0.1234567}) + "\n")
            if step % 500 == 0:
                metrics.write(
                    json.dumps({"step": step, "validation": validation, "seconds": step / 8}) + "\n"
                )
                samples.write(json.dumps({"step": step, "sentences": sentences}) + "\n")
    page = report_page([run])
    assert len(page.encode()) < 3_000_000
    data = curve_data(page)
    assert data["axes"][data["charts"]["loss"]["series"][0]["axis"]]["steps"][-1] == 100_000
    rows = re.findall(r'<th scope="row">([\d,]+)</th><td dir="ltr" lang="de">', page)
    assert rows[0] == "500" and "100,000" in rows and len({*rows}) == 10


def test_a_run_that_is_given_twice_is_an_error(run_dir):
    with pytest.raises(UsageError, match="given twice"):
        report_page([run_dir, run_dir])


def test_recorded_test_scores_are_shown_with_their_signatures(run_dir, tmp_path):
    run = shutil.copytree(run_dir, tmp_path / "run")
    with Translator.load(run, "cpu") as translator:
        [test] = score_test_sets(run, translator)
    page = report_page([run])
    assert "run, seen" in page
    for score, title in zip(test.scores, ("BLEU", "chrF2"), strict=True):
        assert f"<td>{score.score:.2f}</td>" in page and f"{title}|{score.signature}" in page
    (run / "model" / "manifest.json").write_text("{}")  # a better model has been published since
    assert "run, seen" not in report_page([run])
    record = json.loads((run / "test_scores.json").read_text())
    del record["model"]  # as earlier versions wrote it
    (run / "test_scores.json").write_text(json.dumps(record))
    assert "run, seen" in report_page([run])


def test_a_run_that_diverged_has_a_page(run_dir, tmp_path):
    run = shutil.copytree(run_dir, tmp_path / "run")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    damaged = [{**line, "loss": "NaN", "nll": "NaN", "grad_norm": "Infinity"} for line in lines[:-1]]
    lines = [line if "validation" in line else other for line, other in zip(lines, damaged, strict=False)]
    lines = [{**line, "skipped_steps": 3} for line in lines]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = report_page([run])
    charts = curve_data(page)["charts"]
    assert "loss" not in charts and "norm" not in charts and "rate" in charts  # no curve without values
    assert "run skipped 3 step(s), whose loss or gradient was not finite." in page
    assert "not finite</td>" not in page and "nan</td>" not in page
    training = [line for line in lines if "loss" in line]
    training[0]["loss"] = 1.5
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in training))
    page = report_page([run])
    assert curve_data(page)["charts"]["loss"]["series"][0]["y"][:2] == [1.5, None]
    assert "<td>not finite</td>" in page


def test_more_runs_than_colors_have_other_lines(run_dir, tmp_path):
    """The page of ten runs names the number of each, from which colors and dashes follow."""
    runs = []
    for number in range(10):
        (run := tmp_path / f"run{number}").mkdir()
        for name in ("config.yaml", "metrics.jsonl"):
            shutil.copy(run_dir / name, run / name)
        runs.append(run)
    series = curve_data(report_page(runs))["charts"]["nll"]["series"]
    assert [(line["run"], line["dotted"]) for line in series] == [
        (number, dotted) for number in range(10) for dotted in (True, False)
    ]


@pytest.mark.parametrize(
    "change",
    [{"lengths": [[1], [2]]}, {"segmentation": {"unknown": [0]}}, {"sets": 3}, {"warnings": None}, None],
)
def test_damaged_findings_are_left_out_with_one_warning(run_dir, tmp_path, caplog, change):
    run = shutil.copytree(run_dir, tmp_path / "run")
    file = run / "data/check.json"
    text = file.read_text()
    record = json.loads(text)
    for key, value in (change or {}).items():
        record[key] = {**record[key], **value} if isinstance(value, dict) else value
    file.write_text(text[:-9] if change is None else json.dumps(record))
    page = report_page([run])
    assert "Not recorded by run: the findings of the data check (check.json)." in page
    [warning] = [record.getMessage() for record in caplog.records]
    assert warning == f"{file}: damaged; the report will lack the findings of the data check"


def test_of_equally_bad_or_good_translations_the_longest_come_first(other):
    def sentence(words: int, right: bool) -> dict[str, str]:
        reference = " ".join(["ja"] * words)
        return {
            "source": f"{words} {right}",
            "reference": reference,
            "translation": reference if right else "x",
        }

    sentences = [sentence(words, right) for right in (False, True) for words in (3, 9, 1, 7, 4, 8, 2, 6)]
    (other / "best_validation.json").write_text(json.dumps({"step": 1, "sentences": sentences}))
    section = report_page([other]).partition("<h3>Worst</h3>")[2].partition("</section>")[0]
    expected = [f"{words} {right}" for right in (False, True) for words in (9, 8, 7, 6, 4)]
    assert re.findall(r">(\d (?:True|False))<", section) == expected


def test_a_damaged_model_is_left_out_with_a_warning(run_dir, other, caplog):
    """The curves of the runs are what is needed most after damage."""
    (other / "model/model.safetensors").write_bytes(b"")
    page = report_page([run_dir, other])
    assert "model.safetensors: damaged" in caplog.text
    assert "the report lacks its attention" in caplog.text
    assert "Not recorded by other &lt;run&gt;: attention of the model, which is damaged" in page
    assert page.count("<summary>by-heart</summary>") == page.count("<summary>other &lt;run&gt;</summary>") + 1
