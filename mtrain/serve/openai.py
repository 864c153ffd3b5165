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
    """Each direction of each model as a model of its own."""
    require_key(request, {}, server.key_digests)
    fields = {"object": "model", "created": 0, "owned_by": "mtrain"}
    models = [{"id": name, **fields} for name in server.models.directions]
    return JSONResponse({"object": "list", "data": models})


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
    id_ = text_of(fields, "model")
    if id_ not in server.models.directions:
        raise HTTPException(404, f"the model {id_} does not exist; /v1/models lists all")
    model, source, target = server.models.directions[id_]
    translator = model.between(source, target)
    texts = require_texts([_last_message(fields)], server.char_limit)
    async with asyncio.timeout(server.seconds):
        [translation] = await server.translate(request, translator, texts, n_best=1, alignments=False)
    answer = {"id": f"chatcmpl-{secrets.token_hex(12)}", "created": int(time.time()), "model": id_}
    reason = "stop" if translation.finished else "length"
    if fields.get("stream") is True:
        events = _events(answer, translation.text, reason)
        return StreamingResponse(events, media_type="text/event-stream")
    message = {"role": "assistant", "content": translation.text}
    answer |= {"choices": [{"index": 0, "message": message, "finish_reason": reason}]}
    [prompt] = await run_in_threadpool(translator.tokenizer.encode_source, texts)
    usage = {"prompt_tokens": len(prompt), "completion_tokens": translation.tokens}
    answer |= {"object": "chat.completion", "usage": {**usage, "total_tokens": sum(usage.values())}}
    return JSONResponse(answer)


def _events(answer: dict[str, Any], text: str, reason: str) -> Iterator[str]:
    """The answer as events of a stream."""
    for delta, finish in (({"role": "assistant", "content": text}, None), ({}, reason)):
        choice = {"index": 0, "delta": delta, "finish_reason": finish}
        event = {**answer, "object": "chat.completion.chunk", "choices": [choice]}
        yield f"data: {json.dumps(event, ensure_ascii=False)}\n\n"
    yield "data: [DONE]\n\n"
