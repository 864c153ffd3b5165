"""What a translation may not say next. Letters in shapes: see `mtrain.model`."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from mtrain.schema import DecodingConfig

FREE = -1  # in a matrix of prefixes: no token is demanded here


class Constraints:
    """Bars tokens for B sentences: EOS before the least length, what would say an n-gram again, and all that
    departs from the beginning that a user has given, which outweighs the other two.

    Barred is a token, not its probability: the others keep theirs, so a translation's log-probability is the
    model's, whatever was barred on the way.
    """

    def __init__(
        self, config: DecodingConfig, lengths: Tensor, eos_id: int, prefixes: Sequence[Sequence[int]] | None
    ):
        self.eos_id, self.ngram = eos_id, config.no_repeat_ngram
        least = lengths * config.min_length_ratio + config.min_length_offset
        self.least = least.long() if config.min_length_ratio or config.min_length_offset else None
        self.prefixes = None
        if prefixes is not None and any(prefixes):
            longest = max(map(len, prefixes))
            rows = [[*prefix, *[FREE] * (longest - len(prefix))] for prefix in prefixes]
            self.prefixes = torch.tensor(rows, device=lengths.device)  # (B, P)
        self.any = bool(self.ngram or self.least is not None or self.prefixes is not None)

    def bar_(self, logits: Tensor, tokens: Tensor, sentences: Tensor) -> None:
        """In logits (N, V), put -inf at what may not follow `tokens` (B', K, T), of the `sentences` (B')."""
        chosen = tokens.size(2)
        rows = logits.view(*tokens.shape[:2], -1)
        demanded = None
        if self.prefixes is not None and chosen < self.prefixes.size(1):
            demanded = self.prefixes[sentences, chosen][:, None, None].expand(-1, tokens.size(1), -1)
            kept = rows.gather(2, demanded.clamp(min=0))
        if self.least is not None:
            early = self.least[sentences] > chosen + 1
            rows[:, :, self.eos_id].masked_fill_(early[:, None], -math.inf)
        if self.ngram and chosen >= self.ngram:
            self._bar_repeated(rows, tokens)
        if demanded is not None:
            rows.masked_fill_(demanded != FREE, -math.inf)
            rows.scatter_(2, demanded.clamp(min=0), torch.where(demanded == FREE, rows[:, :, :1], kept))

    def _bar_repeated(self, rows: Tensor, tokens: Tensor) -> None:
        """Bar what would make the last n - 1 tokens an n-gram that there is already."""
        n = self.ngram
        windows = tokens.unfold(2, n, 1)  # (B', K, T-n+1, n)
        last = tokens[:, :, None, tokens.size(2) - n + 1 :]
        repeats = (windows[..., :-1] == last).all(dim=-1)  # (B', K, T-n+1)
        barred = torch.zeros_like(rows).scatter_reduce_(2, windows[..., -1], repeats.to(rows.dtype), "amax")
        rows.masked_fill_(barred > 0, -math.inf)
