"""Requests in common batches: what is decoded together, and that no request changes or fails another."""

import math
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("starlette")
from starlette.exceptions import HTTPException

from mtrain.config.sections.decoding import DecodingConfig
from mtrain.decoding.decode import DecodingTask
from mtrain.decoding.split import Part
from mtrain.errors import ModelError, UsageError
from mtrain.serve import batching
from mtrain.serve.batching import Batcher, Request, WaitingParts
from tests.support.training import PAIRS
from tests.support.translation import words_of

SOURCES = [source for source, _ in PAIRS]


def decode(task):
    raise AssertionError


def request(*lengths, arrived=0.0, budget=160, **changes):
    """A request with parts of some lengths."""
    parts = [Part(0, [7] * length, [], (0, number)) for number, length in enumerate(lengths)]
    task = DecodingTask(DecodingConfig(), parts, "de")._replace(**changes)
    return Request(["x"], task, decode, budget, arrived)


def waiting(*requests):
    parts = WaitingParts()
    for one in requests:
        parts.add(one, range(len(one.task.parts)))
    return parts


def taken(parts):
    """The numbers of parts of each request in the next batch."""
    return [*Counter(part.request for part in parts.take()).items()]


def test_idle_threads_wait_until_no_request_has_arrived_for_a_moment():
    parts = waiting(request(5, arrived=1.0), request(5, arrived=1.002))
    assert parts.delay(1.002) == pytest.approx(0.003)
    assert parts.delay(1.005) == 0


def test_no_request_waits_long_for_others():
    arrivals = [1.0 + number / 1000 for number in range(100)]
    parts = waiting(*(request(5, arrived=arrived) for arrived in arrivals))
    assert parts.delay(1.028) == pytest.approx(0.002)
    assert parts.delay(arrivals[-1]) == 0


def test_idle_threads_wait_for_the_clients_of_the_last_batch():
    parts = waiting(request(5, arrived=1.0))
    parts.end(2.0, seconds=1.5)
    assert parts.delay(2.0) == pytest.approx(0.015)
    for number in range(20):
        parts.add(request(5, arrived=2.0 + number / 100), [0])
    assert parts.delay(2.14) == pytest.approx(0.01)
    assert parts.delay(2.15) == 0
    parts.end(3.0, seconds=60.0)
    assert parts.delay(3.0) == pytest.approx(0.03)


def test_a_batch_fits_the_budget():
    short, long = request(10), request(60)
    parts = waiting(request(40), request(39), request(41), request(42), request(40))
    assert sum(count for _, count in taken(parts)) == 3  # of 40, 40, 39; with 41, they have 164 tokens
    parts = waiting(short, long, *(request(9) for _ in range(5)))
    assert long not in dict(taken(parts))
    assert waiting(request(200)).take() != []  # a single part may exceed it


def test_a_batch_consists_of_parts_of_similar_length():
    first, near, far = request(40), request(38), request(16)
    assert dict(taken(waiting(first, far, far, near, budget := request(41)))).keys() == {first, near, budget}


def test_each_request_has_a_part_in_the_batch_before_another_has_two():
    long, short, later = request(*[16] * 50), request(16), request(16)
    parts = waiting(long, short, later)
    assert dict(taken(parts)) == {long: 8, short: 1, later: 1}
    assert len(parts) == 42
    parts.add(newest := request(16), [0])
    assert dict(taken(parts))[newest] == 1


def test_every_part_is_taken_once():
    requests = [request(*range(3, 60, 1 + number)) for number in range(6)]
    parts, found = waiting(*requests), {one: [] for one in requests}
    while batch := parts.take():
        for part in batch:
            found[part.request].append(part.number)
    assert {one: sorted(indices) for one, indices in found.items()} == {
        one: [*range(len(one.task.parts))] for one in requests
    }


def test_idle_threads_share_what_waits():
    parts = waiting(*(request(16) for _ in range(6)))
    for parts.idle in (3, 2, 1):
        assert len(parts.take()) == 2


def test_later_requests_do_not_hold_up_a_long_one_forever():
    parts, batches, found = waiting(long := request(*[16] * 3, budget=16)), 0, 0
    while found < 3:
        parts.add(request(16, budget=16), [0])
        found += dict(taken(parts)).get(long, 0)
        batches += 1
    assert batches < 9


def test_requests_of_another_kind_wait_for_the_next_batch():
    plain, aligned, again = request(16), request(16, alignments=True), request(16)
    parts = waiting(plain, aligned, again)
    assert dict(taken(parts)).keys() == {plain, again}
    assert dict(taken(parts)).keys() == {aligned}


