"""The server as an ASGI application, with the routes of LibreTranslate's API."""

import asyncio
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from importlib.resources import files
from itertools import islice
from typing import Any, NamedTuple

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from mtrain.config.language_names import language_name
from mtrain.decoding.alignment import word_spans
from mtrain.decoding.join import kth_best
from mtrain.decoding.translation import Translation
from mtrain.documents.html import Html
from mtrain.errors import MtrainError
from mtrain.serve import openai
from mtrain.serve.requests import require_key, require_texts, text_of
from mtrain.serve.server import Server
from mtrain.tokenizer.tokenizer import valid_text
from mtrain.web.page import translator_page

_MOST_ALTERNATIVES = 20
_SHORT = 40  # characters of a text whose language cannot be told alone


async def _translate(server: Server, request: Request) -> Response:
    fields = await server.fields(request)
    answers = await _answers(server, request, fields)
    if isinstance(fields["q"], list):
        return JSONResponse({key: [answer[key] for answer in answers] for key in answers[0]})
    return JSONResponse(answers[0])


async def _answers(server: Server, request: Request, fields: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The answers for the texts in the fields of a request. Raises HTTPException."""
    q, wanted = fields.get("q"), _Wanted.of(fields)
    texts = require_texts(q if isinstance(q, list) else [q], server.char_limit)
    source, target = text_of(fields, "source", "auto"), text_of(fields, "target")
    answers: list[dict[str, Any]] = [{} for _ in texts]
    sources = [source] * len(texts)
    if source == "auto":
        plain = await run_in_threadpool(_without_markup, texts) if wanted.html else texts
        detected = await _detect_each(server, plain, target)
        answers = [{"detectedLanguage": each} for each in detected]
        sources = [each["language"] for each in detected]
    found = {}
    async with asyncio.timeout(server.seconds):
        for language in dict.fromkeys(sources):
            own = [text for text, each in zip(texts, sources, strict=True) if each == language]
            found[language] = iter(await _answers_from(server, request, own, language, target, wanted))
    return [answer | next(found[each]) for answer, each in zip(answers, sources, strict=True)]


def _without_markup(texts: Sequence[str]) -> list[str]:
    """What is to be translated in each HTML."""
    return ["\n".join(Html(text).texts) for text in texts]


async def _detect_each(server: Server, texts: Sequence[str], target: str) -> list[dict[str, Any]]:
    """The language of each text. A short text tells little, so all short ones together tell theirs."""
    short = [text for text in texts if len(text) <= _SHORT]
    of_short = await server.detect(short, target) if short else []
    found = [of_short if len(each) <= _SHORT else await server.detect([each], target) for each in texts]
    return [languages[0] for languages in found]


class _Wanted(NamedTuple):
    """What a client wants to know of each text."""

    html: bool
    alternatives: int
    alignments: bool

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> "_Wanted":
        """What the fields of a request say. Raises HTTPException."""
        format_, alternatives = fields.get("format") or "text", str(fields.get("alternatives") or 0)
        if not (alternatives.isdecimal() and len(alternatives) < 4):
            raise HTTPException(400, "Invalid request: alternatives must be a number from 0 to 999")
        if format_ not in ("text", "html"):
            raise HTTPException(400, "Invalid request: format must be text or html")
        aligned = str(fields.get("alignments")).lower() in ("1", "true")
        return cls(format_ == "html", int(alternatives), aligned and format_ == "text")


async def _answers_from(
    server: Server, request: Request, texts: Sequence[str], source: str, target: str, wanted: _Wanted
) -> list[dict[str, Any]]:
    """The answers for texts in a language; texts in the target language are not changed."""
    if server.models.is_same(source, target):
        asked = {"alternatives": wanted.alternatives, "alignments": wanted.alignments}
        return [{"translatedText": text, **{key: [] for key in asked if asked[key]}} for text in texts]
    translator = server.models.find(source, target)
    n_best = 1 + min(wanted.alternatives, _MOST_ALTERNATIVES, translator.decoding.hypotheses - 1)
    documents = await run_in_threadpool(lambda: [Html(text) for text in texts]) if wanted.html else []
    given = [text for document in documents for text in document.texts] if wanted.html else texts
    aligned = wanted.html or wanted.alignments
    translations = await server.translate(request, translator, given, n_best, aligned)
    ranked = [[one.text for one in best.n_best or (best,)] for best in translations]
    if wanted.html:
        ranked = await run_in_threadpool(_put_back, documents, translations)
    answers: list[dict[str, Any]] = []
    for i, (first, *others) in enumerate(ranked):
        answers.append({"translatedText": first})
        if wanted.alternatives:
            answers[-1]["alternatives"] = [text for text in dict.fromkeys(others) if text != first]
        if wanted.alignments:
            answers[-1]["alignments"] = _aligned_spans(texts[i], translations[i])
    return answers


def _put_back(documents: Sequence[Html], translations: Sequence[Translation]) -> list[list[str]]:
    """The translations of HTML, best first, from the translations of the texts in it."""
    remaining, found = iter(translations), []
    for document in documents:
        ranked = [best.n_best or (best,) for best in islice(remaining, len(document.texts))]
        pairs = ([(each.text, each.alignment or ()) for each in column] for column in kth_best(ranked))
        found.append([document.with_translations(column) for column in pairs])
    return found


def _aligned_spans(text: str, translation: Translation) -> list[tuple[int, int, int, int]]:
    """The characters of aligned words: begin and end in the text, begin and end in the translation."""
    source, target = word_spans(text), word_spans(translation.text)
    return [(*source[i], *target[j]) for i, j in translation.alignment or ()]


async def _detect(server: Server, request: Request) -> Response:
    q = (await server.fields(request)).get("q")
    return JSONResponse(await server.detect(require_texts([q], server.char_limit)))


async def _metrics(server: Server, request: Request) -> Response:
    require_key(request, {}, server.key_digests)
    return PlainTextResponse(server.metrics(), media_type="text/plain; version=0.0.4")


def _frontend_settings(server: Server) -> dict[str, Any]:
    keys, (_, source, target) = bool(server.key_digests), next(iter(server.models.directions.values()))
    sides = {"source": source, "target": target}
    language = {side: {"code": code, "name": language_name(code)} for side, code in sides.items()}
    limits = {"charLimit": server.char_limit, "frontendTimeout": 300, "apiKeys": keys, "keyRequired": keys}
    files = {"suggestions": False, "filesTranslation": True, "supportedFilesFormat": [".txt"]}
    return {**limits, **files, "language": language}


async def _translate_file(server: Server, request: Request) -> Response:
    fields = await server.fields(request)
    file, asked = fields.get("file"), {key: x for key, x in fields.items() if key in ("source", "target")}
    if not isinstance(file, UploadFile) or not (file.filename or "").lower().endswith(".txt"):
        raise HTTPException(400, "Invalid request: missing file parameter, a plain text (.txt)")
    try:
        text = (await file.read()).decode("utf-8-sig")
    except UnicodeDecodeError:
        raise HTTPException(400, "Invalid request: the file is not valid UTF-8") from None
    [answer] = await _answers(server, request, {**asked, "q": text})
    url = request.url_for("/download_file/{name}", name=server.keep_file(answer["translatedText"]))
    # As clients of a reverse proxy reach it.
    host = request.headers.get("x-forwarded-host", url.netloc)
    prefix = request.headers.get("x-forwarded-prefix", "").rstrip("/")
    return JSONResponse({"translatedFileUrl": str(url.replace(netloc=host, path=prefix + url.path))})


async def _download_file(server: Server, request: Request) -> Response:
    headers = {"Content-Disposition": 'attachment; filename="translation.txt"'}
    return PlainTextResponse(server.file(request.path_params["name"]), headers=headers)


async def _on_error(server: Server, request: Request, error: Exception) -> Response:
    status, message, headers = 500, f"bug in mtrain: {type(error).__name__}", {}
    if isinstance(error, HTTPException):
        status, message, headers = error.status_code, error.detail, dict(error.headers or {})
    elif isinstance(error, MtrainError):
        status, message = 400, str(error)
    elif isinstance(error, TimeoutError):
        status, message, headers = 503, "the translation takes too long", {"Retry-After": "10"}
    server.counts[f'errors_total{{status="{status}"}}'] += 1
    answer: Any = valid_text(message)
    if request.scope["path"].startswith("/v1/"):  # as OpenAI's clients expect it
        kind = "server_error" if status >= 500 else "invalid_request_error"
        answer = {"message": answer, "type": kind, "param": None, "code": None}
    return JSONResponse({"error": answer}, status, headers)


class _SlashesMerged:
    """Middleware that reads several slashes as one: clients append `/translate` to any address, also to one
    that ends in a slash."""

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope["path"] = re.sub("/{2,}", "/", scope["path"])
        await self.app(scope, receive, send)


class _KnownHosts(TrustedHostMiddleware):
    """Middleware that checks the host of each request except `/health`: probes may name no host."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = self.app if scope.get("path") == "/health" else super().__call__
        await answer(scope, receive, send)


def make_app(server: Server) -> Starlette:
    """The application. Its end waits for all translations."""
    asking = {
        "/metrics": _metrics,
        "/v1/models": openai.list_models,
        "/v1/models/{name:path}": openai.list_models,
        "/download_file/{name}": _download_file,
    }
    sending = {
        "/translate": _translate,
        "/translate_file": _translate_file,
        "/detect": _detect,
        "/v1/chat/completions": openai.complete_chat,
    }
    assets = files("mtrain.serve") / "assets"
    constant = {
        "/": HTMLResponse(translator_page("server")),
        "/docs": HTMLResponse((assets / "docs.html").read_bytes()),
        "/spec": Response((assets / "openapi.json").read_bytes(), media_type="application/json"),
        "/health": JSONResponse({"status": "ok"}),
        "/languages": JSONResponse(server.models.languages()),
        "/frontend/settings": JSONResponse(_frontend_settings(server)),
    }
    routes = [Route(path, response, methods=["GET"]) for path, response in constant.items()]
    routes += [Route(path, partial(function, server), name=path) for path, function in asking.items()]
    routes += [Route(path, partial(function, server), methods=["POST"]) for path, function in sending.items()]

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        await run_in_threadpool(server.close)

    hosts = Middleware(_KnownHosts, allowed_hosts=server.hosts, www_redirect=False)
    every: Any = {"allow_methods": ["*"], "allow_headers": ["*"], "allow_private_network": True}
    cors = Middleware(CORSMiddleware, allow_origins=server.origins, **every)
    errors = (HTTPException, MtrainError, TimeoutError, Exception)
    handlers = dict.fromkeys(errors, partial(_on_error, server))
    return Starlette(False, routes, [Middleware(_SlashesMerged), hosts, cors], handlers, lifespan)
