"""Decoding sessions without graphs, on a CPU, against the search of `mtrain.decoding.search`."""

import gc
import logging
import math
import random
import threading
import weakref
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from mtrain.decoding.decode import DecodingTask, Ensemble, decode_batch
from mtrain.decoding.search.beam import Hypothesis
from mtrain.decoding.search.search import search
from mtrain.decoding.sessions import session as session_module
from mtrain.decoding.sessions.inputs import Batch, Inputs, Shape
from mtrain.decoding.sessions.session import LOOK_EVERY, Session, bucket
from mtrain.decoding.sessions.sessions import Sessions
from mtrain.decoding.split import Part
from mtrain.errors import UsageError
from mtrain.graph_capture import CaptureError, GraphPool
from mtrain.model.incremental import DecodingTransformer
from mtrain.model.static_decoder import StaticDecoder
from tests.support.search import EOS, assert_same, build, options, sentences

Found = list[list[Hypothesis]]


def make_models(seed: int, count: int = 1, **changes: Any) -> list[DecodingTransformer]:
    """Models whose translations end at different positions."""
    models = []
    for number in range(count):
        sizes = {
            "vocab": 30,
            "d_model": 16,
            "heads": 2,
            "ffn_dim": 16,
            "output_bias": True,
            "max_positions": 64,
        }
        model = build(7 * seed + number, dtype=torch.float32, **{**sizes, **changes}).requires_grad_(False)
        if model.output_bias is not None:
            model.output_bias.normal_()
            model.output_bias[EOS] += 1
        models.append(DecodingTransformer(model))
    return models


