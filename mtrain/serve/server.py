"""What the routes of a server share: its models, its limits, its counters, and translated files."""

import asyncio
import math
import secrets
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request

from mtrain.decoding.translate import Translator
from mtrain.decoding.translation import Translation
from mtrain.errors import is_recoverable
from mtrain.serve.batching import Batcher
from mtrain.serve.models import Models
from mtrain.serve.requests import read_fields, require_key, require_origin

SECONDS_KEPT, FILES_KEPT = 3600, 100
PATIENCE = 5.0  # seconds to wait for each thread that decodes when the server ends


@dataclass(eq=False)
class Server:
    """Models, who may ask them, and for how much."""

    models: Models
    char_limit: int = 100_000  # characters of a request
    key_digests: Sequence[bytes] = ()  # of API keys; none: everyone may ask
    origins: Sequence[str] = ()  # whose web pages may ask; * for all
    hosts: Sequence[str] = ("*",)  # names by which the server may be addressed; * for all
    seconds: float = 300.0  # for the translation of a request
    counts: Counter[str] = field(default_factory=Counter)
    _files: dict[str, tuple[float, str]] = field(default_factory=dict)  # times and texts, by name

    def __post_init__(self) -> None:
        workers = [model.translator.workers for model in self.models.served]
        for each in workers:
            each.start_after = 0.0  # a server has time to start processes
        self.batcher = Batcher(max(each.count for each in workers))

    def close(self) -> None:
        """Wait for what is being decoded, when no request is left. A worker process that does not answer,
        because it was stopped, for example, is killed."""
        if not self.batcher.close(PATIENCE):
            for model in self.models.served:
                model.translator.workers.kill_processes()
            self.batcher.close()

    async def fields(self, request: Request) -> dict[str, Any]:
        """The fields of a request, whose origin and API key are checked."""
        self.counts[f'requests_total{{path="{request.scope["path"]}"}}'] += 1
        require_origin(request, self.origins)
        fields = await read_fields(request, self.char_limit)
        require_key(request, fields, self.key_digests)
        return fields

    async def detect(self, texts: Sequence[str], target: str | None = None) -> list[dict[str, Any]]:
        """See `Models.detect`."""
        return await run_in_threadpool(self.models.detect, "\n".join(texts), target)

    async def translate(
        self, request: Request, translator: Translator, texts: Sequence[str], n_best: int, alignments: bool
    ) -> list[Translation]:
        """Translate texts. Raises UsageError, and HTTPException if the server is busy or decoding fails. If
        the client of the request goes away, or its time limit expires, the translation is canceled."""
        self.counts["characters_total"] += sum(map(len, texts))
        future = await run_in_threadpool(self.batcher.submit, translator, texts, n_best, alignments)
        gone = asyncio.ensure_future(request.receive())  # ends when the client disconnects
        gone.add_done_callback(lambda _: future.cancel())
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            if gone.done():
                raise HTTPException(400, "the client disconnected") from None
            raise
        except Exception as error:
            reason = error if is_recoverable(error) else "the log of the server says why"
            raise HTTPException(500, f"Cannot translate text: {reason}") from error
        finally:
            gone.cancel()

    def keep_file(self, text: str) -> str:
        """Keep a translated file for an hour; returns its name."""
        name = f"{secrets.token_urlsafe(16)}.txt"
        self._files = dict([*self._files.items(), (name, (time.monotonic(), text))][-FILES_KEPT:])
        return name

    def file(self, name: str) -> str:
        """The text of a translated file. Raises HTTPException if it is not kept any longer."""
        kept, text = self._files.get(name, (-math.inf, ""))
        if time.monotonic() - kept >= SECONDS_KEPT:
            raise HTTPException(404, "no such file; translated files are kept for an hour")
        return text

    def metrics(self) -> str:
        """The counters, in the text format of Prometheus."""
        counts = {**self.counts, **self.batcher.counts, "waiting_parts": self.batcher.waiting}
        lines: list[str] = []
        for family, names in groupby(sorted(counts), lambda name: name.partition("{")[0]):
            lines.append(f"# TYPE mtrain_{family} {'counter' if family.endswith('_total') else 'gauge'}\n")
            lines += [f"mtrain_{name} {counts[name]}\n" for name in names]
        return "".join(lines)
