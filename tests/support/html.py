"""The structure of generated HTML pages."""

from html.parser import HTMLParser


class Elements(HTMLParser):
    """The elements of a page, and the text in those that are of interest. All elements must be closed."""

    EMPTY = frozenset({"meta", "input", "wbr"})

    def __init__(self, page: str):
        super().__init__()
        self.open: list[str] = []
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {"h4": [], "del": [], "ins": [], "td": [], "h2": [], "caption": []}
        self.feed(page)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in self.texts:
            self.texts[self.open[-1]].append(data)

    def of(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.found if name == tag]
