"""The server of `mtrain serve`: LibreTranslate's API, OpenAI's chat API, and a page."""
