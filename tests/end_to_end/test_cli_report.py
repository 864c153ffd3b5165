"""`mtrain report` and `mtrain translate --attention`, and their pages in a browser."""

import json
import re
import shutil
from pathlib import Path

import pytest

from tests.support.cli import one_line

WIDTHS = (390, 1400)
HALF = 100  # steps of the second run of the page


def test_report_writes_a_page_and_prints_its_path(mtrain, run_dir, tmp_path):
    file = tmp_path / "page.html"
    code, out, err = mtrain("report", run_dir, "-o", file, "--sentence", "It rains.")
    assert (code, out) == (0, f"{file}\n") and f"open it in a browser: {file}\n" in err
    page = file.read_text(encoding="utf-8")
    assert page.startswith("<!DOCTYPE html>") and "Training of by-heart" in page
    code, out, _ = mtrain("report", run_dir, "-o", "/dev/stdout", "--sentence", "It rains.")
    assert code == 0 and out == page


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["report", "nowhere"], 4, "nowhere: no such run folder"),
        (["report", "{run}/model"], 4, "not a run folder: it has no config.yaml or no metrics.jsonl"),
        (["report", "{run}", "{run}"], 2, "given twice"),
        (["report", "{run}", "-o", "nowhere/page.html"], 6, "no such folder"),
        (["report", "{run}", "--set", "decoding.beam_size=0"], 2, "decoding.beam_size"),
        (["report", "{run}", "--set", "model.heads=2"], 2, "only decoding.* can be set"),
        (["report"], 2, "Missing argument 'RUN'"),
        (["translate", "{run}", "-i", "{corpus}/train.en", "--attention", "a.html"], 2, "given as TEXT"),
        (["translate", "{run}", *["Hi"] * 21, "--attention", "a.html"], 2, "at most 20 sentences"),
        (["translate", "{run}", "Hi", "--attention", "nowhere/a.html"], 6, "no such folder"),
        (["translate", "{run}", "Hi", "--attention", "a", "-o", "a"], 2, "this is also the output file"),
    ],
)
def test_mistakes(mtrain, run_dir, corpus, tmp_path, monkeypatch, arguments, code, message):
    monkeypatch.chdir(tmp_path)
    found = mtrain(*(text.format(run=run_dir, corpus=corpus) for text in arguments), "--device", "cpu")
    assert found[:2] == (code, "") and message in one_line(found[2])


def test_translate_draws_the_attention_of_its_translations(mtrain, run_dir, tmp_path):
    file, prefixes = tmp_path / "page.html", tmp_path / "prefixes"
    prefixes.write_text("Der\n\n")
    sentences = ["It rains.", "The sun shines."]
    arguments = ("--attention", file, "--prefix", prefixes, "--device", "cpu")
    code, out, _ = mtrain("translate", run_dir, *sentences, *arguments)
    page = file.read_text(encoding="utf-8")
    assert code == 0 and out.startswith("Der")
    for text in (*sentences, *out.splitlines()):
        assert f">{text}</" in page


def open_page(browser, file: Path, width: int, scheme: str) -> None:
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    feature = {"name": "prefers-color-scheme", "value": scheme}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
    browser.get(file.as_uri())
    browser.execute_async_script("setTimeout(arguments[0], 500)")


@pytest.fixture(scope="module")
def page(run_dir, tmp_path_factory):
    from mtrain.report.report import report_page

    folder = tmp_path_factory.mktemp("report")
    file, other = folder / "page.html", shutil.copytree(run_dir, folder / "other")
    lines = (other / "metrics.jsonl").read_text().splitlines(keepends=True)
    half = [line for line in lines if json.loads(line)["step"] <= HALF]
    (other / "metrics.jsonl").write_text("".join(half))  # as of a run that ended before
    file.write_text(report_page([run_dir, other], ["It rains."]), encoding="utf-8")
    return file


@pytest.mark.slow
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_browser_draws_every_chart_without_errors(browser, page, width, scheme):
    open_page(browser, page, width, scheme)
    assert browser.get_log("browser") == []
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    drawn = browser.execute_script(
        """return [...document.querySelectorAll("canvas")].filter(c => c.offsetParent).map(c => {
          const pixels = c.getContext("2d").getImageData(0, 0, c.width, c.height).data;
          return [c.width > 0 && pixels.some(x => x > 0), c.getBoundingClientRect().right]; })"""
    )
    charts = browser.execute_script("return document.querySelectorAll('[data-chart] canvas').length")
    assert charts == 9 and len(drawn) > charts
    assert all(is_drawn and right <= width for is_drawn, right in drawn)
    colors = browser.execute_script(
        "const s = getComputedStyle(document.body); return [s.backgroundColor, s.color]"
    )
    assert (colors[0] == "rgb(255, 255, 255)") == (scheme == "light")


