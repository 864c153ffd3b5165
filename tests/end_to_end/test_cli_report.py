"""`mtrain report` and `mtrain translate --attention`, and their pages in a browser."""

import json
import shutil
from pathlib import Path

import pytest

from tests.support.cli import one_line

WIDTHS = (390, 1400)


def test_report_writes_a_page_and_prints_its_path(mtrain, run_dir, tmp_path):
    file = tmp_path / "page.html"
    code, out, err = mtrain("report", run_dir, "-o", file, "--sentence", "It rains.")
    assert (code, out) == (0, f"{file}\n") and f"open {file} in a browser" in err
    page = file.read_text(encoding="utf-8")
    assert page.startswith("<!DOCTYPE html>") and "Training of by-heart" in page
    code, out, _ = mtrain("report", run_dir, "-o", "/dev/stdout", "--sentence", "It rains.")
    assert code == 0 and out == page


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["report", "nowhere"], 4, "nowhere: no such run folder"),
        (["report", "{run}/model"], 4, "not a run folder with config.yaml and metrics.jsonl"),
        (["report", "{run}", "{run}"], 2, "given twice"),
        (["report", "{run}", "-o", "nowhere/page.html"], 6, "no such folder"),
        (["report", "{run}", "--set", "decoding.beam_size=0"], 2, "decoding.beam_size"),
        (["report", "{run}", "--set", "model.heads=2"], 2, "only decoding.* can be set"),
        (["report"], 2, "Missing argument 'RUN...'"),
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


@pytest.fixture(scope="module")
def browser():
    """A headless Chromium, with a function that sets the width and the color scheme."""
    webdriver = pytest.importorskip("selenium.webdriver")
    program, driver = (shutil.which(name) for name in ("chromium", "chromedriver"))
    if program is None or driver is None:
        pytest.skip("needs chromium and chromedriver")
    options = webdriver.ChromeOptions()
    options.binary_location = program
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = webdriver.ChromeService(driver)
    with webdriver.Chrome(options, service) as opened:
        yield opened


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
    assert charts == 10 and len(drawn) > charts
    assert all(is_drawn and right <= width for is_drawn, right in drawn)
    colors = browser.execute_script(
        "const s = getComputedStyle(document.body); return [s.backgroundColor, s.color]"
    )
    assert (colors[0] == "rgb(255, 255, 255)") == (scheme == "light")


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
    browser.find_element(By.CSS_SELECTOR, "input[name=axis][value=tokens]").click()
    chart.send_keys(Keys.HOME)
    text = status.get_attribute("textContent")
    assert text.startswith(f"target tokens: {first['target_tokens']:,}; ")
    section = browser.find_element(By.CSS_SELECTOR, "[data-attention]")
    section.find_element(By.CSS_SELECTOR, "input[value=decoder]").click()
    section.find_element(By.CSS_SELECTOR, "button[data-layer='0'][data-head='1']").click()
    caption = section.find_element(By.TAG_NAME, "caption").text
    assert caption == "Decoder, layer 1, head 2"
    columns = section.find_elements(By.CSS_SELECTOR, "thead th span")
    assert columns[0].text == "<s>"
    cells = section.find_elements(By.CSS_SELECTOR, "tbody tr:first-child td")
    assert cells[0].text == "100" and not any(cell.text for cell in cells[1:])
    assert browser.get_log("browser") == []
