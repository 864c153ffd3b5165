"""Logits do not depend on padding, other sentences, later tokens or the cache."""

import random

import torch
from hypothesis import strategies as st

from tests.support.transformer import KINDS, build, decode_cached, ids, keep, logits

PRECISIONS = st.sampled_from([(torch.float64, 1e-12), (torch.float32, 1e-5)])
kinds, seeds = st.sampled_from(KINDS), st.integers(0, 2**30)
pairs = st.lists(st.tuples(st.integers(1, 12), st.integers(1, 9)), min_size=1, max_size=5)


def test_padding_order_neighbors_and_garbage_change_nothing(tried):
    @tried(15, kind=kinds, precision=PRECISIONS, lengths=pairs, padding=st.integers(0, 6), seed=seeds)
    def check(kind, precision, lengths, padding, seed):
        dtype, tolerance = precision
        model = build(dtype, **kind)
        torch.manual_seed(seed)
        drawn = [(ids(s), ids(t)) for s, t in lengths]
        alone = [logits(model, s[None], keep(len(s)), t[None])[0] for s, t in drawn]
        order = random.Random(seed).sample(range(len(drawn)), len(drawn))
        source = ids(len(order), max(s for s, _ in lengths) + padding)  # garbage, partly overwritten
        target = ids(len(order), max(t for _, t in lengths) + padding)
        for row, i in enumerate(order):
            source[row, : lengths[i][0]], target[row, : lengths[i][1]] = drawn[i]
        kept = torch.arange(source.size(1)) < torch.tensor([[lengths[i][0]] for i in order])
        together = logits(model, source, kept, target)
        for row, i in enumerate(order):
            torch.testing.assert_close(
                together[row, : lengths[i][1]], alone[i], rtol=tolerance, atol=tolerance
            )


def test_a_later_target_token_does_not_change_earlier_logits(tried):
    @tried(20, kind=kinds, length=st.integers(1, 9), share=st.floats(0, 0.99), seed=seeds)
    def check(kind, length, share, seed):
        model, position = build(**kind), int(share * length)
        torch.manual_seed(seed)
        source, target = ids(2, 5), ids(2, length)
        edited = target.clone()
        edited[:, position] = (edited[:, position] - 4 + 11) % 26 + 4
        before, after = (logits(model, source, keep(5, 2), tokens) for tokens in (target, edited))
        assert torch.equal(after[:, :position], before[:, :position])
        assert (after[:, position:] != before[:, position:]).any(-1).all()  # all later ones change


def test_cached_decoding_equals_full_decoding(tried):
    @tried(
        15,
        kind=kinds,
        precision=PRECISIONS,
        lengths=st.lists(st.integers(1, 9), min_size=1, max_size=4),
        beams=st.integers(1, 3),
        length=st.integers(2, 9),
        seed=seeds,
    )
    def check(kind, precision, lengths, beams, length, seed):
        dtype, tolerance = precision
        model, kept = build(dtype, **kind), keep(*lengths)
        torch.manual_seed(seed)
        source, target = ids(*kept.shape), ids(beams * len(lengths), length)
        full = logits(model, source.repeat_interleave(beams, 0), kept.repeat_interleave(beams, 0), target)
        cached = decode_cached(model, source, kept, target, beams)
        torch.testing.assert_close(cached, full, rtol=tolerance, atol=tolerance)
