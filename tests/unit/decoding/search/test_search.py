"""Greedy and beam search against brute force, scripted distributions and a plain reference.

A hypothesis of a sentence whose limit is L tokens is any sequence of 1 to L tokens that ends in EOS and has
no EOS before (finished), or any sequence of exactly L tokens without EOS (unfinished). No token is forbidden.
"""

import itertools
import math
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mtrain.decoding.search.beam import Hypothesis
from mtrain.decoding.search.search import maximum_lengths, search
from mtrain.model.incremental import DecodingTransformer
from tests.support.search import EOS, assert_same, build, forced, options, sentences

STOPS = ["default", "first_k", "exact"]
# The beam size, the rule to stop, and the positions of which the default suite compares batches.
BATCH_CASES = [
    (4, "default", "rotary"),
    (4, "first_k", "sinusoidal"),
    (4, "exact", "rotary"),
    (1, "default", "rotary"),
]

# ------------------------------------------------------------------------------------- scripted distributions

Script = Callable[[int, tuple[int, ...]], list[float]]


class Scripted:
    """A stand-in for a model whose logits are script(name, prefix). The name of a sentence is its first
    source id. `fed` contains the prefixes of each step."""

    def __init__(self, script: Script):
        self.script, self.fed = script, []
        self.config = SimpleNamespace(pad_id=0, bos_id=2, eos_id=EOS, positions="sinusoidal", max_positions=9)

    def encode(self, source: Tensor, source_keep: Tensor) -> Tensor:
        return source[:, 0]

    def start_cache(
        self, memory: Tensor, source_keep: Tensor, beams: int, max_length: int
    ) -> SimpleNamespace:
        rows = [(name, ()) for name in memory.tolist() for _ in range(beams)]
        cache = SimpleNamespace(rows=rows, source_keep=source_keep)

        def reorder(parents: Tensor | None, sentences: Tensor | None = None) -> None:
            stay = range(len(cache.rows) // beams) if sentences is None else sentences.tolist()
            rows = [range(beams)] * len(stay) if parents is None else parents.tolist()
            kept = zip(stay, rows, strict=True)
            cache.rows = [cache.rows[sentence * beams + beam] for sentence, row in kept for beam in row]

        cache.reorder = reorder
        return cache

    def decode_next(self, last: Tensor, cache: SimpleNamespace) -> Tensor:
        cache.rows = [(name, (*p, token)) for (name, p), token in zip(cache.rows, last.tolist(), strict=True)]
        self.fed.append([(name, prefix[1:]) for name, prefix in cache.rows])
        assert all(prefix[0] == 2 for _, prefix in cache.rows)  # BOS comes first
        logits = [self.script(name, prefix) for name, prefix in self.fed[-1]]
        return torch.tensor(logits, dtype=torch.float64)

    def project(self, hidden: Tensor) -> Tensor:
        return hidden

    def projects_in_low_precision(self) -> bool:
        return False


def table(probabilities: dict[str, dict[str, float]]) -> Script:
    """Logits from a table of next-token probabilities; "." is EOS, "a" and "b" are 4 and 5. After
    prefixes that are missing in it, EOS is certain."""
    names = "012.ab"

    def script(_: int, prefix: tuple[int, ...]) -> list[float]:
        logits = [-math.inf] * 6
        for token, probability in probabilities.get("".join(names[i] for i in prefix), {".": 1.0}).items():
            logits[names.index(token)] = math.log(probability) + 1.7  # unnormalized, as logits are
        return logits

    return script


def run(script: Script, lengths: list[int], **changes: object) -> tuple[list[list[Hypothesis]], Scripted]:
    """Search sentences named 0, 1, .. of so many source tokens."""
    model = Scripted(script)
    keep = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    source = torch.arange(len(lengths))[:, None].expand(keep.shape)
    return search([model], source, keep, options(**changes)), model


GARDEN_PATH = table(  # the best translation does not begin with the most probable word
    {
        "": {"a": 0.6, "b": 0.4},
        "a": {".": 0.25, "a": 0.4, "b": 0.35},
        "b": {".": 0.9, "a": 0.1},
        "aa": {".": 1.0},
        "ab": {".": 0.6, "a": 0.4},
        "ba": {".": 1.0},
        "aba": {".": 1.0},
    }
)


@pytest.mark.parametrize(
    ("beam_size", "length_penalty", "expected"),
    [
        (1, 0.0, [("aa", 0.24)]),
        (2, 0.0, [("b", 0.36), ("aa", 0.24)]),
        (2, 1.0, [("aa", 0.24), ("b", 0.36)]),  # log 0.24 / 3 > log 0.36 / 2: EOS counts
        (3, 0.0, [("b", 0.36), ("aa", 0.24), ("ab", 0.126)]),  # "a." was fourth in its step, so it is dropped
        (4, 0.0, [("b", 0.36), ("aa", 0.24), ("a", 0.15), ("ab", 0.126)]),
    ],
)
@pytest.mark.parametrize("stop", ["default", "exact"])
def test_hypotheses_equal_those_computed_by_hand(
    beam_size: int, length_penalty: float, expected: list[tuple[str, float]], stop: str
) -> None:
    ((*found,), _) = run(GARDEN_PATH, [10], beam_size=beam_size, length_penalty=length_penalty, stop=stop)
    words = [["ab".index(word) + 4 for word in text] for text, _ in expected]
    assert [hypothesis.ids for hypothesis in found[0]] == words
    assert [math.exp(h.log_prob) for h in found[0]] == pytest.approx([p for _, p in expected])
    scores = [math.log(p) / (len(text) + 1) ** length_penalty for text, p in expected]
    assert [hypothesis.score for hypothesis in found[0]] == pytest.approx(scores)
    assert all(hypothesis.finished for hypothesis in found[0])


def test_exact_continues_while_a_longer_hypothesis_can_still_win() -> None:
    """After two steps "" (log 0.51) and "a" (log 0.294 / 2 = -0.61) are finished, and "aa" is live at
    log 0.196 / 2 = -0.81: worse by now, but at the limit, 6 tokens, it is log 0.1764 / 6 = -0.29."""
    script = table(
        {
            "": {".": 0.51, "a": 0.49},
            "a": {".": 0.6, "a": 0.4},
            "aa": {".": 0.1, "a": 0.9},
            **{"a" * n: {"a": 1.0} for n in (3, 4, 5)},
        }
    )
    for stop, steps in [("first_k", 2), ("default", 2), ("exact", 6)]:
        found, model = run(script, [10], beam_size=2, length_penalty=1.0, stop=stop)
        assert len(model.fed) == steps
        assert (found[0][0].ids, found[0][0].finished) == (([4], True) if steps == 2 else ([4] * 6, False))
    assert found[0][0].score == pytest.approx(math.log(0.1764) / 6)


def test_first_k_stops_where_default_continues() -> None:
    """After two steps "" and "a" are finished, but "aa" is live with a better score than both."""
    script = table(
        {"": {".": 0.3, "a": 0.7}, "a": {".": 0.3, "a": 0.7}, "aa": {".": 0.99, "a": 0.01}, "aaa": {".": 1.0}}
    )
    for stop, lengths in [("first_k", [1, 0]), ("default", [2, 1]), ("exact", [2, 1])]:
        found, _ = run(script, [10], beam_size=2, length_penalty=1.0, stop=stop)
        assert [len(hypothesis.ids) for hypothesis in found[0]] == lengths


# ---------------------------------------------------------------------------- against a reference, one by one


def reference(
    next_log_probs: Callable[[tuple[int, ...]], list[float]],
    beams: int,
    limit: int,
    length_penalty: float,
    stop: str,
) -> list[Hypothesis]:
    """Beam search of one sentence as in Hugging Face (BeamSearchScorer, BeamHypotheses): `default` is
    early_stopping=False, `first_k` True. `never` continues up to the limit; `exact` must find the same."""
    live, pool = [(0.0, ())], []
    for length in range(1, limit + 1):
        candidates = [
            (log_prob + step, (*prefix, token))
            for log_prob, prefix in live
            for token, step in enumerate(next_log_probs(prefix))
        ]
        candidates = sorted(candidates, reverse=True)[: 2 * beams]
        for log_prob, ids in candidates[:beams]:  # EOS beyond the K best is ignored
            if ids[-1] == EOS:
                pool.append(Hypothesis(list(ids[:-1]), log_prob, log_prob / length**length_penalty, True))
        live = [(log_prob, ids) for log_prob, ids in candidates if ids[-1] != EOS][:beams]
        if length == limit:
            pool += [Hypothesis(list(ids), p, p / length**length_penalty, False) for p, ids in live]
        pool = sorted(pool, key=lambda hypothesis: -hypothesis.score)[:beams]
        if len(pool) == beams:
            hopeless = live[0][0] / length**length_penalty <= pool[-1].score
            if stop == "first_k" or (stop == "default" and hopeless):
                break
    return pool


def random_script(seed: int, vocab: int, peak: float, end: float) -> Script:
    """Different logits for every sentence and prefix; EOS is more probable with a larger `end`."""

    def script(name: int, prefix: tuple[int, ...]) -> list[float]:
        generator = torch.Generator().manual_seed(hash((seed, name, prefix)) % 2**62)
        logits = torch.randn(vocab, generator=generator, dtype=torch.float64) * peak
        logits[EOS] += end
        return logits.tolist()

    return script


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**30),
    vocab=st.integers(4, 9),
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=4),
    beams=st.integers(2, 6),
    length_penalty=st.sampled_from([0.0, 0.6, 1.0, 2.0, -0.5]),
    peak=st.sampled_from([0.3, 1.0, 3.0]),
    end=st.sampled_from([-2.0, 0.0, 1.0, 2.0]),
    stop=st.sampled_from(STOPS),
)
def test_random_scripts_give_the_results_of_the_reference(
    seed: int,
    vocab: int,
    lengths: list[int],
    beams: int,
    length_penalty: float,
    peak: float,
    end: float,
    stop: str,
) -> None:
    script = random_script(seed, vocab, peak, end)
    found, _ = run(script, lengths, beam_size=beams, length_penalty=length_penalty, stop=stop)
    for name, (length, hypotheses) in enumerate(zip(lengths, found, strict=True)):
        expected = reference(
            lambda prefix: torch.tensor(script(name, prefix), dtype=torch.float64).log_softmax(-1).tolist(),  # noqa: B023
            beams,
            length // 2 + 1,
            length_penalty,
            "never" if stop == "exact" else stop,
        )
        assert_same(hypotheses, expected)
        assert len({(*h.ids, h.finished) for h in hypotheses}) == len(hypotheses)
        assert [h.score for h in hypotheses] == sorted((h.score for h in hypotheses), reverse=True)


