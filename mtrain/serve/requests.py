"""Reading requests, within limits."""

import asyncio
import hashlib
import hmac
import json
import re
import sys
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from typing import Any
from urllib.parse import parse_qsl

from python_multipart.multipart import parse_options_header
from starlette.datastructures import FormData
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect, Request

from mtrain.tokenizer.tokenizer import valid_text

SECONDS_TO_SEND = 30.0  # for the body of a request
MOST_TEXTS = 1000  # of a request
_LONGEST_NAME = 500  # characters of a language or model
_BYTES_PER_CHARACTER = 12  # at most, such as \ud83d\ude00 in JSON
MultiPartParser.spool_max_size = sys.maxsize  # no text is written to disk; the body of a request is limited


async def read_fields(request: Request, char_limit: int) -> dict[str, Any]:
    """The fields of a request, from its query and its body: JSON or a form. Raises HTTPException if it is
    neither, too slow, or larger than `char_limit` characters can be."""
    limit, max_fields = _BYTES_PER_CHARACTER * char_limit + 65536, MOST_TEXTS + 100
    size = request.headers.get("content-length", "")
    if size.isdecimal() and int(size[:20]) > limit:  # or else the client would have to send it first
        raise _too_large(limit)
    kind, options = parse_options_header(request.headers.get("content-type"))
    if options.get(b"charset", b"utf-8").lower() not in (b"utf-8", b"utf8"):  # decoding Punycode is slow
        raise HTTPException(415, "the request must be in UTF-8")
    body = bytearray()
    try:
        async with asyncio.timeout(SECONDS_TO_SEND):
            async for part in request.stream():
                body += part
                if len(body) > limit:
                    raise _too_large(limit)
        if kind == b"multipart/form-data":
            parser = MultiPartParser(request.headers, _once(body), max_fields=max_fields, max_part_size=limit)
            fields: Any = _fields_of(await parser.parse())
        elif kind == b"application/x-www-form-urlencoded":  # starlette reads it as Latin-1
            pairs = parse_qsl(body.decode(), keep_blank_values=True, max_num_fields=max_fields)
            fields = _fields_of(FormData([*pairs]))
        else:
            fields = json.loads(body or b"{}")
    except TimeoutError:
        raise HTTPException(408, "the body of the request did not arrive in time") from None
    except MultiPartException as error:
        raise HTTPException(400, error.message) from None
    except (ValueError, RecursionError, ClientDisconnect):
        fields = None
    if not isinstance(fields, dict):
        form = f"a form of at most {max_fields} fields"
        raise HTTPException(400, f"the body of the request must be a JSON object, or {form}")
    return {**request.query_params, **fields}


async def _once(body: bytearray) -> AsyncGenerator[bytes, None]:
    """A body that has arrived as a whole, as a stream."""
    yield bytes(body)


def _too_large(limit: int) -> HTTPException:
    return HTTPException(413, f"the request has more than {limit} bytes")


def _fields_of(form: FormData) -> dict[str, Any]:
    """The values of a form by name; several for a name as a list."""
    return {name: each if len(each := form.getlist(name)) > 1 else each[0] for name in form}


def text_of(fields: Mapping[str, Any], name: str, default: str | None = None) -> str:
    """A field with a name. Raises HTTPException if it is too long, or if it is missing and there is no
    default."""
    value = default if (given := fields.get(name)) in (None, "") else given
    if not isinstance(value, str) or not value:
        raise HTTPException(400, f"Invalid request: missing {name} parameter")
    if len(value) > _LONGEST_NAME:
        raise HTTPException(400, f"Invalid request: {name} has more than {_LONGEST_NAME} characters")
    return value


def require_texts(texts: Sequence[Any], char_limit: int) -> list[str]:
    """Texts without unpaired surrogates. Raises HTTPException if there are none, too many or other values, or
    if they are too long."""
    if not texts or not all(isinstance(text, str) for text in texts):
        raise HTTPException(400, "Invalid request: text, or a list of texts, is missing")
    size = sum(map(len, texts))
    if len(texts) > MOST_TEXTS or size > char_limit:
        limits = f"exceed {MOST_TEXTS} texts or {char_limit} characters"
        raise HTTPException(413, f"Invalid request: {len(texts)} texts with {size} characters {limits}")
    return [valid_text(text) for text in texts]


def require_origin(request: Request, origins: Collection[str]) -> None:
    """Raise HTTPException if a browser sends the request for a web page of another origin than some. Without
    this, any page could send forms, whose answers only CORS keeps from it. Extensions, which the user has
    installed, may ask; their origin differs between installations."""
    site, origin = request.headers.get("sec-fetch-site"), request.headers.get("origin")
    if re.match("(moz|safari-web)-extension://", origin or ""):
        return  # extensions of Chromium that may reach this address have the site "none", or no site
    if re.match("chrome-extension://", origin or "") and site is None:
        return
    if site is None and origin and origin.partition("://")[2] != request.headers.get("host"):
        site = "cross-site"  # browsers do not name the site to servers without HTTPS, except on loopback
    if site in ("cross-site", "same-site") and not {"*", origin} & {*origins}:
        raise HTTPException(403, f"web pages of {origin} may not ask this server; --cors allows them")


def require_key(request: Request, fields: Mapping[str, Any], digests: Collection[bytes]) -> None:
    """Raise HTTPException unless the request has a key with one of some digests; see `digest_of`."""
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    token = token.encode("latin-1").decode("utf-8", "replace")  # Starlette decodes headers as Latin-1
    given = str(fields.get("api_key") or (token if scheme.lower() == "bearer" else ""))
    found = digest_of(given)
    equal = [hmac.compare_digest(found, digest) for digest in digests]
    if digests and not any(equal):
        status = 401 if request.scope["path"].startswith("/v1/") else 403
        raise HTTPException(status, "Invalid API key" if given else "An API key is required")


def digest_of(key: str) -> bytes:
    """What is compared instead of an API key, so that the time does not reveal the length of the key."""
    return hashlib.sha256(key.encode("utf-8", "replace")).digest()
