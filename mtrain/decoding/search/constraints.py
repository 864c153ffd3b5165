"""Decoding constraints: tokens that must not be generated next. Symbols in shapes: see `mtrain.model`."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from mtrain.config.sections.decoding import DecodingConfig
from mtrain.config.sections.model import ModelConfig
from mtrain.errors import UsageError
from mtrain.kernels.topk import logsumexp

FREE = -1  # in a matrix of prefixes: any token may be generated here


class Constraints:
    """The tokens that must not be generated in B sentences: `forbidden_ids`, EOS before the minimum length,
    tokens that would repeat an n-gram, and tokens that deviate from a required prefix. The prefix overrides
    the others.

    A forbidden token gets the logit -inf, and the others keep their probabilities, so the log-probability of
    a translation does not depend on the constraints. With `renormalize` and `force_eos`, it does, as in
    Hugging Face's `generate`. The tokens of a prefix have log-probability 0, as in CTranslate2: otherwise, an
    improbable prefix would cost less in a longer translation, because the score is divided by the length.
    """

    def __init__(
        self,
        config: DecodingConfig,
        lengths: Tensor,
        max_lengths: Tensor,
        model_config: ModelConfig,
        prefixes: Sequence[Sequence[int]] | None,
    ):
        """`lengths` (B) of the sources, `max_lengths` (B) of the translations. Raises UsageError if a
        forbidden id is not in the vocabulary."""
        self.config, self.max_lengths = config, max_lengths
        self.eos_id, self.ngram = model_config.eos_id, config.no_repeat_ngram
        if config.forbidden_ids:
            check_forbidden_ids(config, model_config.target_vocab_size)
        self.forbidden = torch.tensor(config.forbidden_ids, dtype=torch.long, device=lengths.device)
        minimum = minimum_lengths(lengths, config)
        self.min_lengths = minimum if config.min_length_ratio or config.min_length_offset else None
        self.prefixes: Tensor | None = None  # (B, P)
        if prefixes is not None and any(prefixes):
            longest = max(map(len, prefixes))
            rows = [[*prefix, *[FREE] * (longest - len(prefix))] for prefix in prefixes]
            self.prefixes = torch.tensor(rows, device=lengths.device)

    def apply_(self, logits: Tensor, tokens: Tensor, sentences: Tensor) -> Tensor:
        """Set the logits (N, V) of tokens that must not follow `tokens` (B', K, T) of the `sentences` (B') to
        -inf. Returns the log-normalizers (N, 1), to be subtracted to get log-probabilities."""
        of_all = None if self.config.renormalize else logsumexp(logits)
        rows = self.mask_(logits, tokens, sentences)
        log_normalizers = normalizers_of_allowed(logits) if of_all is None else of_all
        if self.config.force_eos:
            force_eos_(rows, log_normalizers, self.max_lengths[sentences] == tokens.size(2) + 1, self.eos_id)
        return log_normalizers

    def mask_(self, logits: Tensor, tokens: Tensor, sentences: Tensor) -> Tensor:
        """As `apply_`, without normalizers and `force_eos`. Returns the logits as (B', K, V)."""
        rows, position = logits.view(tokens.size(0), tokens.size(1), -1), tokens.size(2)
        required = None
        if self.prefixes is not None and position < self.prefixes.size(1):
            required = self.prefixes[sentences, position][:, None, None].expand(-1, tokens.size(1), -1)
            required_logits = rows.gather(2, required.clamp(min=0))
        if len(self.forbidden):
            rows[:, :, self.forbidden] = -math.inf
        if self.min_lengths is not None:
            too_short = self.min_lengths[sentences] > position + 1
            rows[:, :, self.eos_id].masked_fill_(too_short[:, None], -math.inf)
        if self.ngram and position >= self.ngram:
            self._mask_repeated_(rows, tokens)
        if required is not None:
            rows.masked_fill_(required != FREE, -math.inf)
            first = torch.where(required == FREE, rows[:, :, :1], required_logits)
            rows.scatter_(2, required.clamp(min=0), first)
        return rows

    def make_prefix_certain_(self, log_probs: Tensor, length: int, sentences: Tensor) -> None:
        """Set the log-probabilities (B', K) of rows with `length` tokens to 0 in the `sentences` (B') whose
        prefix is at least that long. Values that are not finite remain."""
        if self.prefixes is not None and length <= self.prefixes.size(1):
            required = self.prefixes[sentences, length - 1] != FREE
            log_probs.masked_fill_(required[:, None] & log_probs.isfinite(), 0)

    def _mask_repeated_(self, rows: Tensor, tokens: Tensor) -> None:
        """Set the logits of tokens to -inf that would repeat an n-gram of `tokens`."""
        n = self.ngram
        ngrams = tokens.unfold(2, n, 1)  # (B', K, T-n+1, n)
        last = tokens[:, :, None, tokens.size(2) - n + 1 :]  # the n - 1 tokens before the next one
        repeats = (ngrams[..., :-1] == last).all(dim=-1)  # (B', K, T-n+1)
        masked = torch.zeros_like(rows).scatter_reduce_(2, ngrams[..., -1], repeats.to(rows.dtype), "amax")
        rows.masked_fill_(masked > 0, -math.inf)


def minimum_lengths(lengths: Tensor, config: DecodingConfig) -> Tensor:
    """The minimum lengths (B) of translations of sources with `lengths` (B), including EOS on both sides."""
    return (lengths * config.min_length_ratio + config.min_length_offset).long()


def normalizers_of_allowed(logits: Tensor) -> Tensor:
    """The log-normalizers (N, 1) of logits (N, V), which are -inf at forbidden tokens."""
    # Where all tokens are forbidden, `logsumexp` gives NaN.
    return logsumexp(logits).nan_to_num(0.0, math.inf, -math.inf)


def force_eos_(rows: Tensor, log_normalizers: Tensor, at_limit: Tensor, eos_id: int) -> None:
    """Make EOS certain in logits (B, K, V) with `log_normalizers` (N, 1), in the sentences `at_limit` (B)."""
    at_limit = at_limit[:, None]
    eos = torch.where(at_limit, log_normalizers.view_as(rows[:, :, 0]), rows[:, :, eos_id])
    rows.masked_fill_(at_limit[:, :, None], -math.inf)
    rows[:, :, eos_id] = eos


def check_forbidden_ids(config: DecodingConfig, vocab_size: int) -> None:
    """Raise UsageError if a forbidden id is not in a vocabulary."""
    if max(config.forbidden_ids, default=0) >= vocab_size:
        valid = f"the ids of this model are 0 to {vocab_size - 1}"
        raise UsageError(f"decoding.forbidden_ids: no token has the id {max(config.forbidden_ids)}; {valid}")
