"""Translates the requests of many clients in common batches.

The texts of a request are split into parts, as `Translator.stream` splits them. Threads take parts of all
waiting requests, decode them together, and join the translations once all parts of a request are translated.
"""

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice

import torch

from mtrain.decoding import batches
from mtrain.decoding.decode import DecodingTask
from mtrain.decoding.join import join_texts
from mtrain.decoding.translate import Translator
from mtrain.decoding.translation import Translation
from mtrain.decoding.worker_process import Decode
from mtrain.device import use_threads
from mtrain.errors import is_recoverable
from mtrain.tokenizer.tokenizer import valid_text

log = logging.getLogger(__name__)

SHORT = 64  # tokens; longer parts are decoded by a thread of their own
QUIET = 0.003  # seconds without a new request after which idle threads begin to decode
PATIENCE = 0.02  # seconds for which a request waits for others, at most
MOST_WAITING = 2048  # parts, before those of the last request


class QueueFullError(Exception):
    """Too many parts wait. `seconds` is how long the oldest one has been waiting."""

    def __init__(self, seconds: float):
        super().__init__("the server is busy; try again later")
        self.seconds = seconds


@dataclass(eq=False)
class Request:
    """Texts of one client, and what is translated of them."""

    texts: list[str]
    task: DecodingTask
    decode: Decode
    budget: int  # padded source tokens of a batch
    arrived: float
    future: "Future[list[Translation]]" = field(default_factory=Future)
    found: dict[int, list[Translation]] = field(default_factory=dict)  # by index of the part

    @property
    def kind(self) -> tuple[object, ...]:
        """Parts of requests of the same kind can be in the same batch."""
        return self.decode, self.task.target_lang, self.task.alignments

    def length(self, index: int) -> int:
        """The source tokens of a part, or what it counts as if it is very short."""
        return max(batches.SHORT, len(self.task.parts[index].source))

    def finish(self, indices: Sequence[int], found: Sequence[list[Translation]]) -> None:
        """Keep the translations of some parts; after the last one, answer the client."""
        self.found |= {i: best[: self.task.n_best] for i, best in zip(indices, found, strict=True)}
        if len(self.found) == len(self.task.parts):
            in_order = [self.found[i] for i in range(len(self.found))]
            with suppress(InvalidStateError):  # the client no longer waits
                self.future.set_result(list(join_texts(self.texts, self.task, in_order)))


Batch = list[tuple[Request, list[int]]]  # requests, and indices of their parts


