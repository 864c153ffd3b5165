"""A step of greedy search, sampling or beam search in static buffers: what happens to the logits of one
position. Symbols in shapes: see `mtrain.decoding.sessions`.

The classes compute the same as `mtrain.decoding.search`, without a value that the host has to wait for.
"""

import math
from typing import NamedTuple, Self

import torch
from torch import Tensor

from mtrain.config.sections.decoding import DecodingConfig
from mtrain.decoding.search.beam import Hypothesis, Pool, pick, search_ends
from mtrain.decoding.search.constraints import force_eos_, normalizers_of_allowed
from mtrain.decoding.search.sample import draw
from mtrain.decoding.search.search import ranked_hypotheses
from mtrain.decoding.sessions.inputs import Inputs, Shape
from mtrain.kernels.decoding_step import Allowed, append_tokens, best_continuations, best_tokens
from mtrain.kernels.topk import beam_topk, logsumexp


class Greedy(NamedTuple):
    """The state of greedy search (K is 1), or of K samples of each sentence."""

    last: Tensor  # (B, K) tokens
    tokens: Tensor  # (B, K, T)
    log_probs: Tensor  # (B, K)
    unfinished: Tensor  # (B, K) bool
    past_keep: Tensor | None  # see `self_attention`

    @classmethod
    def empty(cls, shape: Shape, device: torch.device, dtype: torch.dtype) -> Self:
        """Buffers, with log-probabilities of the given type. The past of each row is its own."""
        log_probs = torch.zeros(shape.sentences, shape.beams, dtype=dtype, device=device)
        last = torch.zeros_like(log_probs, dtype=torch.int64)
        tokens = last[:, :, None].repeat(1, 1, shape.positions)
        own = torch.eye(shape.beams, dtype=torch.uint8, device=device).repeat(1, shape.positions)
        past_keep = own.repeat(shape.sentences, 1, 1) if shape.beams > 1 else None
        return cls(last, tokens, log_probs, torch.zeros_like(last, dtype=torch.bool), past_keep)

    def reset(self, inputs: Inputs, bos_id: int) -> None:
        """Start a search."""
        self.last.fill_(bos_id)
        self.log_probs.zero_()
        self.unfinished.copy_((inputs.limits > 0)[:, None].expand_as(self.unfinished))

    def step(self, logits: Tensor, inputs: Inputs, allowed: Allowed, config: DecodingConfig) -> None:
        """Add one token to each row, according to its logits (N, V), which are overwritten."""
        if _is_plain(config):
            chosen, gained = best_tokens(logits, allowed)
        else:
            log_normalizers = _constrain_(logits, inputs, allowed, config)
            if config.samples is None:
                chosen = logits.argmax(dim=1)
            else:
                noise = inputs.noise.index_select(2, allowed.position).flatten().int()
                chosen = draw(logits, noise, config)
            gained = (logits.gather(1, chosen[:, None]) - log_normalizers)[:, 0]
        state = self.last, self.tokens, self.log_probs, self.unfinished
        append_tokens(gained, chosen, state, inputs.limits, allowed.position, allowed.eos_id)
        _make_prefix_certain_(self.log_probs, allowed)

    def done(self) -> Tensor:
        """(B,) bool: whether each sentence is finished."""
        return ~self.unfinished.any(dim=1)

    def columns(self, steps: int, n_best: int | None) -> list[Tensor]:
        """The results after some steps, each (B, ..)."""
        return [self.tokens[:, :, :steps], self.log_probs]

    @staticmethod
    def hypotheses(
        columns: list[Tensor], limits: Tensor, config: DecodingConfig, eos_id: int
    ) -> list[list[Hypothesis]]:
        """The hypotheses of each sentence, best first, from `columns` on the host."""
        tokens, log_probs = columns
        return ranked_hypotheses(tokens, log_probs, limits, config.length_penalty, eos_id)


