"""Beam search, batched over sentences. Symbols in shapes: see `mtrain.model`."""

import math
from typing import NamedTuple, Self

import torch
from torch import Tensor

from mtrain.config.sections.decoding import DecodingConfig
from mtrain.decoding.search.constraints import Constraints
from mtrain.decoding.search.predictor import Predictor, remaining_sentences
from mtrain.kernels.precision import widest_float


class Hypothesis(NamedTuple):
    """One translation as target ids, without BOS and EOS."""

    ids: list[int]
    log_prob: float  # nats, summed over all tokens including EOS, except for a required prefix
    score: float  # log_prob / length ** length_penalty (all tokens and EOS), plus the coverage penalty
    finished: bool  # ended with EOS, not cut at the maximum length


def beam_search(predictor: Predictor, source_keep: Tensor, constraints: Constraints) -> "Pool":
    """Return the best K hypotheses of each sentence, best first.

    Each step ranks 2K candidates, so that at least K of them continue a prefix. A candidate that ends with
    EOS is added to the sentence's pool of finished hypotheses if it is among the K best. `config.stop` says
    when the search of a sentence ends; it always ends at the sentence's maximum length (B), where the live
    prefixes are added to the pool as unfinished hypotheses.
    """
    config, max_lengths = constraints.config, constraints.max_lengths
    model_config, beams = predictor.model_config, config.beam_size
    sentences, steps = len(max_lengths), int(max_lengths.max())
    tokens = max_lengths.new_full((sentences, beams, steps), model_config.pad_id)
    active = torch.arange(sentences, device=max_lengths.device)  # sentences that are still in the batch
    done = torch.zeros_like(max_lengths, dtype=torch.bool)  # which of the active sentences are done
    coverage = _Coverage(source_keep, config) if config.coverage_penalty else None
    logits = _step(predictor, max_lengths.new_full((sentences * beams,), model_config.bos_id), coverage)
    # (B, K) log-probabilities of the live prefixes. At the first step, all are equal: only one is continued.
    live = logits.new_full((sentences, beams), -math.inf)
    live[:, 0] = 0
    pool = Pool.empty(tokens, live)
    limits = set(max_lengths.tolist())
    for length in range(1, steps + 1):
        log_normalizers = constraints.apply_(logits, tokens[:, :, : length - 1], active)
        scores, parents, chosen = predictor.topk(logits, log_normalizers, live, 2 * beams)  # (B, 2K) each
        constraints.make_prefix_certain_(scores, length, active)
        tokens = pick(tokens, parents)
        tokens[:, :, length - 1] = chosen
        penalty = coverage.penalty(parents) if coverage is not None else torch.zeros_like(scores)
        ended = chosen == model_config.eos_id
        ends = scores.masked_fill(~ended | done[:, None], -math.inf)[:, :beams]
        power = length**config.length_penalty
        ended_tokens, lengths = tokens[:, :beams], tokens.new_full((len(tokens), beams), length)
        finished = torch.ones_like(lengths, dtype=torch.bool)
        pool.add(active, Pool(ends / power + penalty[:, :beams], ends, ended_tokens, lengths, finished))

        live, kept = scores.masked_fill(ended, -math.inf).topk(beams)  # (B, K)
        tokens, parents = pick(tokens, kept), pick(parents, kept)
        at_limit = max_lengths[active] == length
        if length in limits:
            cut = live.masked_fill((done | ~at_limit)[:, None], -math.inf)
            pool.add(active, Pool(cut / power + pick(penalty, kept), cut, tokens, lengths, ~finished))

        done |= at_limit | search_ends(pool.scores[active], live, lengths[:, 0], max_lengths[active], config)
        remaining = remaining_sentences(~done, beams)
        if remaining is not None:
            if not len(remaining):
                break
            active, done = active[remaining], done[remaining]
            tokens, parents = tokens[remaining], parents[remaining]
            live = live[remaining]
        predictor.reorder(parents, remaining)
        if coverage is not None:
            coverage.reorder(parents, remaining)
        logits = _step(predictor, tokens[:, :, length - 1].flatten(), coverage)
    return pool


def _step(predictor: Predictor, last: Tensor, coverage: "_Coverage | None") -> Tensor:
    """Logits (N, V) of the tokens that follow `last` (N). Adds the attention of this step to `coverage`."""
    if coverage is None:
        return predictor.step(last)
    logits, attention = predictor.step_with_attention(last)
    coverage.add(attention)
    return logits


def pick(rows: Tensor, index: Tensor) -> Tensor:
    """rows (B, X, ..) indexed by index (B, Y) within each sentence: (B, Y, ..)."""
    if rows.is_cuda:  # in one kernel
        index = index.view(*index.shape, *[1] * (rows.dim() - 2))
        return rows.gather(1, index.expand(-1, -1, *rows.shape[2:]))
    return rows[torch.arange(len(index), device=index.device)[:, None], index]