@pytest.mark.parametrize("length_penalty", [-2.0, -0.5, 0.0, 0.6, 1.0])
def test_exact_equals_the_search_up_to_the_limit_in_fewer_steps(length_penalty: float) -> None:
    steps = []
    for seed in range(12):
        script = random_script(seed, 6, 2.0, 1.5)

        def next_log_probs(prefix: tuple[int, ...], script: Script = script) -> list[float]:
            return torch.tensor(script(0, prefix), dtype=torch.float64).log_softmax(-1).tolist()

        found, model = run(script, [16], beam_size=3, length_penalty=length_penalty, stop="exact")
        assert_same(found[0], reference(next_log_probs, 3, 9, length_penalty, "never"))
        steps.append(len(model.fed))
    assert min(steps) < 9  # of the 9 that the limit allows


def test_the_stop_rules_give_different_results_on_random_scripts() -> None:
    results = {stop: [] for stop in STOPS}
    for stop, seed in itertools.product(STOPS, range(30)):
        found, _ = run(random_script(seed, 6, 1.0, 1.0), [20], beam_size=3, length_penalty=1.0, stop=stop)
        results[stop].append([hypothesis.ids for hypothesis in found[0]])
    for one, other in itertools.combinations(STOPS, 2):
        assert sum(a != b for a, b in zip(results[one], results[other], strict=True)) >= 3