class Beam(NamedTuple):
    """The state of beam search."""

    last: Tensor  # (B, K) tokens
    tokens: Tensor  # (B, K, T) of the live prefixes
    live: Tensor  # (B, K) their log-probabilities
    finished: Tensor  # (B,) bool
    past_keep: Tensor  # (B, K, T*K), see `self_attention`
    pool: Pool

    @classmethod
    def empty(cls, shape: Shape, device: torch.device, dtype: torch.dtype) -> Self:
        """See `Greedy.empty`."""
        last, tokens, live, unfinished, past_keep = Greedy.empty(shape, device, dtype)
        assert past_keep is not None
        return cls(last, tokens, live, unfinished[:, 0].clone(), past_keep, Pool.empty(tokens, live))

    def reset(self, inputs: Inputs, bos_id: int) -> None:
        """Start a search."""
        self.last.fill_(bos_id)
        self.live.fill_(-math.inf)  # at the first step, all prefixes are equal: only one is continued
        self.live[:, 0].zero_()
        self.finished.copy_(inputs.limits == 0)
        self.pool.scores.fill_(-math.inf)

    def step(self, logits: Tensor, inputs: Inputs, allowed: Allowed, config: DecodingConfig) -> None:
        """Continue the best prefixes by one token, according to the logits (N, V), which are overwritten, and
        collect complete hypotheses; see `beam_search`."""
        beams, k, position = config.beam_size, 2 * config.beam_size, allowed.position
        if _is_plain(config) and k <= logits.size(1):
            scores, parents, chosen = best_continuations(logits, self.live, k, allowed)  # (B, 2K)
        else:
            offsets = self.live - _constrain_(logits, inputs, allowed, config).view_as(self.live)
            scores, parents, chosen = beam_topk(logits, offsets, k)
        _make_prefix_certain_(scores, allowed)
        length, done = position + 1, self.finished[:, None]
        ended, at_limit = chosen == allowed.eos_id, inputs.limits == length
        live, kept = scores.masked_fill(ended, -math.inf).topk(beams)  # (B, K)
        # Candidates come best first. The K best ones that end are complete; at the length limit, so are the K
        # best of the others.
        rank = torch.arange(chosen.size(1), device=chosen.device)
        is_kept = ~ended & ((~ended).cumsum(dim=1) <= beams)
        is_complete = torch.where(ended, rank < beams, is_kept & at_limit[:, None]) & ~done
        log_probs = scores.masked_fill(~is_complete, -math.inf)
        tokens = pick(self.tokens, parents).index_copy_(2, position, chosen[:, :, None])
        lengths, ranking = length.expand_as(chosen), log_probs / length**config.length_penalty
        self.pool.add(slice(None), Pool(ranking, log_probs, tokens, lengths, ended))

        over = search_ends(self.pool.scores, live, lengths[:, 0], inputs.limits, config)
        self.finished.logical_or_(at_limit | over)
        self.live.copy_(live)
        self.tokens.copy_(pick(tokens, kept))
        self.last.copy_(chosen.gather(1, kept))
        _reorder_(self.past_keep, parents.gather(1, kept), position)

    def done(self) -> Tensor:
        """(B,) bool: whether each sentence is finished."""
        return self.finished

    def columns(self, steps: int, n_best: int | None) -> list[Tensor]:
        """The results after some steps, each (B, ..): of the best `n_best` hypotheses, or of all."""
        pool = self.pool._replace(tokens=self.pool.tokens[:, :, :steps])
        return [column[:, :n_best] for column in pool]

    @staticmethod
    def hypotheses(columns: list[Tensor], *_: object) -> list[list[Hypothesis]]:
        """See `Greedy.hypotheses`."""
        return Pool(*columns).hypotheses()


def _is_plain(config: DecodingConfig) -> bool:
    """Whether all logits count for the normalizers, and the best tokens are wanted."""
    return config.samples is None and not config.force_eos and not config.renormalize


def _constrain_(logits: Tensor, inputs: Inputs, allowed: Allowed, config: DecodingConfig) -> Tensor:
    """Set the logits (N, V) of forbidden tokens to -inf. Returns the log-normalizers (N, 1); see
    `Constraints.apply_`."""
    log_normalizers = logsumexp(logits)
    allowed.mask_(logits)
    if config.renormalize:
        log_normalizers = normalizers_of_allowed(logits)
    if config.force_eos:
        rows = logits.view(len(inputs.limits), -1, logits.size(1))
        force_eos_(rows, log_normalizers, inputs.limits == allowed.position + 1, allowed.eos_id)
    return log_normalizers


def _make_prefix_certain_(log_probs: Tensor, allowed: Allowed) -> None:
    """See `Constraints.make_prefix_certain_`."""
    if allowed.prefixes is not None:
        required = allowed.prefixes.index_select(1, allowed.position) >= 0  # (B, 1)
        log_probs.masked_fill_(required & log_probs.isfinite(), 0)


def _reorder_(past_keep: Tensor, parents: Tensor, position: Tensor) -> None:
    """Let each beam see what its parent (B, K) has seen, and the slot of its parent at `position`.
    `past_keep` (B, K, T*K) uint8 is as in `self_attention`."""
    beams = torch.arange(parents.size(1), device=parents.device)
    past_keep.copy_(past_keep.gather(1, parents[:, :, None].expand(-1, -1, past_keep.size(2))))
    past_keep.index_copy_(2, position * len(beams) + beams, (parents[:, :, None] == beams).byte())
