"""The routes of OpenAI's API for chats. The answer to a chat translates the last message of the user."""

import asyncio
import json
import secrets
import time
from collections.abc import Iterator, Mapping
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from mtrain.serve.requests import require_key, require_texts, text_of
from mtrain.serve.server import Server


async def list_models(server: Server, request: Request) -> Response:
    """Each direction of each model as a model of its own, or the one that the path names."""
    require_key(request, {}, server.key_digests)
    fields = {"object": "model", "created": 0, "owned_by": "mtrain"}
    models = {name: {"id": name, **fields} for name in server.models.directions}
    if (name := request.path_params.get("name")) is None:
        return JSONResponse({"object": "list", "data": [*models.values()]})
    return JSONResponse(models[_require_model(server, name)])


def _require_model(server: Server, name: str) -> str:
    """The name of a model. Raises HTTPException if it does not exist."""
    if name not in server.models.directions:
        raise HTTPException(404, f"the model {name} does not exist; /v1/models lists all")
    return name


def _last_message(fields: Mapping[str, Any]) -> object:
    """The last message of the user, which should be text."""
    messages = fields.get("messages")
    messages = messages if isinstance(messages, list) else []
    given = [each for each in messages if isinstance(each, dict) and each.get("role") == "user"]
    content = given[-1].get("content") if given else None
    if isinstance(content, list):
        parts = [each.get("text") for each in content if isinstance(each, dict)]
        content = "".join(text for text in parts if isinstance(text, str))
    return content


async def complete_chat(server: Server, request: Request) -> Response:
    """The translation as an answer in a chat."""
    fields = await server.fields(request)
    directions = [*server.models.directions]
    id_ = _require_model(server, text_of(fields, "model", directions[0] if len(directions) == 1 else None))
    model, source, target = server.models.directions[id_]
    translator = model.between(source, target)
    texts = require_texts([_last_message(fields)], server.char_limit)
    async with asyncio.timeout(server.seconds):
        [translation] = await server.translate(request, translator, texts, n_best=1, alignments=False)
    answer = {"id": f"chatcmpl-{secrets.token_hex(12)}", "created": int(time.time()), "model": id_}
    reason = "stop" if translation.finished else "length"
    [prompt] = await run_in_threadpool(translator.tokenizer.encode_source, texts)
    usage = {"prompt_tokens": len(prompt), "completion_tokens": translation.tokens}
    usage["total_tokens"] = sum(usage.values())
    if fields.get("stream") is True:
        options = fields.get("stream_options")
        counts = isinstance(options, dict) and options.get("include_usage") is True
        events = _events(answer, translation.text, reason, usage if counts else None)
        return StreamingResponse(events, media_type="text/event-stream")
    message = {"role": "assistant", "content": translation.text}
    answer |= {"choices": [{"index": 0, "message": message, "finish_reason": reason}]}
    return JSONResponse({**answer, "object": "chat.completion", "usage": usage})


def _events(answer: dict[str, Any], text: str, reason: str, usage: dict[str, int] | None) -> Iterator[str]:
    """The answer as events of a stream, the last of which contains the `usage`, if given."""
    deltas: list[Any] = [({"role": "assistant", "content": text}, None), ({}, reason)]
    choices = [{"index": 0, "delta": delta, "finish_reason": end} for delta, end in deltas]
    events: list[dict[str, Any]] = [{"choices": [choice]} for choice in choices]
    if usage is not None:
        events.append({"choices": [], "usage": usage})
    for event in events:
        event = {**answer, "object": "chat.completion.chunk", **event}
        yield f"data: {json.dumps(event, ensure_ascii=False)}\n\n"
    yield "data: [DONE]\n\n"
