"""The page of `mtrain web` in a browser, with the Bergamot engine."""

import functools
import http.server
import threading

import pytest

from mtrain.config.load import validate
from mtrain.config.schema import Config
from mtrain.training.fit import fit
from mtrain.web.site import write_site
from tests.support.bergamot import engine
from tests.support.training import merged
from tests.support.translator_page import check_page, open_page, text_of

__all__ = ["engine"]
ENDED = """
    const data = {id: -1, error: {message: "Aborted(no memory)"}};
    worker.dispatchEvent(new MessageEvent("message", {data}));
"""


@pytest.fixture(scope="module")
def address(browser, engine, raw_config, tmp_path_factory):
    """A static server of a page whose model has memorized the eight pairs."""
    folder = tmp_path_factory.mktemp("web")
    recipe = {"max_steps": 200, "batch_tokens": 512, "validate_every": 100, "checkpoint_every": 200}
    recipe |= {"learning_rate": 0.002, "warmup_steps": 40, "label_smoothing": 0.0}
    model = {
        "d_model": 64,
        "norm": "post",
        "positions": "sinusoidal_marian",
        "dropout": 0.0,
        "encoder_layers": 2,
        "decoder_layers": 2,
    }
    raw = merged(raw_config, str(folder / "run"), training=recipe, model=model)
    fit(validate(Config, raw, "test"), device="cpu")
    write_site([folder / "run"], folder / "page", engine)

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Handler, directory=str(folder / "page"))
    ) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize(("width", "scheme"), [(390, "dark"), (1400, "light")])
def test_the_page_translates_as_one_types(address, browser, width, scheme):
    open_page(browser, address, width, scheme)
    browser.switch_to.active_element.send_keys("A cat sleeps.\n\nIt rains.")  # the keyboard suffices
    assert text_of(browser, "target", "regnet.") == "Eine Katze schläft.\n\nEs regnet."
    check_page(browser, address, width)
    assert not browser.find_element("id", "swap").is_displayed()  # there is no model for the other direction


@pytest.mark.slow
def test_the_newest_text_wins_and_markup_is_text(address, browser):
    open_page(browser, address, 1400, "light")
    source = browser.find_element("id", "source")
    for text in ("The sun shines. " * 40, "It <b>rains</b>.", "The sun shines.", "It rains."):
        source.clear()
        source.send_keys(text)
    assert text_of(browser, "target", "regnet.") == "Es regnet."
    source.clear()
    source.send_keys("<b>A & B</b>")
    assert text_of(browser, "target", "") and not browser.find_elements("css selector", "#target b")
    source.send_keys("\ue009a\ue000\ue017")  # Control+A, Delete
    browser.execute_async_script("setTimeout(arguments[0], 500)")
    assert browser.find_element("id", "target").text == ""


@pytest.mark.slow
def test_control_characters_do_not_end_the_engine(address, browser):
    open_page(browser, address, 1400, "light")
    source = browser.find_element("id", "source")
    script = "arguments[0].value = 'The\\0sun\\x01shines.'; arguments[0].dispatchEvent(new Event('input'))"
    browser.execute_script(script, source)
    assert text_of(browser, "target", "") and not browser.find_element("id", "message").text
    source.clear()
    source.send_keys("It rains.")
    assert text_of(browser, "target", "regnet.") == "Es regnet."


@pytest.mark.slow
def test_an_engine_that_has_ended_is_started_again(address, browser):
    open_page(browser, address, 1400, "light")
    source = browser.find_element("id", "source")
    source.send_keys("The sun shines.")
    assert text_of(browser, "target", "scheint.") == "Die Sonne scheint."
    browser.execute_script(ENDED)
    source.clear()
    source.send_keys("It rains.")
    assert text_of(browser, "target", "regnet.") == "Es regnet."


DURING_FETCH = f"const original = fetch; window.fetch = (file) => {{ {ENDED} return original(file); }};"
DURING_CALL = """
    const post = Worker.prototype.postMessage;
    Worker.prototype.postMessage = function(data) {
        if (data.name === "initialize") return post.call(this, data);
        this.dispatchEvent(new ErrorEvent("error", {message: "no instance"}));
    };
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changed", "message"), [(DURING_FETCH, "Aborted(no memory)"), (DURING_CALL, "no instance")]
)
def test_an_engine_that_ends_during_loading_is_reported(address, browser, changed, message):
    added = browser.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": changed})
    try:
        open_page(browser, address, 1400, "light")
        assert message in text_of(browser, "message", "no ")
    finally:
        browser.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", added)


@pytest.mark.slow
def test_a_page_that_is_opened_as_a_file_says_how_to_serve_it(browser, tmp_path):
    from mtrain.web.page import translator_page

    (tmp_path / "index.html").write_text(translator_page("engine", {"models": [], "languages": []}))
    browser.get((tmp_path / "index.html").as_uri())
    assert "python -m http.server" in text_of(browser, "message", "server")