@pytest.mark.parametrize("stop", STOPS)
def test_a_transformer_gives_the_results_of_the_reference(stop: str) -> None:
    model = build(11, vocab=8, decoder_layers=2)
    source, keep = sentences(model, [2, 5, 8, 11])
    found = search([DecodingTransformer(model)], source, keep, options(beam_size=3, stop=stop))
    for row, hypotheses in enumerate(found):

        def next_log_probs(prefix: tuple[int, ...], row: int = row) -> list[float]:
            nexts = [(*prefix, token) for token in range(8)]
            before = forced(model, source[row], keep[row], [prefix])[0] if prefix else 0.0
            return [p - before for p in forced(model, source[row], keep[row], nexts)]

        rule = "never" if stop == "exact" else stop
        expected = reference(next_log_probs, 3, int(keep[row].sum()) // 2 + 1, 1.0, rule)
        assert_same(hypotheses, expected)


# ---------------------------------------------------------------------------------- properties of the results


@pytest.mark.parametrize("beams", [2, 5])
def test_eos_candidates_do_not_reduce_the_number_of_live_beams(beams: int) -> None:
    """Even if EOS is the most probable token everywhere, K different prefixes continue in each step."""
    found, model = run(
        random_script(0, 12, 1.0, 9.0), [14], beam_size=beams, length_penalty=0.0, stop="exact"
    )
    assert len(model.fed) > 1
    for step in model.fed[1:]:
        assert len(set(step)) == beams  # all of one sentence
        assert all(EOS not in prefix for _, prefix in step)
    assert len(found[0]) == beams
    assert found[0][0].ids == []  # and the empty translation, most likely here, wins


@pytest.mark.parametrize("beam_size", [1, 3])
@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize(("ratio", "offset"), [(0.5, 1), (1.5, 10), (0.0, 4), (2.0, 1)])
def test_length_limits_are_per_sentence(beam_size: int, stop: str, ratio: float, offset: int) -> None:
    lengths = [7, 1, 4, 12]
    limits = [int(ratio * length + offset) for length in lengths]
    changes = {"max_length_ratio": ratio, "max_length_offset": offset, "stop": stop}
    found, _ = run(random_script(0, 9, 1.0, -99.0), lengths, beam_size=beam_size, **changes)
    for hypotheses, limit in zip(found, limits, strict=True):
        assert len(hypotheses) == beam_size
        assert all(len(h.ids) == limit and not h.finished for h in hypotheses)


@pytest.mark.parametrize("beam_size", [1, 2])
def test_eos_as_the_last_allowed_token_finishes_the_hypothesis(beam_size: int) -> None:
    script = table({"": {"a": 1.0}, "a": {"a": 1.0}, "aa": {".": 0.7, "a": 0.3}})
    found, _ = run(script, [4], beam_size=beam_size)
    assert (found[0][0].ids, found[0][0].finished) == ([4, 4], True)
    assert [(h.ids, h.finished) for h in found[0][1:]] == [([4, 4, 4], False)] * (beam_size - 1)


@pytest.mark.parametrize("beam_size", [1, 3])
def test_learned_positions_cap_the_length(beam_size: int) -> None:
    model = build(0, vocab=8, positions="learned", max_positions=5, output_bias=True)
    model.output_bias.data[EOS] = -99
    source, keep = sentences(model, [2, 5])
    found = search(
        [DecodingTransformer(model)], source, keep, options(beam_size=beam_size, max_length_ratio=1.5)
    )
    assert [{len(h.ids) for h in hypotheses} for hypotheses in found] == [{4}, {5}]


@pytest.mark.parametrize(
    ("beam_size", "stop", "positions"),
    [
        pytest.param(*case, marks=[] if case in BATCH_CASES else pytest.mark.slow)
        for case in itertools.product([1, 4], STOPS, ["sinusoidal", "rotary"])
    ],
)
def test_results_do_not_depend_on_the_batch(beam_size: int, stop: str, positions: str) -> None:
    model = build(2, vocab=9, positions=positions)
    source, keep = sentences(model, [3, 12, 1, 7, 7, 9, 2, 10])
    config = options(beam_size=beam_size, stop=stop, max_length_ratio=2.0)

    def found(rows: list[int], padding: int) -> list[list[Hypothesis]]:
        wider = torch.nn.functional.pad(source[rows], (0, padding), value=5)  # garbage, masked
        return search(
            [DecodingTransformer(model)], wider, torch.nn.functional.pad(keep[rows], (0, padding)), config
        )

    alone = [found([row], 0)[0] for row in range(8)]
    assert len({len(hypotheses[0].ids) for hypotheses in alone}) > 3  # neighbors finish at different times
    for rows, padding in [(list(range(8)), 0), (list(range(8))[::-1], 3), ([4, 1, 6], 1), ([5, 5], 0)]:
        for row, hypotheses in zip(rows, found(rows, padding), strict=True):
            assert_same(hypotheses, alone[row], 1e-12)


def test_the_same_search_twice_is_identical() -> None:
    model = build(4, vocab=9)
    source, keep = sentences(model, [3, 12, 7])
    assert search([DecodingTransformer(model)], source, keep, options()) == search(
        [DecodingTransformer(model)], source, keep, options()
    )


def test_maximum_lengths_do_not_depend_on_the_type_of_the_lengths():
    model, decoding = DecodingTransformer(build(0)), options(max_length_ratio=1.15, max_length_offset=10)
    for dtype in (torch.int64, torch.float32, torch.float64):
        lengths = torch.tensor([100, 40], dtype=dtype)  # 100 * 1.15 is less than 115 in fp64
        assert maximum_lengths([model], lengths, decoding, None).tolist() == [124, 56]
