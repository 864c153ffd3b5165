"""What a model, or several together, say of the next token. Letters in shapes: see `mtrain.model`."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from mtrain.kernels.topk import beam_topk, row_topk
from mtrain.model.transformer import Transformer

# Sentences that are done leave the batch when they are so large a part of it: it costs a copy of the cache.
WORTH_LEAVING = 0.2


def keep_going(going: Tensor, count: int) -> Tensor | None:
    """Which of the sentences, (B) True at the `count` that go on, are to stay in the batch; None: all for
    now."""
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
        self.hidden = torch.empty(0)  # states (N, E) behind the last logits, of the last model

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
            self.hidden = model.decode_next(last, cache, seen)
            logits = model.project(self.hidden)
            parts.append(logits.to(torch.promote_types(logits.dtype, torch.float32)))
        if len(parts) == 1:
            return parts[0]
        together = torch.stack([part.log_softmax(dim=-1) for part in parts]).logsumexp(dim=0)
        return together - math.log(len(parts))

    def candidates(
        self, logits: Tensor, totals: Tensor, live: Tensor, count: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Of each sentence's rows with log-probabilities live (B, K), the likeliest ways to go on by logits
        (N, V), some barred since `next`, and their normalizers `totals` (N, 1): log-probabilities,
        rows of the sentence, and tokens, each (B, `count` or more, unless there are fewer), the best first.

        Logits that were projected in few bits tie or change places. Those of the candidates are then
        computed anew, and the normalizers, to which they add most, are mended.
        """
        totals = totals.view_as(live)
        rough = self._is_rough()
        found = beam_topk(logits, live - totals, max(count, 2) if rough else count)
        if not rough:
            return found
        _, parents, tokens = found
        rows = parents + torch.arange(len(live), device=live.device)[:, None] * live.size(1)
        total = totals.gather(1, parents)
        before = logits[rows, tokens]
        after = self._sharpened(before, self.hidden[rows], tokens)
        shares = torch.zeros_like(live)  # of probability: those that the candidates had, and now have
        others = 1 - shares.scatter_add(1, parents, (before - total).exp())
        now = others.clamp(min=0) + shares.scatter_add(1, parents, (after - total).exp())
        totals = totals + now.clamp(min=torch.finfo(now.dtype).tiny).log()
        scores, order = (live.gather(1, parents) - totals.gather(1, parents) + after).sort(descending=True)
        return scores, parents.gather(1, order), tokens.gather(1, order)

    def best(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The likeliest token of each row, and its logit; (N) both. As by `candidates`, but without
        normalizers, which take longer than the rest."""
        rough = self._is_rough()
        values, tokens = row_topk(logits, 2 if rough else 1)
        if rough:
            values, order = self._sharpened(values, self.hidden[:, None], tokens).max(dim=1, keepdim=True)
            tokens = tokens.gather(1, order)
        return tokens[:, 0], values[:, 0]

    def _is_rough(self) -> bool:
        """Whether the last logits were projected in few bits, and can be computed anew."""
        return len(self.models) == 1 and self.models[0].projects_in_low_precision(self.hidden)

    def _sharpened(self, logits: Tensor, hidden: Tensor, tokens: Tensor) -> Tensor:
        """The logits (..) of tokens (..), behind states that broadcast to (.., E), computed anew. Those that
        are not finite, such as barred ones, stay as they are."""
        return torch.where(logits.abs() < math.inf, self.models[0].project_tokens(hidden, tokens), logits)

    def reorder(self, parents: Tensor, sentences: Tensor | None = None) -> None:
        """See `KeyValueCache.reorder`."""
        for cache in self.caches:
            cache.reorder(parents, sentences)
