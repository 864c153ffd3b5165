"""What a model, or several together, say of the next token. Letters in shapes: see `mtrain.model`."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from mtrain.model.transformer import Transformer

# Sentences that are done leave the batch when they are so large a part of it: it costs a copy of the cache.
WORTH_LEAVING = 0.2


def keep_going(going: Tensor) -> Tensor | None:
    """Which of the sentences, (B) True where one goes on, are to stay in the batch; None: all for now."""
    count = int(going.sum())
    if count and count > (1 - WORTH_LEAVING) * len(going):
        return None
    return going.nonzero().squeeze(1)


class Predictor:
    """B sentences being decoded, each in K rows, by one model or an ensemble of one vocabulary.

    An ensemble averages probabilities, as Marian, fairseq and Sockeye do.
    """

    def __init__(
        self, models: Sequence[Transformer], source: Tensor, source_keep: Tensor, beams: int, max_length: int
    ):
        self.models, self.ids = models, models[0].config
        self.caches = [
            model.start_cache(model.encode(source, source_keep), source_keep, beams, max_length)
            for model in models
        ]

    def next(self, last: Tensor) -> Tensor:
        """Logits (N, V), in fp32 or better, of what follows the tokens `last` (N)."""
        return self._step(last, [None] * len(self.models))

    def next_with_attention(self, last: Tensor) -> tuple[Tensor, Tensor]:
        """As `next`, and where the last layer looks, (N, S): the mean over its heads, and over the models."""
        weights: list[list[Tensor] | None] = [[] for _ in self.models]
        logits = self._step(last, weights)
        seen = [layers[-1][:, :, -1].mean(dim=1) for layers in weights if layers]
        return logits, torch.stack(seen).mean(dim=0).to(logits.dtype)

    def _step(self, last: Tensor, weights: list[list[Tensor] | None]) -> Tensor:
        parts = []
        for model, cache, seen in zip(self.models, self.caches, weights, strict=True):
            logits = model.project(model.decode_next(last[:, None], cache, seen)[:, -1])
            parts.append(logits.to(torch.promote_types(logits.dtype, torch.float32)))
        if len(parts) == 1:
            return parts[0]
        return torch.stack([part.log_softmax(dim=-1) for part in parts]).logsumexp(dim=0) - math.log(
            len(parts)
        )

    def reorder(self, parents: Tensor, sentences: Tensor | None = None) -> None:
        """See `KeyValueCache.reorder`."""
        for cache in self.caches:
            cache.reorder(parents, sentences)
