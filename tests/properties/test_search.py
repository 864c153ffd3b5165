"""Search: greedy equals a beam of one, the widest beam equals brute force, scores equal the full model's."""

import pytest
import torch
from hypothesis import strategies as st

from mtrain.decoding.search.beam import beam_search
from mtrain.decoding.search.constraints import Constraints
from mtrain.decoding.search.predictor import Predictor
from mtrain.decoding.search.search import search
from mtrain.model.incremental import DecodingTransformer
from tests.support.search import (
    BOS_IS_PAD,
    EOS,
    USUAL,
    assert_same,
    brute_force,
    build,
    forced,
    options,
    sentences,
    tokens,
)

seeds, penalties = st.integers(0, 2**30), st.sampled_from([0.0, 0.6, 1.0, 2.0, -0.7])
positions = st.sampled_from(["sinusoidal", "learned", "rotary"])


def test_greedy_takes_the_most_likely_token_and_equals_a_beam_of_one(tried):
    lengths = st.lists(st.integers(1, 13), min_size=1, max_size=5)

    @tried(4, length_penalty=penalties, lengths=lengths, positions=positions, seed=seeds)
    def check(length_penalty, lengths, positions, seed):
        model = build(seed, vocab=9, positions=positions)
        source, keep = sentences(model, lengths)
        config = options(beam_size=1, length_penalty=length_penalty, max_length_ratio=1.0)
        greedy = search([DecodingTransformer(model)], source, keep, config)
        limits = keep.sum(1) + 1
        predictor = Predictor([DecodingTransformer(model)], source, keep, 1, int(limits.max()))
        constraints = Constraints(config, keep.sum(1), limits, model.config, None)
        beam = beam_search(predictor, keep, constraints).hypotheses()
        for row, (ours, same) in enumerate(zip(greedy, beam, strict=True)):
            target: list[int] = []
            while len(target) < limits[row] and EOS not in target:
                nexts = [(*target, token) for token in range(9)]
                log_probs = forced(model, source[row], keep[row], nexts)
                target = list(nexts[max(range(9), key=log_probs.__getitem__)])
            assert [tokens(hypothesis, EOS) for hypothesis in ours] == [tuple(target)]
            assert_same(same, ours)


def test_the_widest_beam_equals_brute_force(tried):
    """With a vocabulary of five and at most four tokens."""
    lengths = st.lists(st.integers(1, 7), min_size=1, max_size=4)

    @tried(
        4, length_penalty=penalties, special=st.sampled_from([USUAL, BOS_IS_PAD]), lengths=lengths, seed=seeds
    )
    def check(length_penalty, special, lengths, seed):
        model = build(seed, **special)
        source, keep = sentences(model, lengths)
        config = options(beam_size=5**4, length_penalty=length_penalty, stop="exact")
        for row, found in enumerate(search([DecodingTransformer(model)], source, keep, config)):
            assert_same(
                found, brute_force(model, source[row], keep[row], lengths[row] // 2 + 1, length_penalty)
            )


def test_reported_scores_equal_those_of_the_full_model(tried):
    precisions = st.sampled_from([(torch.float64, 1e-10), (torch.float32, 1e-4)])
    lengths = st.lists(st.integers(1, 14), min_size=1, max_size=4)

    @tried(
        12, precision=precisions, positions=positions, beams=st.integers(1, 5), lengths=lengths, seed=seeds
    )
    def check(precision, positions, beams, lengths, seed):
        dtype, tolerance = precision
        model = build(seed, vocab=12, dtype=dtype, positions=positions, decoder_layers=2)
        source, keep = sentences(model, lengths)
        config = options(beam_size=beams, length_penalty=0.8, max_length_ratio=1.0)
        for row, hypotheses in enumerate(search([DecodingTransformer(model)], source, keep, config)):
            targets = [tokens(hypothesis, EOS) for hypothesis in hypotheses]
            log_probs = forced(model, source[row], keep[row], targets)
            assert [h.log_prob for h in hypotheses] == pytest.approx(log_probs, abs=tolerance)
            scores = [log_prob / len(t) ** 0.8 for log_prob, t in zip(log_probs, targets, strict=True)]
            assert [h.score for h in hypotheses] == pytest.approx(scores, abs=tolerance)
