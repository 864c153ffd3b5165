"""What a translation may not say next. Letters in shapes: see `mtrain.model`."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from mtrain.config.schema import DecodingConfig, ModelConfig
from mtrain.errors import UsageError
from mtrain.kernels.topk import logsumexp

FREE = -1  # in a matrix of prefixes: no token is demanded here


class Constraints:
    """Bars tokens for B sentences: those that are forbidden, EOS before the least length, what would say an
    n-gram again, and all that departs from the beginning that a user has given, which outweighs the others.

    Barred is a token, not its probability: the others keep theirs, so a translation's log-probability is the
    model's, whatever was barred on the way, unless `renormalize` or `force_eos` ask for what Hugging Face's
    `generate` does.
    """

    def __init__(
        self,
        config: DecodingConfig,
        lengths: Tensor,
        limits: Tensor,
        ids: ModelConfig,
        prefixes: Sequence[Sequence[int]] | None,
    ):
        """`lengths` (B) of the sources and `limits` (B) of their translations. Raises UsageError if an id is
        forbidden that there is not."""
        self.eos_id, self.ngram, self.renormalize = ids.eos_id, config.no_repeat_ngram, config.renormalize
        if config.forbidden_ids and max(config.forbidden_ids) >= ids.target_vocab_size:
            there = f"the ids of this model are 0 to {ids.target_vocab_size - 1}"
            raise UsageError(f"decoding.forbidden_ids: {max(config.forbidden_ids)} is no token; {there}")
        self.forbidden = torch.tensor(config.forbidden_ids, dtype=torch.long, device=lengths.device)
        self.limits = limits if config.force_eos else None
        least = lengths * config.min_length_ratio + config.min_length_offset
        self.least = least.long() if config.min_length_ratio or config.min_length_offset else None
        self.prefixes = None
        if prefixes is not None and any(prefixes):
            longest = max(map(len, prefixes))
            rows = [[*prefix, *[FREE] * (longest - len(prefix))] for prefix in prefixes]
            self.prefixes = torch.tensor(rows, device=lengths.device)  # (B, P)
        bars = (self.least, self.limits, self.prefixes)
        self.any = bool(self.ngram or config.forbidden_ids or any(bar is not None for bar in bars))

    def normalizer_(self, logits: Tensor, tokens: Tensor, sentences: Tensor) -> Tensor:
        """In logits (N, V), put -inf at what may not follow `tokens` (B', K, T), of the `sentences` (B').
        Returns what log-probabilities are logits less of, (N, 1)."""
        total = logsumexp(logits)
        if not self.any:
            return total
        rows = self.bar_(logits, tokens, sentences)
        if self.renormalize:  # if nothing is left, anything will do
            total = logsumexp(logits).nan_to_num(0.0, math.inf, -math.inf)
        if self.limits is not None:
            ends = (self.limits[sentences] == tokens.size(2) + 1)[:, None]
            eos = torch.where(ends, total.view_as(rows[:, :, 0]), rows[:, :, self.eos_id])
            rows.masked_fill_(ends[:, :, None], -math.inf)
            rows[:, :, self.eos_id] = eos
        return total

    def bar_(self, logits: Tensor, tokens: Tensor, sentences: Tensor) -> Tensor:
        """As `normalizer_`, but that a forced end is not forced. Returns the logits as (B', K, V)."""
        rows, chosen = logits.view(*tokens.shape[:2], -1), tokens.size(2)
        if not self.any:
            return rows
        demanded = None
        if self.prefixes is not None and chosen < self.prefixes.size(1):
            demanded = self.prefixes[sentences, chosen][:, None, None].expand(-1, tokens.size(1), -1)
            kept = rows.gather(2, demanded.clamp(min=0))
        if len(self.forbidden):
            rows[:, :, self.forbidden] = -math.inf
        if self.least is not None:
            early = self.least[sentences] > chosen + 1
            rows[:, :, self.eos_id].masked_fill_(early[:, None], -math.inf)
        if self.ngram and chosen >= self.ngram:
            self._bar_repeated(rows, tokens)
        if demanded is not None:
            rows.masked_fill_(demanded != FREE, -math.inf)
            rows.scatter_(2, demanded.clamp(min=0), torch.where(demanded == FREE, rows[:, :, :1], kept))
        return rows

    def _bar_repeated(self, rows: Tensor, tokens: Tensor) -> None:
        """Bar what would make the last n - 1 tokens an n-gram that there is already."""
        n = self.ngram
        windows = tokens.unfold(2, n, 1)  # (B', K, T-n+1, n)
        last = tokens[:, :, None, tokens.size(2) - n + 1 :]
        repeats = (windows[..., :-1] == last).all(dim=-1)  # (B', K, T-n+1)
        barred = torch.zeros_like(rows).scatter_reduce_(2, windows[..., -1], repeats.to(rows.dtype), "amax")
        rows.masked_fill_(barred > 0, -math.inf)
