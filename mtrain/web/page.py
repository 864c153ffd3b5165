"""The translator page, from the templates that its two kinds share."""

import json
from typing import Literal

from mtrain.templates import load_templates


def translator_page(backend: Literal["server", "engine"], data: object = None) -> str:
    """The page as HTML. What translates is the server that sends the page, or the engine in the browser; its
    models and languages are `data`, see `write_site`."""
    text = json.dumps(data, ensure_ascii=False).replace("<", "\\u003c")
    return load_templates("mtrain.web").get_template("page.html").render(backend=backend, data=text)
