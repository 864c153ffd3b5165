"""Beam search, batched over sentences. Letters in shapes: see `mtrain.model`."""

import math

import torch
from torch import Tensor

from mtrain.config.schema import DecodingConfig
from mtrain.decoding.constraints import Constraints
from mtrain.decoding.hypothesis import Hypothesis
from mtrain.decoding.predictor import Predictor, keep_going


def beam_search(
    predictor: Predictor,
    source_keep: Tensor,
    limits: Tensor,
    config: DecodingConfig,
    constraints: Constraints,
) -> list[list[Hypothesis]]:
    """Keep the K likeliest prefixes; what ends goes to a pool of its own, ranked by score.

    Each step weighs 2K candidates, so that ends never starve the live beam, and an end counts if it is
    among the K best of them. A sentence is done by `config.stop`, or at its limit (B), where live prefixes
    join the pool.
    """
    ids, beams = predictor.ids, config.beam_size
    sentences, steps = len(limits), int(limits.max())
    tokens = limits.new_full((sentences, beams, steps), ids.pad_id)
    last = limits.new_full((sentences * beams,), ids.bos_id)
    going = torch.arange(sentences, device=limits.device)
    done = torch.zeros_like(limits, dtype=torch.bool)  # of those going
    coverage = _Coverage(source_keep, config) if config.coverage_penalty else None
    live: Tensor | None = None  # (B, K) log-probabilities of the live prefixes
    pool: _Pool | None = None
    for length in range(1, steps + 1):
        if coverage is None:
            logits = predictor.next(last)
        else:
            logits, attention = predictor.next_with_attention(last)
            coverage.add(attention)
        if live is None or pool is None:  # the first step: all beams are alike, so one of them counts
            live = logits.new_full((sentences, beams), -math.inf)
            live[:, 0] = 0
            pool = _Pool(tokens, live)
        totals = constraints.normalizer_(logits, tokens[:, :, : length - 1], going)
        scores, parents, chosen = predictor.candidates(logits, totals, live, 2 * beams)  # (B, 2K) each
        tokens = _pick(tokens, parents)
        tokens[:, :, length - 1] = chosen
        penalty = coverage.penalty(parents) if coverage is not None else torch.zeros_like(scores)
        ended = chosen == ids.eos_id
        ends = scores.masked_fill(~ended | done[:, None], -math.inf)[:, :beams]
        normalised = ends / length**config.length_penalty + penalty[:, :beams]
        pool.add(going, ends, normalised, tokens[:, :beams], length, finished=True)

        live, kept = scores.masked_fill(ended, -math.inf).topk(beams)  # (B, K)
        tokens, parents, penalty = _pick(tokens, kept), _pick(parents, kept), _pick(penalty, kept)
        at_limit = limits[going] == length
        cut = live.masked_fill((done | ~at_limit)[:, None], -math.inf)
        pool.add(going, cut, cut / length**config.length_penalty + penalty, tokens, length, finished=False)

        done |= at_limit | _done(pool.scores[going], live, length, limits[going], config)
        stay = keep_going(~done, len(done) - int(done.sum()))
        if stay is not None:
            if not len(stay):
                break
            going, live, tokens, parents, done = (x[stay] for x in (going, live, tokens, parents, done))
        predictor.reorder(parents, stay)
        if coverage is not None:
            coverage.reorder(parents, stay)
        last = tokens[:, :, length - 1].flatten()
    assert pool is not None
    return pool.hypotheses()


def _pick(rows: Tensor, index: Tensor) -> Tensor:
    """rows (B, X, ..) at index (B, Y), for each sentence its own: (B, Y, ..)."""
    return rows[torch.arange(len(index), device=index.device)[:, None], index]


def _done(pool: Tensor, live: Tensor, length: int, limits: Tensor, config: DecodingConfig) -> Tensor:
    """(B,) bool: whether a sentence stops, by the pool's scores and live log-probabilities, both (B, K)."""
    worst = pool[:, -1]
    if config.stop == "first_k":
        return worst > -math.inf
    # "default" compares at the present length, as Hugging Face's early_stopping=False does. "exact" grants
    # the best live prefix the length at which it would score highest if all its further tokens were free.
    # As for coverage, neither grants less than it may reach: it can only grow, its penalty is at best 0.
    exact = config.stop == "exact" and config.length_penalty > 0
    ideal = limits if exact else torch.full_like(limits, length)
    return live[:, 0] / ideal**config.length_penalty <= worst


class _Coverage:
    """How much each beam has looked at each source token, for the coverage penalty of Wu et al., "Google's
    Neural Machine Translation System", 2016, section 7: beta * sum of log(min(attention so far, 1))."""

    def __init__(self, source_keep: Tensor, config: DecodingConfig):
        self.source_keep, self.beta = source_keep, config.coverage_penalty
        self.sums: Tensor | None = None  # (B, K, S)

    def add(self, attention: Tensor) -> None:
        """Count a step's attention (N, S)."""
        attention = attention.view(len(self.source_keep), -1, attention.size(1))
        self.sums = attention if self.sums is None else self.sums + attention

    def penalty(self, parents: Tensor) -> Tensor:
        """What the children of the beams parents (B, X) score less, (B, X)."""
        assert self.sums is not None
        tiny = torch.finfo(self.sums.dtype).tiny  # so that no attention at all has a logarithm too
        logs = self.sums.clamp(tiny, 1).log().masked_fill(~self.source_keep[:, None], 0)
        return _pick(self.beta * logs.sum(dim=-1), parents)

    def reorder(self, parents: Tensor, sentences: Tensor | None) -> None:
        assert self.sums is not None
        if sentences is not None:
            self.source_keep, self.sums = self.source_keep[sentences], self.sums[sentences]
        self.sums = _pick(self.sums, parents)


class _Pool:
    """The best K ended hypotheses of each of B sentences, best first; empty places score -inf."""

    def __init__(self, tokens: Tensor, live: Tensor):
        self.scores = torch.full_like(live, -math.inf)
        self.log_probs = self.scores.clone()
        self.tokens = tokens.clone()  # (B, K, steps)
        self.lengths = torch.zeros_like(tokens[:, :, 0])
        self.finished = torch.zeros_like(self.lengths, dtype=torch.bool)

    def add(
        self,
        sentences: Tensor,
        log_probs: Tensor,
        scores: Tensor,
        tokens: Tensor,
        length: int,
        finished: bool,
    ) -> None:
        """Offer hypotheses (len(sentences), K) of one length; those of score -inf are none."""
        every = torch.cat([self.scores[sentences], scores], dim=1)
        self.scores[sentences], order = every.topk(scores.size(1))
        lengths = self.lengths.new_full(scores.shape, length)
        offered = (log_probs, tokens, lengths, torch.full_like(lengths, finished, dtype=torch.bool))
        mine = (self.log_probs, self.tokens, self.lengths, self.finished)
        for kept, new in zip(mine, offered, strict=True):
            kept[sentences] = _pick(torch.cat([kept[sentences], new], dim=1), order)

    def hypotheses(self) -> list[list[Hypothesis]]:
        columns = (self.tokens, self.log_probs, self.scores, self.lengths, self.finished)
        return [
            [
                Hypothesis(ids[: length - finished], log_prob, score, finished)
                for ids, log_prob, score, length, finished in zip(*sentence, strict=True)
                if score > -math.inf
            ]
            for sentence in zip(*(column.tolist() for column in columns), strict=True)
        ]