@pytest.mark.slow
def test_the_legend_shows_the_value_at_the_cursor_or_the_last_one(browser, page):
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.by import By

    open_page(browser, page, 1400, "light")
    chart = browser.find_element(By.CSS_SELECTOR, "[data-chart=loss]")

    def legend() -> list[str]:
        rows = chart.find_elements(By.CSS_SELECTOR, ".u-series")
        return [row.find_element(By.CSS_SELECTOR, ".u-value").text for row in rows]

    records = [json.loads(line) for line in (page.parent / "other/metrics.jsonl").read_text().splitlines()]
    [last] = [record["loss"] for record in records if record["step"] == HALF and "loss" in record]
    area = chart.find_element(By.CSS_SELECTOR, ".u-over")
    before = legend()
    assert before[0] == "200" and before[2] == f"{float(format(last, '.4g')):g}"
    right = area.size["width"] // 2 - 2
    ActionChains(browser).move_to_element_with_offset(area, right, 0).perform()
    assert legend()[2] == "–" and re.fullmatch(r"[\d.]+", legend()[1])
    ActionChains(browser).move_to_element_with_offset(area, -right // 2, 0).perform()
    assert re.fullmatch(r"[\d.]+", legend()[2]) and legend()[0] != before[0]
    ActionChains(browser).move_to_element(browser.find_element(By.TAG_NAME, "h1")).perform()
    assert legend() == before
    boxes = browser.find_elements(By.CSS_SELECTOR, "[data-chart=nll] .u-marker")[1:]
    styles = [box.value_of_css_property("border-top-style") for box in boxes]
    assert styles == ["dotted", "solid"] * 2  # training and validation of each run


@pytest.mark.slow
@pytest.mark.parametrize("width", WIDTHS)
def test_right_to_left_translations_end_where_their_reference_does(browser, run_dir, tmp_path, width):
    from mtrain.report.report import report_page

    run, file = shutil.copytree(run_dir, tmp_path / "run"), tmp_path / "page.html"
    record = json.loads((run / "samples.jsonl").read_text().splitlines()[0])
    for sentence in record["sentences"]:
        sentence |= {"reference": "القطة تنام على السجادة", "translation": "القطة تنام"}
    (run / "samples.jsonl").write_text(f"{json.dumps(record)}\n")
    file.write_text(report_page([run]), encoding="utf-8")
    open_page(browser, file, width, "light")
    edges = browser.execute_script(
        """document.querySelectorAll("details").forEach(each => each.open = true);
        const [article] = [...document.querySelectorAll("article")].filter(a => a.querySelector("table"));
        return [...article.querySelectorAll("[dir=rtl]")].map(element => {
          const range = document.createRange();
          range.selectNodeContents(element);
          return range.getBoundingClientRect().right; })"""
    )
    assert len(edges) == 2 and edges[0] == pytest.approx(edges[1], abs=1)


@pytest.mark.slow
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_browser_shows_a_comparison(mtrain, browser, corpus, tmp_path, width, scheme):
    from selenium.webdriver.common.by import By

    lines = (corpus / "train.de").read_text(encoding="utf-8").splitlines()
    systems = {"old": [line.replace("Der", "Die") for line in lines], "new": [*lines[:-1], "ولد " * 200]}
    for name, texts in systems.items():
        (tmp_path / name).write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    files = [
        "--hypotheses",
        tmp_path / "old",
        "--compare",
        tmp_path / "new",
        "--html",
        tmp_path / "page.html",
    ]
    texts = ["--source", corpus / "train.en", "--reference", corpus / "train.de"]
    assert mtrain("evaluate", *files, *texts, "--metrics", "chrf")[0] == 0
    open_page(browser, tmp_path / "page.html", width, scheme)
    assert browser.get_log("browser") == []
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width

    def shown() -> list[str]:
        headings = browser.find_elements(By.CSS_SELECTOR, "article h4")
        return [heading.text.partition(":")[0] for heading in headings if heading.is_displayed()]

    assert shown() == ["Line 8", "Line 2"]
    for value, expected in (("worse", ["Line 8"]), ("better", ["Line 2"]), ("all", ["Line 8", "Line 2"])):
        browser.find_element(By.CSS_SELECTOR, f"input[value={value}]").click()
        assert shown() == expected
    marked = browser.find_element(By.CSS_SELECTOR, "article:last-of-type ins")
    assert marked.text == "Der"
    colors = browser.execute_script(
        "return ['del', 'ins'].map(e => getComputedStyle(document.querySelector(e)).backgroundColor)"
    )
    assert len({*colors, "rgba(0, 0, 0, 0)"}) == 3


@pytest.mark.slow
def test_the_axis_the_keyboard_and_the_heads_work(browser, page):
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    open_page(browser, page, 1400, "light")
    chart = browser.find_element(By.CSS_SELECTOR, "[data-chart=loss]")
    chart.send_keys(Keys.HOME)
    status = chart.find_element(By.CSS_SELECTOR, "[role=status]")
    first = json.loads((page.parent / "other/metrics.jsonl").read_text().splitlines()[0])
    value = f"{float(format(first['loss'], '.4g')):g}"
    assert status.get_attribute("textContent").startswith(f"steps: {first['step']}; ")
    assert status.get_attribute("textContent").endswith(f"other: {value}")
    chart.send_keys(Keys.END)
    assert re.search(r"by-heart: [\d.]+; other: –$", status.get_attribute("textContent"))
    browser.find_element(By.CSS_SELECTOR, "input[name=axis][value=tokens]").click()
    chart.send_keys(Keys.HOME)
    text = status.get_attribute("textContent")
    assert text.startswith(f"target tokens: {first['target_tokens']:,}; ")
    section = browser.find_element(By.CSS_SELECTOR, "[data-attention]")
    section.find_element(By.CSS_SELECTOR, "input[value=decoder]").click()
    section.find_element(By.CSS_SELECTOR, "button[data-layer='0'][data-head='1']").click()
    caption = section.find_element(By.TAG_NAME, "caption").text
    assert caption == "Decoder, layer 1, head 2"
    columns = section.find_elements(By.CSS_SELECTOR, "thead th bdi")
    assert columns[0].text == "<s>"
    cells = section.find_elements(By.CSS_SELECTOR, "tbody tr:first-child td")
    assert cells[0].text == "100" and not any(cell.text for cell in cells[1:])
    assert browser.get_log("browser") == []
