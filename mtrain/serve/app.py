"""The server as an ASGI application, with the routes of LibreTranslate's API."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from importlib.resources import files
from itertools import islice
from typing import Any

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


async def _translate(server: Server, request: Request) -> Response:
    fields = await server.fields(request)
    q, format_ = fields.get("q"), fields.get("format", "text")
    texts = require_texts(q if isinstance(q, list) else [q], server.char_limit)
    source, target = text_of(fields, "source", "auto"), text_of(fields, "target")
    wanted = str(fields.get("alternatives") or 0)
    if not (wanted.isdecimal() and len(wanted) < 4) or format_ not in ("text", "html"):
        raise HTTPException(400, "Invalid request: alternatives must be a number, format text or html")
    answers: list[dict[str, Any]] = [{} for _ in texts]
    if source == "auto":
        detected, *_ = await server.detect(texts, target)
        answers, source = [{"detectedLanguage": detected} for _ in texts], detected["language"]
    translator = server.models.find(source, target)
    n_best = 1 + min(int(wanted), _MOST_ALTERNATIVES, translator.decoding.hypotheses - 1)
    aligned = format_ == "html" or str(fields.get("alignments", "")).lower() in ("1", "true")
    documents = await run_in_threadpool(lambda: [Html(text) for text in texts]) if format_ == "html" else []
    given = [text for document in documents for text in document.texts] if documents else texts
    translations = await server.translate(request, translator, given, n_best, aligned)
    ranked = [[one.text for one in best.n_best or (best,)] for best in translations]
    if documents:
        ranked = await run_in_threadpool(_put_back, documents, translations)
    elif aligned:
        for answer, text, best in zip(answers, texts, translations, strict=True):
            answer["alignments"] = _aligned_spans(text, best)
    for answer, (first, *others) in zip(answers, ranked, strict=True):
        answer["translatedText"] = first
        if int(wanted):
            answer["alternatives"] = [text for text in dict.fromkeys(others) if text != first]
    if isinstance(q, list):
        return JSONResponse({key: [answer[key] for answer in answers] for key in answers[0]})
    return JSONResponse(answers[0])


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
    return PlainTextResponse(server.metrics())


def _frontend_settings(server: Server) -> dict[str, Any]:
    source, keys = server.models.sources[0], bool(server.key_digests)
    sides = {"source": source, "target": server.models.targets_of(source)[0]}
    language = {side: {"code": code, "name": language_name(code)} for side, code in sides.items()}
    limits = {"charLimit": server.char_limit, "frontendTimeout": 300, "apiKeys": keys, "keyRequired": keys}
    files = {"suggestions": False, "filesTranslation": True, "supportedFilesFormat": [".txt"]}
    return {**limits, **files, "language": language}


async def _translate_file(server: Server, request: Request) -> Response:
    fields = await server.fields(request)
    source, target, file = text_of(fields, "source", "auto"), text_of(fields, "target"), fields.get("file")
    if not isinstance(file, UploadFile) or not (file.filename or "").lower().endswith(".txt"):
        raise HTTPException(400, "Invalid request: missing file parameter, a plain text (.txt)")
    try:
        texts = require_texts([(await file.read()).decode("utf-8-sig")], server.char_limit)
    except UnicodeDecodeError:
        raise HTTPException(400, "Invalid request: the file is not valid UTF-8") from None
    if source == "auto":
        source = (await server.detect(texts, target))[0]["language"]
    [translation] = await server.translate(request, server.models.find(source, target), texts)
    url = request.url_for("/download_file/{name}", name=server.keep_file(translation.text))
    return JSONResponse({"translatedFileUrl": str(url)})


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
        answer = {"message": answer, "type": "server_error" if status >= 500 else "invalid_request_error"}
    return JSONResponse({"error": answer}, status, headers)


def make_app(server: Server) -> Starlette:
    """The application. Its end waits for all translations."""
    asking = {"/metrics": _metrics, "/v1/models": openai.list_models, "/download_file/{name}": _download_file}
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
        await run_in_threadpool(server.batcher.close)

    hosts = Middleware(TrustedHostMiddleware, allowed_hosts=server.hosts, www_redirect=False)
    cors = Middleware(CORSMiddleware, allow_origins=server.origins, allow_methods=["*"], allow_headers=["*"])
    errors = (HTTPException, MtrainError, TimeoutError, Exception)
    handlers = dict.fromkeys(errors, partial(_on_error, server))
    return Starlette(False, routes, [hosts, cors], handlers, lifespan)
