"""The translator page in a browser."""

import json
import time
from typing import Any


def open_page(browser: Any, address: str, width: int, scheme: str) -> None:
    """Open the page in a window of a width in pixels, light or dark, and wait until one can type."""
    metrics = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    feature = {"name": "prefers-color-scheme", "value": scheme}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
    browser.get(address)
    _wait_for(browser, "return document.activeElement.id", "source")


def text_of(browser: Any, id_: str, part: str) -> str:
    """The text of an element, once it is not empty and contains a part."""
    return _wait_for(browser, f"return document.getElementById('{id_}').innerText", part)


def _wait_for(browser: Any, script: str, part: str, seconds: float = 20.0) -> str:
    """What a script returns, once it is not empty and contains a part."""
    deadline, found = time.monotonic() + seconds, ""
    while time.monotonic() < deadline:
        found = browser.execute_script(script)
        if found and part in found:
            return found
        time.sleep(0.05)
    raise AssertionError(f"{script}: {found!r}")


def check_page(browser: Any, address: str, width: int) -> None:
    """After a translation: words can be marked with the mouse and the keyboard, every control has a name, the
    page is not wider than the window, and nothing was loaded from elsewhere or failed."""
    from selenium.webdriver import ActionChains

    marked = "return document.querySelectorAll('#mirror mark').length"
    for place, expected in (("#target span", True), ("h1", False)):
        ActionChains(browser).move_to_element(browser.find_element("css selector", place)).perform()
        assert bool(browser.execute_script(marked)) == expected
    browser.find_element("id", "target").send_keys("\ue014")  # the right arrow
    assert browser.execute_script(marked) >= 1
    assert "Eine ←" in text_of(browser, "aligned", "←")
    announced = "const e = document.getElementById('target'); return [e.ariaLive, e.lang, e.dir]"
    assert browser.execute_script(announced) == ["polite", "de", "ltr"]  # for screen readers
    assert browser.execute_script("return document.getElementById('source').maxLength") == -1  # all is sent
    unnamed = """return [...document.querySelectorAll('select, textarea, button, input, [role=textbox]')]
        .filter((each) => !(each.ariaLabel || each.labels?.length || each.textContent.trim())).length"""
    assert browser.execute_script(unnamed) == 0
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    assert [entry for entry in browser.get_log("browser") if entry["level"] != "DEBUG"] == []
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    asked = [
        each["params"]["request"]["url"] for each in messages if each["method"] == "Network.requestWillBeSent"
    ]
    assert asked
    assert all(url.startswith((address, "data:")) for url in asked)
