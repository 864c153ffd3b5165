"""All search options together, compared with brute force: forbidden tokens are never generated, the scores of
the others are unchanged, and the best translation is found."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mtrain.config.sections.decoding import DecodingConfig
from mtrain.decoding.search.beam import Hypothesis
from mtrain.decoding.search.search import search
from mtrain.errors import UsageError
from mtrain.kernels.attention.dispatch import recording
from mtrain.model.incremental import DecodingTransformer
from mtrain.model.transformer import Transformer
from tests.support.search import EOS, assert_same, build, options, sentences, tokens
from tests.support.transformer import hidden_states


@torch.no_grad()
def probabilities(
    models: list[Transformer], source: Tensor, keep: Tensor, targets: list[tuple[int, ...]]
) -> tuple[Tensor, Tensor]:
    """Log-probabilities (N, T) of the tokens of N targets of one sentence, and the attention (N, S) that each
    source token received in total.

    Computed without a cache, by each model of the ensemble separately: the log-probability is the logarithm
    of the mean probability.
    """
    tokens = torch.tensor(targets)
    inputs = torch.cat([torch.full((len(targets), 1), models[0].config.bos_id), tokens[:, :-1]], dim=1)
    rows = source[keep].expand(len(targets), -1)
    everything = torch.ones_like(rows, dtype=torch.bool)
    steps, received = [], []
    for model in models:
        memory = model.encode(rows, everything)
        with recording(cross_from=0) as weights:
            hidden = model.decode(inputs, memory, everything)
        steps.append(model.project(hidden).softmax(-1).gather(2, tokens[..., None])[..., 0])
        received.append(weights[-1].mean(1).sum(1))  # over heads, then over positions
    return torch.stack(steps).mean(0).log(), torch.stack(received).mean(0)


def allowed(target: tuple[int, ...], limit: int, prefix: list[int], least: int, ngram: int) -> bool:
    ended = target[-1] == EOS
    words = target[:-1] if ended else target
    if (
        EOS in words
        or (not ended and len(target) != limit)
        or list(words[: len(prefix)]) != prefix[: len(words)]
    ):
        return False
    if ended and (len(target) < least or len(words) < len(prefix)):
        return False
    for end in (
        range(len(prefix) + 1, len(target) + 1) if ngram else ()
    ):  # the prefix itself may contain repetitions
        new = target[max(0, end - ngram) : end]
        earlier = [target[i : i + ngram] for i in range(end - ngram)]
        if len(new) == ngram and new in earlier:
            return False
    return True


def brute_force(
    models: list[Transformer],
    source: Tensor,
    keep: Tensor,
    limit: int,
    config: DecodingConfig,
    prefix: list[int],
) -> list[Hypothesis]:
    least = int(int(keep.sum()) * config.min_length_ratio + config.min_length_offset)
    found = []
    for length in range(1, limit + 1):
        targets = [
            target
            for target in itertools.product(range(models[0].config.target_vocab_size), repeat=length)
            if allowed(target, limit, prefix, least, config.no_repeat_ngram)
        ]
        if not targets:
            continue
        for target, steps, received in zip(
            targets, *probabilities(models, source, keep, targets), strict=True
        ):
            total, finished = float(steps[len(prefix) :].sum()), target[-1] == EOS
            penalty = config.coverage_penalty * float(received.clamp(max=1).log().sum())
            score = total / length**config.length_penalty + penalty
            found.append(Hypothesis(list(target[: length - finished]), total, score, finished))
    return sorted(found, key=lambda hypothesis: -hypothesis.score)


@settings(max_examples=12)
@given(
    seed=st.integers(0, 1000),
    lengths=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    length_penalty=st.sampled_from([0.0, 0.6, 1.0, -0.5]),
    coverage=st.sampled_from([0.0, 0.2, 1.0]),
    least=st.sampled_from([(0.0, 0), (0.0, 1), (0.4, 1)]),
    ngram=st.integers(0, 3),
    prefix=st.lists(st.sampled_from([0, 1, 2, 4]), max_size=2),
    size=st.integers(1, 2),
)
def test_all_options_together_equal_brute_force(
    seed: int,
    lengths: list[int],
    length_penalty: float,
    coverage: float,
    least: tuple[float, int],
    ngram: int,
    prefix: list[int],
    size: int,
) -> None:
    models = [build(seed + number) for number in range(size)]
    source, keep = sentences(models[0], lengths)
    prefixes = [prefix, *[[]] * (len(lengths) - 1)]
    config = options(
        beam_size=5**4,
        stop="exact",
        length_penalty=length_penalty,
        coverage_penalty=coverage,
        min_length_ratio=least[0],
        min_length_offset=least[1],
        no_repeat_ngram=ngram,
    )
    found = search([DecodingTransformer(model) for model in models], source, keep, config, prefixes)
    for row, (length, begins) in enumerate(zip(lengths, prefixes, strict=True)):
        limit = max(length // 2 + 1, len(begins) + 1 if begins else 0)
        expected = brute_force(models, source[row], keep[row], limit, config, begins)
        assert_same(found[row], expected, tolerance=1e-9)


@pytest.mark.parametrize("beam_size", [1, 3])
@pytest.mark.parametrize("samples", [None, 4])
def test_forbidden_tokens_are_never_generated(beam_size: int, samples: int | None) -> None:
    model = build(3, vocab=9)
    source, keep = sentences(model, [4, 9, 12, 12])
    limits = {
        "max_length_ratio": 1.0,
        "max_length_offset": 6,
        "min_length_ratio": 0.5,
        "min_length_offset": 3,
    }
    config = options(beam_size=beam_size, samples=samples, no_repeat_ngram=2, **limits)
    prefixes = [[4, 5], [], [8, 8, 8], [1]]
    keys = [(n, 0) for n in range(4)]
    found = search([DecodingTransformer(model)], source, keep, config, prefixes, keys)
    free = config.model_copy(update={"no_repeat_ngram": 0})
    assert found != search([DecodingTransformer(model)], source, keep, free, prefixes, keys)
    for row, (length, prefix, hypotheses) in enumerate(zip([4, 9, 12, 12], prefixes, found, strict=True)):
        assert len(hypotheses) == (samples or beam_size)
        for hypothesis in hypotheses:
            target = tokens(hypothesis, EOS)
            assert hypothesis.ids[: len(prefix)] == prefix
            assert length // 2 + 3 <= len(target) <= length + 6
            bigrams = list(itertools.pairwise(target[max(0, len(prefix) - 1) :]))
            assert len(set(bigrams)) == len(bigrams)
            [steps], _ = probabilities([model], source[row], keep[row], [target])
            assert hypothesis.log_prob == pytest.approx(float(steps[len(prefix) :].sum()), abs=1e-9)


@torch.no_grad()
def as_generate(
    model: Transformer, source: Tensor, keep: Tensor, limit: int, config: DecodingConfig
) -> list[Hypothesis]:
    """All translations of a sentence by the rules of Hugging Face's `generate`, best first.

    Forbidden tokens have no probability; `renormalize` distributes theirs over the other tokens. The last
    token before the limit is a forced EOS, which costs nothing.
    """
    found = []
    for length in range(1, limit + 1):
        for target in itertools.product(range(model.config.target_vocab_size), repeat=length):
            if EOS in target[:-1] or target[-1] != EOS or set(target) & set(config.forbidden_ids):
                continue
            rows, inputs = source[keep][None], torch.tensor([[model.config.bos_id, *target[:-1]]])
            hidden = hidden_states(model, rows, torch.ones_like(rows, dtype=torch.bool), inputs)
            shares = model.project(hidden)[0].softmax(-1)
            if config.renormalize:
                shares[:, config.forbidden_ids] = 0
                shares /= shares.sum(-1, keepdim=True)
            steps = shares[torch.arange(length), torch.tensor(target)].log()
            total = float(steps[: length - (length == limit)].sum())
            found.append(Hypothesis(list(target[:-1]), total, total / length**config.length_penalty, True))
    return sorted(found, key=lambda hypothesis: -hypothesis.score)


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("forbidden", [[], [4], [1, 2]])
@pytest.mark.parametrize("length_penalty", [0.0, 1.0])
def test_forbidden_and_forced_tokens_are_as_in_generate(renormalize, forbidden, length_penalty) -> None:
    model = build(2)
    source, keep = sentences(model, [2, 5])
    config = options(
        beam_size=5**4,
        stop="exact",
        length_penalty=length_penalty,
        forbidden_ids=forbidden,
        force_eos=True,
        renormalize=renormalize,
    )
    found = search([DecodingTransformer(model)], source, keep, config)
    for row, length in enumerate([2, 5]):
        assert_same(found[row], as_generate(model, source[row], keep[row], length // 2 + 1, config), 1e-9)
    greedy = search([DecodingTransformer(model)], source, keep, config.model_copy(update={"beam_size": 1}))
    assert all(hypothesis.finished for [hypothesis] in greedy)
    assert not {i for [hypothesis] in greedy for i in hypothesis.ids} & set(forbidden)


def test_unknown_forbidden_ids_are_errors_and_forbidding_all_ids_leaves_no_probability() -> None:
    model = build(2)
    source, keep = sentences(model, [2])
    with pytest.raises(
        UsageError, match=r"forbidden_ids: no token has the id 5; the ids of this model are 0 to 4"
    ):
        search([DecodingTransformer(model)], source, keep, options(forbidden_ids=[5]))
    for renormalize in (False, True):
        forbidden = options(forbidden_ids=[0, 1, 2, 3, 4], beam_size=2, renormalize=renormalize)
        assert all(
            h.log_prob == -math.inf for h in search([DecodingTransformer(model)], source, keep, forbidden)[0]
        )


def test_a_prefix_longer_than_the_limit_is_kept_and_continued() -> None:
    model = build(1, vocab=7)
    source, keep = sentences(model, [2, 2])
    prefix = [4, 5, 6, 4, 5, 6, 4, 4]
    for beam_size in (1, 4):
        long, short = search(
            [DecodingTransformer(model)], source, keep, options(beam_size=beam_size), [prefix, []]
        )
        assert all(h.ids[:8] == prefix and len(tokens(h, EOS)) == 9 for h in long)
        assert short == search([DecodingTransformer(model)], source, keep, options(beam_size=beam_size))[1]


@pytest.mark.parametrize("beam_size", [2, 40])
def test_a_prefix_leaves_fewer_tokens_than_the_beam_has_candidates(beam_size: int) -> None:
    """The size of the vocabulary is not a multiple of the group size of `beam_topk`."""
    model = build(1, vocab=331)
    source, keep = sentences(model, [2, 2])
    for hypothesis in search(
        [DecodingTransformer(model)], source, keep, options(beam_size=beam_size), [[330, 5], []]
    )[0]:
        assert hypothesis.ids[:2] == [330, 5] and max(hypothesis.ids) < 331


def test_an_ensemble_of_a_model_with_itself_changes_nothing() -> None:
    model, other = build(0, vocab=8), build(1, vocab=8)
    source, keep = sentences(model, [3, 7])
    for config in (options(beam_size=1), options(beam_size=4)):
        alone = search([DecodingTransformer(model)], source, keep, config)
        twice = search([DecodingTransformer(model), DecodingTransformer(model)], source, keep, config)
        for ours, same in zip(twice, alone, strict=True):
            assert_same(ours, same)
        assert search([DecodingTransformer(model), DecodingTransformer(other)], source, keep, config) != alone


def test_the_coverage_penalty_scores_the_attention_to_each_source_token() -> None:
    """Each source token adds the logarithm of the attention that it received, up to 1, times the penalty."""
    found = []
    for beta in (0.0, 5.0):
        model = build(7, vocab=6)
        source, keep = sentences(model, [8, 8, 8])
        config = options(beam_size=50, coverage_penalty=beta, max_length_ratio=0.0, max_length_offset=4)
        found.append([h[0].ids for h in search([DecodingTransformer(model)], source, keep, config)])
        for hypothesis in search([DecodingTransformer(model)], source, keep, config)[0]:
            _, received = probabilities([model], source[0], keep[0], [tokens(hypothesis, EOS)])
            missing = float(received.clamp(max=1).log().sum())
            target = tokens(hypothesis, EOS)
            assert hypothesis.score == pytest.approx(hypothesis.log_prob / len(target) + beta * missing)
            assert missing < 0 and math.isfinite(missing)
    assert found[0] != found[1]