def search_ends(
    pool: Tensor, live: Tensor, lengths: Tensor, max_lengths: Tensor, config: DecodingConfig
) -> Tensor:
    """(B,) bool: whether the search of each sentence ends after `lengths` (B) tokens.

    `pool` (B, K) are the scores of finished hypotheses, `live` (B, K) the log-probabilities of live prefixes,
    both best first.
    """
    worst = pool[:, -1]  # -inf until the pool is full
    if config.stop == "first_k":
        return worst > -math.inf
    # The search ends when the best live prefix is not expected to reach the pool. "default" compares its
    # score at its current length, like Hugging Face's early_stopping=False. "exact" compares the highest
    # score that it can still reach: all remaining tokens have probability 1, and with a positive length
    # penalty, the longest hypothesis scores highest. The coverage penalty is left out, as it is at most 0.
    exact = config.stop == "exact" and config.length_penalty > 0
    final_length = max_lengths if exact else lengths
    return live[:, 0] / final_length**config.length_penalty <= worst


class _Coverage:
    """The coverage penalty of Wu et al., "Google's Neural Machine Translation System", 2016, section 7.

    It is beta times the sum over source tokens of log(min(a, 1)), where a is the attention that a beam has
    paid to the token in all steps: 0 if each token has received 1 or more, negative otherwise.
    """

    def __init__(self, source_keep: Tensor, config: DecodingConfig):
        self.source_keep, self.beta = source_keep, config.coverage_penalty
        self.sums: Tensor | None = None  # (B, K, S), the attention of all steps

    def add(self, attention: Tensor) -> None:
        """Add the attention weights (N, S) of one step."""
        attention = attention.view(len(self.source_keep), -1, attention.size(1))
        self.sums = attention if self.sums is None else self.sums + attention

    def penalty(self, parents: Tensor) -> Tensor:
        """The penalty (B, X), at most 0, of continuations of the beams `parents` (B, X)."""
        assert self.sums is not None
        tiny = torch.finfo(self.sums.dtype).tiny  # avoids log(0)
        logs = self.sums.clamp(tiny, 1).log().masked_fill(~self.source_keep[:, None], 0)
        # In fp64, because the order of summation on a CPU depends on the length, including padding.
        sums = logs.sum(dim=-1, dtype=widest_float(logs.device)).to(logs.dtype)
        return pick(self.beta * sums, parents)

    def reorder(self, parents: Tensor, sentences: Tensor | None) -> None:
        """Keep some sentences (None: all), and let each beam continue its parent; see `Predictor.reorder`."""
        assert self.sums is not None
        if sentences is not None:
            self.source_keep, self.sums = self.source_keep[sentences], self.sums[sentences]
        self.sums = pick(self.sums, parents)


class Pool(NamedTuple):
    """The best K complete hypotheses of each of B sentences, best first; unused entries have score -inf."""

    scores: Tensor  # (B, K)
    log_probs: Tensor  # (B, K)
    tokens: Tensor  # (B, K, steps)
    lengths: Tensor  # (B, K)
    finished: Tensor  # (B, K) bool

    @classmethod
    def empty(cls, tokens: Tensor, live: Tensor) -> Self:
        """A pool for hypotheses like `tokens` (B, K, steps), and log-probabilities like `live` (B, K)."""
        scores, lengths = torch.full_like(live, -math.inf), torch.zeros_like(tokens[:, :, 0])
        return cls(scores, scores.clone(), tokens.clone(), lengths, lengths.bool())

    def add(self, sentences: Tensor | slice, others: "Pool") -> None:
        """Add hypotheses of the `sentences`. Those with score -inf are ignored."""
        scores = torch.cat([self.scores[sentences], others.scores], dim=1)
        order = scores.topk(self.scores.size(1)).indices
        for column, other in zip(self, others, strict=True):
            column[sentences] = pick(torch.cat([column[sentences], other], dim=1), order)

    def hypotheses(self, n_best: int | None = None) -> list[list[Hypothesis]]:
        """The hypotheses of each sentence, best first: all, or at most `n_best`."""
        columns = (self.tokens, self.log_probs, self.scores, self.lengths, self.finished)
        return [
            [
                Hypothesis(ids[: length - finished], log_prob, score, finished)
                for ids, log_prob, score, length, finished in zip(*sentence, strict=True)
                if score != -math.inf  # NaN is kept, so that `decode_batch` reports it
            ]
            for sentence in zip(*(column[:, :n_best].tolist() for column in columns), strict=True)
        ]
