"""Next-token logits of a model or an ensemble. Symbols in shapes: see `mtrain.model`."""

import math
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from mtrain.kernels.attention.dispatch import recording
from mtrain.kernels.linear import MIN_ROWS
from mtrain.kernels.topk import beam_topk, row_topk
from mtrain.model.incremental import DecodingTransformer, Models

# Share of finished sentences at which they are removed from the batch. Removing them copies the cache.
REMOVE_AT = 0.2


def remaining_sentences(active: Tensor, rows: int) -> Tensor | None:
    """Indices of the sentences to keep in a batch of B >= 1 sentences with `rows` rows each, or None to leave
    the batch unchanged for now. `active` (B) is True for sentences that are not finished. On a CPU, finished
    ones are kept where MIN_ROWS rows would not remain."""
    count = int(active.sum())
    missing = _sentences_needed(rows) - count if count and active.device.type == "cpu" else 0
    if count > (1 - REMOVE_AT) * len(active) or count + missing >= len(active):
        return None
    kept = active | ((~active).cumsum(dim=0) <= missing)  # the first finished ones fill up the rows
    return kept.nonzero().squeeze(1)


def _sentences_needed(rows: int) -> int:
    """The number of sentences, of `rows` rows each, that have at least MIN_ROWS rows."""
    return -(-MIN_ROWS // rows)


def average_probabilities(logits: Sequence[Tensor]) -> Tensor:
    """The logits (N, V) of an ensemble, from the logits of its models: the logarithms of the averages of the
    probabilities. The logits of a single model are unchanged."""
    if len(logits) == 1:
        return logits[0]
    averaged = torch.stack([one.log_softmax(dim=-1) for one in logits]).logsumexp(dim=0)
    return averaged - math.log(len(logits))


def log_probs_of(
    model: DecodingTransformer, hidden: Tensor, logits: Tensor, log_normalizers: Tensor, tokens: Tensor
) -> Tensor:
    """The log-probabilities (N, 1) of tokens (N, 1), from logits (N, V), possibly masked, that the model has
    projected from hidden states (N, E), and their log-normalizers (N, 1).

    If they were projected in low precision, the logits of these tokens and of the most probable ones are
    recomputed, and the normalizers corrected, as in `Predictor.topk`.
    """
    values = logits.gather(1, tokens)
    if not model.projects_in_low_precision():
        return values - log_normalizers
    best_values, best = row_topk(logits, 2)
    candidates = torch.cat([tokens, best], dim=1)
    before = torch.cat([values, best_values.masked_fill(best == tokens, -math.inf)], dim=1)  # each once
    after = _recomputed(model, before, hidden[:, None], candidates)
    share_before = (before - log_normalizers).exp().sum(dim=1, keepdim=True)
    share_after = (after - log_normalizers).exp().sum(dim=1, keepdim=True)
    return after[:, :1] - log_normalizers - _change(share_before, share_after)


def _recomputed(model: DecodingTransformer, logits: Tensor, hidden: Tensor, tokens: Tensor) -> Tensor:
    """The logits (...) of tokens (...) in full precision, from hidden states that broadcast to (..., E).
    Logits that are not finite, such as masked ones, are unchanged."""
    return torch.where(logits.abs() < math.inf, model.project_tokens(hidden, tokens), logits)


def _change(before: Tensor, after: Tensor) -> Tensor:
    """What to add to log-normalizers when the logits of some tokens change. `before` and `after` are the
    exponentials of these logits minus the old log-normalizers, summed over the tokens."""
    total = (1 - before).clamp(min=0) + after
    return total.clamp(min=torch.finfo(total.dtype).tiny).log()


class Predictor:
    """Decodes B sentences, each in K rows, with one model or an ensemble of models that share a vocabulary.

    An ensemble averages probabilities, as fairseq and Sockeye do, not the logarithms, as Marian does.
    """

    def __init__(self, models: Models, source: Tensor, source_keep: Tensor, rows: int, max_length: int):
        self.models = models
        self.model_config = models[0].config
        self.rows = rows
        # Whether logits are projected in low precision and can be recomputed.
        self.low_precision = len(models) == 1 and models[0].projects_in_low_precision()
        # On a CPU, the indices of the sentences with some repeated to get MIN_ROWS rows. Callers
        # do not see the repetitions. They stay to the end: `remaining_sentences` keeps batches with few rows.
        self._repeated: Tensor | None = None
        missing = _sentences_needed(rows) - len(source)
        if source.device.type == "cpu" and missing > 0:
            self._repeated = torch.tensor([*range(len(source)), *[0] * missing])
        memories = [model.encode(source, source_keep) for model in models]
        if self._repeated is not None:
            memories = [memory[self._repeated] for memory in memories]
            source_keep = source_keep[self._repeated]
        encoded = zip(models, memories, strict=True)
        self.caches = [model.start_cache(memory, source_keep, rows, max_length) for model, memory in encoded]
        self.hidden = torch.empty(0)  # (N, E) hidden states of the last step, of the last model

    def step(self, last: Tensor) -> Tensor:
        """Logits (N, V), in fp32 or fp64, of the tokens that follow the tokens `last` (N)."""
        logits, count = [], len(last)
        if self._repeated is not None:
            last = last.view(-1, self.rows)[self._repeated].flatten()
        for model, cache in zip(self.models, self.caches, strict=True):
            hidden = model.decode_next(last, cache)
            projected = model.project(hidden)[:count]
            self.hidden = hidden[:count]
            logits.append(projected.to(torch.promote_types(projected.dtype, torch.float32)))
        return average_probabilities(logits)

    def step_with_attention(self, last: Tensor) -> tuple[Tensor, Tensor]:
        """Like `step`, and also the cross-attention weights (N, S) of the last layer, averaged over heads and
        models."""
        with recording(cross_from=0) as maps:  # of each layer of each model, (N or more, H, 1, S)
            logits = self.step(last)
        ends = accumulate(len(cache.layers) for cache in self.caches)
        last_layers = [maps[end - 1][: len(last), :, -1] for end in ends]
        attention = [of_heads.to(logits.dtype).mean(dim=1) for of_heads in last_layers]
        return logits, torch.stack(attention).mean(dim=0)

    def topk(
        self, logits: Tensor, log_normalizers: Tensor, live: Tensor, k: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The best k continuations of each sentence, whose rows have log-probabilities `live` (B, K).

        `logits` (N, V) come from the last `step`, possibly masked, and `log_normalizers` (N, 1) their
        normalizers. Returns log-probabilities, rows within the sentence, and tokens, best first; each has the
        shape (B, k), or more columns if candidates are recomputed, or fewer if there are fewer continuations.

        Logits that were computed in low precision may be tied or in the wrong order. The logits of the
        candidates are therefore recomputed in full precision, and the normalizers, to which they contribute
        most, are corrected.
        """
        log_normalizers = log_normalizers.view_as(live)
        found = beam_topk(logits, live - log_normalizers, max(k, 2) if self.low_precision else k)
        if not self.low_precision:
            return found
        values, parents, tokens = found
        rows = parents + torch.arange(len(live), device=live.device)[:, None] * live.size(1)
        normalizer = log_normalizers.gather(1, parents)
        # A candidate that does not exist may have the token of another one; see `beam_topk`.
        before = logits[rows, tokens].masked_fill(values == -math.inf, -math.inf)
        after = _recomputed(self.models[0], before, self.hidden[rows], tokens)
        none = torch.zeros_like(live)
        share_before = none.scatter_add(1, parents, (before - normalizer).exp())
        share_after = none.scatter_add(1, parents, (after - normalizer).exp())
        log_normalizers = log_normalizers + _change(share_before, share_after)
        log_probs = live.gather(1, parents) - log_normalizers.gather(1, parents) + after
        log_probs, order = log_probs.sort(descending=True)
        return log_probs, parents.gather(1, order), tokens.gather(1, order)

    def argmax(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The most probable token (N) of each row, and its logit (N). Like `topk`, but without the
        normalizers, which take longer to compute than the rest."""
        values, tokens = row_topk(logits, 2 if self.low_precision else 1)
        if self.low_precision:
            exact = _recomputed(self.models[0], values, self.hidden[:, None], tokens)
            values, order = exact.max(dim=1, keepdim=True)
            tokens = tokens.gather(1, order)
        return tokens[:, 0], values[:, 0]

    def reorder(self, parents: Tensor | None, sentences: Tensor | None = None) -> None:
        """See `KeyValueCache.reorder`."""
        if self._repeated is not None and parents is not None:
            parents = parents[self._repeated]
        for cache in self.caches:
            cache.reorder(parents, sentences)