@pytest.fixture(autouse=True)
def shrink_from_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Move the unfinished sentences of small batches, too."""
    monkeypatch.setattr(session_module, "SHRINK_FROM", 0)


class Case:
    """Models, sentences, and what is wanted of them."""

    def __init__(self, models: list[DecodingTransformer], lengths: Sequence[int], prefixed: bool = False):
        self.models = models
        self.source, self.keep = sentences(models[0].transformer, list(lengths))
        self.rows = [row[keep].tolist() for row, keep in zip(self.source, self.keep, strict=True)]
        self.prefixes = [[5, 7, 4, 8][: n % 5] for n in range(len(lengths))] if prefixed else None
        self.keys = [(n, 0) for n in range(len(lengths))]

    def expected(self, **settings: Any) -> Found:
        """What the search without sessions finds."""
        config = options(**settings)
        return search(self.models, self.source, self.keep, config, self.prefixes, self.keys)

    def found(self, sessions: Sessions, **settings: Any) -> Found:
        """What a session finds."""
        found = sessions.search(Batch(self.rows, options(**settings), self.prefixes, self.keys))
        assert found is not None
        return found

    def check(self, sessions: Sessions | None = None, **settings: Any) -> None:
        """Compare two batches of a session, the second one in reverse order, with the search."""
        sessions, expected = sessions or Sessions(self.models), self.expected(**settings)
        compare(self.found(sessions, **settings), expected)
        for one in (self.rows, self.keys, self.prefixes or []):
            one.reverse()
        compare(self.found(sessions, **settings), expected[::-1])
        for one in (self.rows, self.keys, self.prefixes or []):
            one.reverse()


def compare(found: Found, expected: Found) -> None:
    """Assert that hypotheses are equal, unless some of their tokens were forbidden."""
    for ours, theirs in zip(found, expected, strict=True):
        ours, theirs = ([h for h in some if h.log_prob > -math.inf] for some in (ours, theirs))
        assert_same(ours, theirs, tolerance=1e-5)


def random_case(seed: int) -> tuple[Case, dict[str, Any]]:
    """Models of a random architecture, sentences and settings."""
    draw = random.Random(seed)
    sizes = {
        "vocab": draw.choice([9, 30, 170]),
        "norm": draw.choice(["pre", "post"]),
        "positions": draw.choice(["sinusoidal", "sinusoidal_interleaved", "learned", "rotary"]),
        "activation": draw.choice(["relu", "gelu", "silu", "swiglu"]),
        "tie_embeddings": draw.choice(["none", "decoder", "all"]),
        "output_bias": draw.random() < 0.7,
        "heads": draw.choice([1, 2, 4]),
        "encoder_layers": draw.choice([1, 2]),
        "decoder_layers": draw.choice([1, 2]),
    }
    settings = {
        "beam_size": draw.choice([1, 2, 5]),
        "stop": draw.choice(["default", "first_k", "exact"]),
        "length_penalty": draw.choice([0.0, 0.6, 1.0, 2.0, -0.7]),
        "max_length_ratio": draw.choice([0.5, 1.5, 2.0]),
        "max_length_offset": draw.choice([1, 10]),
        "min_length_ratio": draw.choice([0.0, 0.0, 0.3]),
        "forbidden_ids": draw.choice([[], [], [5, 7]]),
        "force_eos": draw.random() < 0.2,
        "renormalize": draw.random() < 0.2,
    }
    if draw.random() < 0.3:
        settings |= {"beam_size": 1, "samples": draw.choice([1, 3]), "temperature": draw.choice([0.7, 1.0])}
        settings |= {"top_k": draw.choice([0, 4]), "top_p": draw.choice([1.0, 0.8])}
    lengths = [draw.randint(1, 23) for _ in range(draw.randint(1, 40))]
    models = make_models(seed, draw.choice([1, 1, 2]), **sizes)
    return Case(models, lengths, prefixed=draw.random() < 0.3), settings


@pytest.mark.parametrize(
    "seed", [*range(4), *[pytest.param(n, marks=pytest.mark.slow) for n in range(4, 150)]]
)
def test_hypotheses_equal_those_of_the_search(seed):
    case, settings = random_case(seed)
    case.check(**settings)


@pytest.mark.parametrize("settings", [
    {"beam_size": 1},
    {"beam_size": 5, "stop": "first_k", "length_penalty": 0.6},
    pytest.param({"beam_size": 5, "stop": "default"}, marks=pytest.mark.slow),
    pytest.param({"beam_size": 5, "stop": "exact", "force_eos": True}, marks=pytest.mark.slow),
])  # fmt: skip
def test_results_do_not_depend_on_the_buffers(settings, monkeypatch):
    """Neither on the number of sentences that the buffers have room for, nor on when the others move."""
    models = make_models(3)
    case = Case(models, [(5 * n) % 17 + 1 for n in range(7)])
    settings = {"max_length_ratio": 1.5, "max_length_offset": 20, **settings}
    case.check(**settings)
    monkeypatch.setattr(session_module, "SHRINK_FROM", 10_000)
    case.check(**settings)
    one = Case(models, [9])
    one.check(**settings)


def test_beam_search_returns_as_many_hypotheses_as_are_wanted():
    case, config = Case(make_models(3), [4, 9, 1, 6]), options(beam_size=5)
    expected = [best[:2] for best in case.expected(beam_size=5)]
    assert {len(best) for best in expected} == {2}
    assert search(case.models, case.source, case.keep, config, n_best=2) == expected
    compare(Sessions(case.models).search(Batch(case.rows, config, n_best=2)) or [], expected)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of sentences in each step of a decoder."""
    sizes: list[int] = []
    decode_next = StaticDecoder.decode_next

    def counted(decoder: StaticDecoder, last: Tensor, *arguments: Any) -> Tensor:
        sizes.append(len(last))
        return decode_next(decoder, last, *arguments)

    monkeypatch.setattr(StaticDecoder, "decode_next", counted)
    return sizes


def test_finished_sentences_leave_room_for_the_others(steps, monkeypatch):
    case = Case(make_models(3), [*[1] * 9, 23, 22])
    settings = {"beam_size": 2, "max_length_ratio": 1.0, "force_eos": True, "min_length_ratio": 0.9}
    compare(case.found(Sessions(case.models), **settings), case.expected(**settings))
    assert steps[0] == 12 and steps[-1] == 2 and len(steps) > LOOK_EVERY
    steps.clear()
    monkeypatch.setattr(session_module, "SHRINK_FROM", 128)
    case.found(Sessions(case.models), **settings)  # so few rows are as fast as fewer
    assert {*steps} == {12}


