"""Finds URLs in texts of any script."""

import re
from unicodedata import normalize
from urllib.parse import unquote

import regex  # supports Unicode scripts

# A URL has the ASCII characters of RFC 3986 and, as shown by browsers, letters. Letters of scripts without
# spaces around URLs, and non-Latin letters after an ASCII letter or digit, belong to the text around the URL.
_WITHOUT_SPACES = (
    r"\p{Han}\p{Hiragana}\p{Katakana}\p{Bopomofo}\p{Hangul}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}\p{Tibetan}"
    r"\u3000-\u30ff\uff00-\uffef"
)
_START = r"(?:https?|ftp)://|(?<![a-z0-9])www\."
_URL = regex.compile(
    rf"""(?V1ix) (?:{_START}) (?=[\p{{L}}\p{{N}}\[])
    (?: (?! (?<![,;]) [,;]+ (?:{_START}))  # another one may follow directly
        [a-z0-9\-._~:/?\#\[\]@!$&'()*+,;=%]
      | [[\p{{Latin}}\p{{M}}]--[\uff00-\uffef]]
      | (?<![a-z0-9]) [[\p{{L}}\p{{N}}]--[{_WITHOUT_SPACES}]]
      | (?<=[[\p{{L}}\p{{M}}]--\p{{Latin}}]) [\u200c\u200d] (?=\p{{L}})  # joiners, as in Persian words
    )+"""
)
_ENCODED = re.compile("(?:%[89a-f][0-9a-f])+", re.IGNORECASE)  # characters outside ASCII
# Also a possessive one. After a hyphen, as in Georgian and Armenian, it is in another script than the URL.
_CASE_ENDING = regex.compile(r"(?V1)(?:'\w{1,5}|(?<=[a-zA-Z0-9/])-[[\p{L}\p{M}]--\p{Latin}]{1,5})$")
_AFTER_URL = ".,;:!?'*_~([/"  # punctuation that follows a URL, and its optional final slash
_HOST = re.compile(r"\w+://[^/?#]*|[^/?#]*")


def urls_of(text: str) -> frozenset[str]:
    """The URLs in a text, without punctuation, unmatched closing brackets or text that follows them without
    a space. Host names are in lower case, and letters are not percent-encoded."""
    if "://" not in text and "www." not in text.lower():  # fast path
        return frozenset()
    return frozenset(_decode(_trim(match[0])) for match in _URL.finditer(_compose(text)))


def _compose(text: str) -> str:
    return text if text.isascii() else normalize("NFC", text).replace("’", "'")


def _decode(url: str) -> str:
    """A URL without percent-encoded letters. Bytes that are not UTF-8 remain different from each other."""
    return _compose(_ENCODED.sub(lambda match: unquote(match[0], errors="surrogateescape"), url))


def _trim(url: str) -> str:
    """A URL without the punctuation and the case ending that follow it."""
    depth = {")": 0, "]": 0}
    for place, character in enumerate(url):
        if character in "([":
            depth[")" if character == "(" else "]"] += 1
        elif character in depth:
            depth[character] -= 1
            if depth[character] < 0:
                url = url[:place]
                break
    url = _CASE_ENDING.sub("", url.rstrip(_AFTER_URL)).rstrip(_AFTER_URL)
    return _HOST.sub(lambda host: host[0].lower(), url, count=1)
