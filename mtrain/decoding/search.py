"""Greedy and beam search over an explicit cache. Letters in shapes: see `mtrain.model`."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from mtrain.model.attention import KeyValueCache
from mtrain.model.transformer import Transformer
from mtrain.schema import DecodingConfig


@dataclass(frozen=True)
class Hypothesis:
    """One translation as target ids, without BOS and EOS."""

    ids: list[int]
    log_prob: float  # of all its tokens, EOS included, nats
    score: float  # log_prob / length ** length_penalty; the length counts EOS
    finished: bool  # ended by EOS, not cut at the maximum length


def search(
    model: Transformer, source: Tensor, source_keep: Tensor, config: DecodingConfig
) -> list[list[Hypothesis]]:
    """The best `beam_size` hypotheses of each of B sentences, best first.

    `source` (B, S) ids that end in EOS; `source_keep` (B, S) True at tokens. The model is in eval mode.
    """
    lengths = source_keep.sum(1).double()
    limits = (lengths * config.max_length_ratio + config.max_length_offset).long()  # (B,)
    if model.config.positions == "learned":
        limits = limits.clamp(max=model.config.max_positions)
    if config.beam_size == 1:
        return greedy_search(model, source, source_keep, limits, config.length_penalty)
    return beam_search(model, source, source_keep, limits, config)


@torch.inference_mode()
def greedy_search(
    model: Transformer, source: Tensor, source_keep: Tensor, limits: Tensor, length_penalty: float
) -> list[list[Hypothesis]]:
    """The likeliest token at each step, until EOS or `limits` (B,) tokens. One hypothesis a sentence."""
    ids = model.config
    sentences, steps = len(source), int(limits.max())
    cache = model.start_cache(model.encode(source, source_keep), source_keep, 1, steps)
    tokens = source.new_full((sentences, steps), ids.pad_id)
    going = torch.arange(sentences, device=source.device)  # sentences that are not done
    last = source.new_full((sentences, 1), ids.bos_id)
    log_probs: Tensor | None = None
    for step in range(steps):
        logits = _next_logits(model, last, cache)
        if log_probs is None:
            log_probs = logits.new_zeros(sentences)
        best, last_ids = logits.max(dim=-1)
        tokens[going, step] = last_ids
        log_probs[going] += best - logits.logsumexp(dim=-1)
        on = (last_ids != ids.eos_id) & (step + 1 < limits[going])
        if not on.all():
            stay = on.nonzero().squeeze(1)
            if not len(stay):
                break
            going, last_ids = going[stay], last_ids[stay]
            cache.reorder(stay, stay)
        last = last_ids[:, None]
    assert log_probs is not None
    found = []
    for row, limit, log_prob in zip(tokens.tolist(), limits.tolist(), log_probs.tolist(), strict=True):
        finished = ids.eos_id in row[:limit]
        length = row.index(ids.eos_id) + 1 if finished else limit
        score = log_prob / length**length_penalty
        found.append([Hypothesis(row[: length - finished], log_prob, score, finished)])
    return found


def _next_logits(model: Transformer, last: Tensor, cache: KeyValueCache) -> Tensor:
    """Logits (N, V) in fp32 or better after the tokens `last` (N, 1)."""
    logits = model.project(model.decode(last, None, cache.source_keep, cache)[:, -1])
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


@torch.inference_mode()
def beam_search(
    model: Transformer, source: Tensor, source_keep: Tensor, limits: Tensor, config: DecodingConfig
) -> list[list[Hypothesis]]:
    """Keep the K likeliest prefixes; what ends goes to a pool of its own, ranked by length-normalised score.

    Each step weighs 2K candidates, so that ends never starve the live beam, and an end counts if it is
    among the K best of them. A sentence is done by `config.stop`, or at its limit, where live prefixes
    join the pool.
    """
    ids, beams = model.config, config.beam_size
    sentences, steps = len(source), int(limits.max())
    cache = model.start_cache(model.encode(source, source_keep), source_keep, beams, steps)
    tokens = source.new_full((sentences, beams, steps), ids.pad_id)
    last = source.new_full((sentences * beams, 1), ids.bos_id)
    live: Tensor | None = None  # (B, K) log-probabilities of the live prefixes
    pool: _Pool | None = None
    going = torch.arange(sentences, device=source.device)  # sentences that are not done
    for length in range(1, steps + 1):
        logits = _next_logits(model, last, cache)
        if live is None or pool is None:  # the first step: all beams are alike, so one of them counts
            live = logits.new_full((sentences, beams), -math.inf)
            live[:, 0] = 0
            pool = _Pool(tokens, live, config.length_penalty)
        scores, parents, chosen = _candidates(logits, live, 2 * beams)  # (B, 2K) each
        tokens = _pick(tokens, parents)
        tokens[:, :, length - 1] = chosen
        ended = chosen == ids.eos_id
        ends = scores.masked_fill(~ended, -math.inf)
        pool.add(going, ends[:, :beams], tokens[:, :beams], length, finished=True)

        live, kept = scores.masked_fill(ended, -math.inf).topk(beams)  # (B, K)
        tokens, parents = _pick(tokens, kept), _pick(parents, kept)
        at_limit = limits[going] == length
        cut = live.masked_fill(~at_limit[:, None], -math.inf)
        pool.add(going, cut, tokens, length, finished=False)

        done = at_limit | _done(pool.scores[going], live, length, limits[going], config)
        stay = (~done).nonzero().squeeze(1)
        if not len(stay):
            break
        rows = torch.arange(len(going), device=source.device)[:, None] * beams + parents
        if len(stay) < len(going):
            going, live, tokens, rows = going[stay], live[stay], tokens[stay], rows[stay]
            cache.reorder(rows.flatten(), stay)
        else:
            cache.reorder(rows.flatten())
        last = tokens[:, :, length - 1].reshape(-1, 1)
    assert pool is not None
    return pool.hypotheses()


def _candidates(logits: Tensor, live: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """The `count` likeliest continuations of a sentence: log-probability, parent beam, token; (B, count)."""
    values, ids = logits.topk(min(count, logits.size(-1)))  # a row cannot win with more than its own best
    values = values - logits.logsumexp(dim=-1, keepdim=True)
    totals = (live.reshape(-1, 1) + values).view(len(live), -1)  # (B, K * count)
    scores, picked = totals.topk(min(count, totals.size(1)))
    return scores, picked // values.size(1), ids.view(len(live), -1).gather(1, picked)


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
    ideal = (
        limits if config.stop == "exact" and config.length_penalty > 0 else torch.full_like(limits, length)
    )
    return live[:, 0] / ideal**config.length_penalty <= worst


class _Pool:
    """The best K ended hypotheses of each of B sentences, best first; empty places score -inf."""

    def __init__(self, tokens: Tensor, live: Tensor, length_penalty: float):
        self.length_penalty = length_penalty
        self.scores = torch.full_like(live, -math.inf)
        self.log_probs = self.scores.clone()
        self.tokens = tokens.clone()  # (B, K, steps)
        self.lengths = torch.zeros_like(tokens[:, :, 0])
        self.finished = torch.zeros_like(self.lengths, dtype=torch.bool)

    def add(self, sentences: Tensor, log_probs: Tensor, tokens: Tensor, length: int, finished: bool) -> None:
        """Offer hypotheses (len(sentences), K) of one length; those of log-probability -inf are none."""
        scores = torch.cat([self.scores[sentences], log_probs / length**self.length_penalty], dim=1)
        self.scores[sentences], order = scores.topk(log_probs.size(1))
        lengths = torch.full_like(self.lengths[sentences], length)
        offered = {"log_probs": log_probs, "tokens": tokens, "lengths": lengths}
        for name, new in {
            **offered,
            "finished": torch.full_like(lengths, finished, dtype=torch.bool),
        }.items():
            mine = getattr(self, name)
            mine[sentences] = _pick(torch.cat([mine[sentences], new], dim=1), order)

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