@pytest.mark.parametrize("beam_size", [1, 5])
def test_a_search_ends_soon_after_its_last_sentence(steps, beam_size):
    case = Case(make_models(3), [3, 9, 1])
    case.models[0].bias[EOS] += 6
    settings = {"beam_size": beam_size, "max_length_offset": 60, "stop": "first_k"}
    found = case.found(Sessions(case.models), **settings)
    longest = max(len(h.ids) + h.finished for hypotheses in found for h in hypotheses)
    assert longest <= len(steps) <= longest + LOOK_EVERY + 1 < 60


def test_settings_of_a_batch_are_not_those_of_the_batch_before():
    """Settings that do not make another session."""
    case = Case(make_models(4), [4, 9, 13])
    sessions = Sessions(case.models)
    for settings in (
        {"max_length_ratio": 1.0, "seed": 1},
        {"max_length_ratio": 0.2, "max_length_offset": 3, "min_length_offset": 3, "seed": 2},
        {"max_length_ratio": 1.0, "seed": 1},
    ):
        case.check(sessions, beam_size=1, samples=3, **settings)
        case.check(sessions, beam_size=3, **settings)


def test_threads_use_sessions_at_the_same_time():
    models = make_models(5)
    sessions, cases = Sessions(models), [Case(models, [seed + 1, 4, 9]) for seed in range(4)]
    expected, found = [case.expected(beam_size=3) for case in cases], [[] for _ in cases]

    def work(number: int) -> None:
        for _ in range(3):
            found[number] = cases[number].found(sessions, beam_size=3)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(cases))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for ours, theirs in zip(found, expected, strict=True):
        compare(ours, theirs)


def test_sessions_are_freed_with_their_owner():
    """At once, without the garbage collector: they hold much of the memory of a GPU."""
    case = Case(make_models(6), [4, 9])
    sessions = Sessions(case.models)
    case.check(sessions, beam_size=2)
    caches = [weakref.ref(x) for x in gc.get_objects() if isinstance(x, StaticDecoder)]
    gc.disable()
    try:
        del sessions
        assert caches and not any(cache() for cache in caches)
    finally:
        gc.enable()


def test_only_sessions_used_recently_are_kept():
    case = Case(make_models(6), [4, 9])
    sessions = Sessions(case.models)
    sessions.max_bytes = 0
    for beam_size in (1, 2, 3):
        case.check(sessions, beam_size=beam_size)
        gc.collect()
        assert sum(isinstance(x, Session) for x in gc.get_objects()) == 1


def test_a_failed_capture_is_logged_once_and_changes_nothing(monkeypatch, caplog):
    def fail(pool: GraphPool, work: Any) -> None:
        work()  # as a warm-up does
        raise CaptureError("RuntimeError: this operation is not supported")

    monkeypatch.setattr(GraphPool, "capture", fail)
    with caplog.at_level(logging.WARNING):
        for seed in (7, 8):
            case, settings = random_case(seed)
            case.check(**settings)
    reason = "RuntimeError: this operation is not supported"
    assert caplog.messages == [f"decoding continues without CUDA graphs: {reason}"]


def test_small_steps_are_captured_and_large_ones_are_not(monkeypatch):
    """With many rows, the GPU takes longer than the host, and a capture would take time for nothing."""
    captured: list[GraphPool] = []

    def capture(pool: GraphPool, work: Any) -> Any:
        captured.append(pool)
        return work

    monkeypatch.setattr(GraphPool, "capture", capture)
    models = make_models(4)
    monkeypatch.setattr(session_module, "MAX_STATES_OF_GRAPH", 12 * models[0].config.d_model)
    sessions = Sessions(models)
    for lengths, is_small in [([4, 9, 13], True), ([4, 9], True), ([4, 5, 6, 7], False)]:
        count = len(captured)
        Case(models, lengths).check(sessions, beam_size=4)
        assert (len(captured) > count) == is_small
    assert len({id(pool) for pool in captured}) == 1