class WaitingParts:
    """Parts of requests that wait to be decoded, of similar length. It has neither threads nor a clock: times
    are arguments, in seconds."""

    def __init__(self) -> None:
        # The requests in turn, with the indices of their parts; the next part is the last of them.
        self._requests: list[tuple[Request, list[int]]] = []
        self._last_arrival = 0.0
        self.size = 0  # number of parts

    def add(self, request: Request, indices: Sequence[int]) -> None:
        """Add parts of a request; its longest parts come first, so that batches have parts of like length."""
        self._requests.append((request, sorted(indices, key=request.length)))
        self._last_arrival = request.arrived
        self.size += len(indices)

    def oldest(self) -> float:
        """The time when the oldest request arrived; infinity if none waits."""
        return min((request.arrived for request, _ in self._requests), default=math.inf)

    def delay(self, now: float) -> float:
        """The seconds to wait for further requests: until none has arrived for `QUIET`, but at most until the
        oldest one has waited for `PATIENCE`."""
        return max(0.0, min(self._last_arrival + QUIET, self.oldest() + PATIENCE) - now)

    def take(self, share: int = 1) -> Batch:
        """Remove the parts of the next batch: the next part of the request whose turn it is, and the parts
        closest to it in length, within the budget of its request. They are chosen from about one in `share`
        of the waiting parts, one of each request in turn, so that a long request does not hold up others.
        """
        self._requests = [(request, rest) for request, rest in self._requests if not request.future.done()]
        self.size = sum(len(indices) for _, indices in self._requests)
        if not self._requests:
            return []
        first, its_parts = self._requests[0]
        same = [pair for pair in self._requests if pair[0].kind == first.kind]
        most = min(math.ceil(self.size / share), 2 * first.budget // batches.SHORT)
        anchor = first.length(its_parts[-1])

        def distance(candidate: tuple[Request, int]) -> int:
            request, index = candidate
            return abs(request.length(index) - anchor)

        batch: dict[Request, list[int]] = {}
        longest = 0
        for count, (request, index) in enumerate(sorted(islice(_in_turn(same), max(1, most)), key=distance)):
            longest = max(longest, request.length(index))
            if count and longest * (count + 1) > first.budget:
                break
            batch.setdefault(request, []).append(index)
        rest = [
            (request, [i for i in parts if i not in batch.get(request, ())])
            for request, parts in self._requests
        ]
        self._requests = [pair for pair in [*rest[1:], rest[0]] if pair[1]]
        self.size = sum(len(parts) for _, parts in self._requests)
        return list(batch.items())


def _in_turn(requests: Sequence[tuple[Request, list[int]]]) -> Iterator[tuple[Request, int]]:
    """The next part of each request, then the one after it of each request, and so on."""
    for depth in range(1, 1 + max(len(parts) for _, parts in requests)):
        yield from ((request, parts[-depth]) for request, parts in requests if depth <= len(parts))


class Batcher:
    """Threads that translate requests. Parts of up to `SHORT` tokens have `workers` threads. Longer parts
    have one thread of their own, so that short parts need not wait for them."""

    def __init__(self, workers: int = 1):
        """`workers` is the largest number of workers of a model."""
        self.counts: Counter[str] = Counter(failures_total=0)  # what the threads have done
        self._condition = threading.Condition()
        self._short, self._long = WaitingParts(), WaitingParts()
        self._idle = 0  # threads that wait for short parts
        self._closed = False
        cores = torch.get_num_threads()
        # The same number for all, because results depend on it; see `Translator.translate`.
        arguments = max(1, cores // workers), cores
        queues = [self._short] * workers + [self._long]
        self._threads = [
            threading.Thread(target=self._work, args=(queue, *arguments), name="serve", daemon=True)
            for queue in queues
        ]
        for thread in self._threads:
            thread.start()

    def submit(
        self, translator: Translator, texts: Sequence[str], n_best: int = 1, alignments: bool = False
    ) -> "Future[list[Translation]]":
        """Translate texts as `Translator.translate` does.

        Raises QueueFullError if too many parts wait, UsageError if a line begins with the tag of another
        language or if there are fewer than `n_best` hypotheses.
        """
        translator.decoding.require_hypotheses(n_best)
        texts = [valid_text(text) for text in texts]
        parts = translator.splitter.parts_of(texts, [], 0, alignments)
        config = translator.decoding
        task = DecodingTask(config, parts, translator.target_lang, n_best, alignments, scored=False)
        tokens = batches.batch_tokens(config, translator.models, translator.device)
        decode = translator.workers.decode_one
        request = Request(texts, task, decode, tokens // config.hypotheses, time.monotonic())
        if not parts:
            request.finish([], [])
            return request.future
        with self._condition:
            if self._closed:
                raise QueueFullError(0)
            if self.waiting >= MOST_WAITING:
                oldest = min(self._short.oldest(), self._long.oldest())
                raise QueueFullError(max(0.0, request.arrived - oldest))
            for queue, is_short in ((self._short, True), (self._long, False)):
                indices = [i for i, part in enumerate(parts) if (len(part.source) <= SHORT) == is_short]
                if indices:
                    queue.add(request, indices)
            self._condition.notify_all()
        return request.future

    @property
    def waiting(self) -> int:
        """The number of parts that wait to be decoded."""
        return self._short.size + self._long.size

    def close(self) -> None:
        """Accept no more requests, and wait until all others are translated."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()
        for thread in self._threads:
            thread.join()

    def _work(self, queue: WaitingParts, threads: int, default: int) -> None:
        use_threads(threads, default)
        while batch := self._next_batch(queue):
            start = time.perf_counter()
            self._decode(batch)
            with self._condition:
                parts = sum(len(indices) for _, indices in batch)
                self.counts.update(batches_total=1, parts_total=parts)
                self.counts["decoding_seconds_total"] += time.perf_counter() - start  # type: ignore[assignment]

    def _next_batch(self, queue: WaitingParts) -> Batch:
        """The next batch, once there is one; an empty one after `close`."""
        with self._condition:
            is_short = queue is self._short
            self._idle += is_short
            batch: Batch = []
            while not batch and (queue.size or not self._closed):
                delay = queue.delay(time.monotonic()) if queue.size else None
                if delay is None or (delay and not self._closed):
                    self._condition.wait(delay)
                else:
                    batch = queue.take(self._idle if is_short else 1)
            self._idle -= is_short
            return batch

    def _decode(self, batch: Batch) -> None:
        """Decode parts, and give them to their requests. If that fails, the parts of each request are decoded
        alone, so that only the requests fail that cannot be translated."""
        first, _ = batch[0]
        parts = [request.task.parts[i] for request, indices in batch for i in indices]
        n_best = max(request.task.n_best for request, _ in batch)
        try:
            found = iter(first.decode(first.task._replace(parts=parts, n_best=n_best)))
            for request, indices in batch:
                request.finish(indices, [next(found) for _ in indices])
        except Exception as error:
            if len(batch) > 1:
                for one in batch:
                    self._decode([one])
                return
            log.warning("a request cannot be translated: %s", error, exc_info=not is_recoverable(error))
            self.counts["failures_total"] += 1
            with suppress(InvalidStateError):  # the client no longer waits
                first.future.set_exception(error)