def test_cancelled_requests_are_not_decoded():
    gone, there = request(16, 16), request(16)
    parts = waiting(gone, there)
    gone.future.cancel()
    assert dict(taken(parts)).keys() == {there}
    assert len(parts) == 0
    assert parts.oldest() == math.inf


@pytest.fixture
def batcher():
    running = Batcher()
    yield running
    running.close()


@pytest.fixture
def go(batcher):
    """An event for which decoding waits. It is set in any case, so that the threads end."""
    event = threading.Event()
    yield event
    event.set()


def test_translations_do_not_depend_on_who_else_asks(translator, batcher):
    texts = [*SOURCES[:4], *words_of(2), "", "It rains.\n\nThe sun."]
    alone = [translator.translate([text], n_best=2, alignments=True, scored=False)[0] for text in texts]
    with ThreadPoolExecutor(8) as clients:
        futures = clients.map(lambda text: batcher.submit(translator, [text], 2, True), texts * 2)
        together = [future.result()[0] for future in futures]
    for found, expected in zip(together, alone * 2, strict=True):
        assert (found.text, found.alignment) == (expected.text, expected.alignment)
        assert [one.text for one in found.n_best] == [one.text for one in expected.n_best]
    assert batcher.counts["batches_total"] < batcher.counts["parts_total"]


def test_a_request_of_several_texts_is_answered_in_order(translator, batcher):
    found = batcher.submit(translator, [*SOURCES, "", *SOURCES[::-1]]).result()
    targets = [target for _, target in PAIRS]
    assert [one.text for one in found] == [*targets, "", *targets[::-1]]


def test_a_failing_request_fails_alone(translator, batcher, go, monkeypatch):
    started, real = threading.Event(), translator.workers.decode_one

    def decode(task):
        started.set()
        go.wait()
        if any(task.parts[i].source[0] == bad for i in range(len(task.parts))):
            raise ModelError("cannot be decoded")
        return real(task)

    monkeypatch.setattr(translator.workers, "decode_one", decode)
    bad = translator.splitter.parts_of([SOURCES[1]], [], 0)[0].source[0]
    good = [text for text in SOURCES if translator.splitter.parts_of([text], [], 0)[0].source[0] != bad]
    first = batcher.submit(translator, ["It rains."])
    started.wait()  # so that all others are in one batch
    futures = {text: batcher.submit(translator, [text]) for text in [*good, SOURCES[1]]}
    go.set()
    assert first.result()[0].text == "Es regnet."
    with pytest.raises(ModelError, match="cannot be decoded"):
        futures.pop(SOURCES[1]).result(60)
    assert {text: future.result(60)[0].text for text, future in futures.items()} == {
        text: target for text, target in PAIRS if text in good
    }
    assert batcher.counts["failures_total"] == 1


def test_short_requests_do_not_wait_for_a_long_one(translator, batcher, go, monkeypatch):
    real = translator.workers.decode_one

    def decode(task):
        if len(task.parts[0].source) > batching.SHORT:
            go.wait()
        return real(task)

    monkeypatch.setattr(translator.workers, "decode_one", decode)
    wide = translator.with_settings(max_length_ratio=0.1)
    wide.max_length = 200
    long = batcher.submit(wide, ["cat " * 30])
    assert batcher.submit(translator, ["It rains."]).result(60)[0].text == "Es regnet."
    assert not long.done()
    go.set()
    assert long.result(60)[0].text


def test_a_full_queue_refuses_requests(translator, batcher, go, monkeypatch):
    started, real = threading.Event(), translator.workers.decode_one

    def decode(task):
        started.set()
        go.wait()
        return real(task)

    monkeypatch.setattr(translator.workers, "decode_one", decode)
    monkeypatch.setattr(batching, "MOST_WAITING", 2)
    first = batcher.submit(translator, ["It rains."])
    started.wait()
    batcher.submit(translator, SOURCES[:2]).cancel()
    second = batcher.submit(translator, SOURCES[:2])  # what is canceled does not count
    assert batcher.waiting == 2
    with pytest.raises(HTTPException, match="busy"):
        batcher.submit(translator, ["The sun shines."])
    go.set()
    assert [one.text for one in first.result() + second.result()] == ["Es regnet.", PAIRS[0][1], PAIRS[1][1]]


def test_closing_waits_for_all_translations(translator):
    running = Batcher()
    futures = [running.submit(translator, [text]) for text in SOURCES]
    running.close()
    assert all(future.done() for future in futures)
    with pytest.raises(HTTPException, match="busy"):
        running.submit(translator, ["It rains."])


def test_more_translations_than_hypotheses_are_an_error(translator, batcher):
    with pytest.raises(UsageError, match="only 5 are decoded"):
        batcher.submit(translator, ["It rains."], n_best=9)