@pytest.mark.parametrize("most_states", [0, 2**23])
def test_sources_are_encoded_without_padding(monkeypatch, most_states):
    """With surplus tokens only where a graph has a fixed number of them."""
    counts, encode = [], StaticDecoder.encode

    def counted(decoder: StaticDecoder, ids: Tensor, *arguments: Any) -> None:
        counts.append(len(ids))
        encode(decoder, ids, *arguments)

    monkeypatch.setattr(StaticDecoder, "encode", counted)
    monkeypatch.setattr(session_module, "MAX_STATES_OF_ENCODER_GRAPH", most_states)
    models = make_models(3)
    sessions = Sessions(models)
    for lengths in ([9, 23, 3], [18] * 3, [24, 23, 23], [4, 20]):
        Case(models, lengths).check(sessions, beam_size=2, max_length_offset=20)
    expected = [48, 64, 72, 24] if most_states else [35, 54, 70, 24]
    assert counts[::2] == counts[1::2] == expected


@pytest.mark.parametrize("tokens", [35, 48])
def test_surplus_tokens_form_further_sequences(tokens):
    shape = Shape(sentences=4, beams=1, source=24, positions=32, prefixed=False, sampled=False)
    _, ids, inputs = Inputs.of(shape, torch.device("cpu"))
    rows = [[n] * n for n in (9, 23, 3)]
    assert inputs.fill(ids, Batch(rows, options()), torch.tensor([5, 5, 5])) == 35
    assert ids[:35].tolist() == [n for row in rows for n in row]
    sources = inputs.sources(tokens, longest=24)
    assert sources.starts.tolist() == [0, 9, 32, 35, 35, tokens]
    lengths = sources.starts.diff().tolist()
    assert sources.place.tolist() == [place for length in lengths for place in range(length)]


def test_without_memory_for_a_session_the_search_continues_without(monkeypatch, caplog):
    models, tried = make_models(9), []

    def fail(decoder: StaticDecoder, *_: Any) -> None:
        tried.append(decoder)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(StaticDecoder, "encode", fail)
    tokenizer = SimpleNamespace(decode=lambda rows: [" ".join(map(str, row)) for row in rows])
    ensemble = Ensemble(models, tokenizer, torch.device("cpu"))
    case = Case(models, [4, 9])
    parts = [Part(n, row, [], (n, 0)) for n, row in enumerate(case.rows)]
    task = DecodingTask(options(beam_size=3), parts, "de", n_best=3)
    expected = decode_batch(ensemble, task)
    ensemble = ensemble._replace(sessions=Sessions(models))
    assert decode_batch(ensemble, task) == decode_batch(ensemble, task) == expected
    assert len(tried) == len(caplog.messages) == 2


def test_memory_that_runs_out_frees_the_idle_sessions_of_all_models(monkeypatch):
    """A server has several models."""
    made: list[Any] = []

    class Counted(Session):
        def __init__(self, *arguments: Any):
            made.append(weakref.ref(self))
            super().__init__(*arguments)

    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr("mtrain.decoding.sessions.sessions.Session", Counted)
    idle, other = Case(make_models(9), [4]), Case(make_models(8), [4])
    sessions = Sessions(idle.models)
    for _ in range(2):
        idle.found(sessions)
    gc.collect()
    assert len(made) == 1 and made[0]() is not None
    monkeypatch.setattr(StaticDecoder, "encode", fail)
    assert Sessions(other.models).search(Batch(other.rows, options(), None, other.keys)) is None
    gc.collect()
    assert made[0]() is None


@pytest.mark.parametrize("settings", [{"no_repeat_ngram": 2}, {"coverage_penalty": 0.5}])
def test_what_sessions_do_not_support_is_searched_without_them(settings):
    case = Case(make_models(1), [4])
    assert Sessions(case.models).search(Batch(case.rows, options(**settings))) is None


def test_an_id_that_the_vocabulary_lacks_cannot_be_forbidden():
    case = Case(make_models(1), [4])
    with pytest.raises(UsageError, match="no token has the id 30"):
        case.found(Sessions(case.models), forbidden_ids=[30])


def test_buckets_are_powers_of_two_and_the_halves_between():
    assert [bucket(n) for n in (1, 2, 3, 4, 5, 6, 7, 9, 13, 33, 48, 49)] == [
        *(1, 2, 3, 4, 6, 6, 8, 12, 16, 48, 48, 64)
    ]
    assert bucket(5, least=32) == 32
