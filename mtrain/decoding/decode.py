"""Parts of lines to their best hypotheses, as text: batches of like length, shared by the cores."""

import copy
import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from mtrain.config.schema import DecodingConfig
from mtrain.data.batch import pad
from mtrain.data.batching import cut_by_budget
from mtrain.decoding.alignment import Alignment, align
from mtrain.decoding.forced import force
from mtrain.decoding.hypothesis import Hypothesis
from mtrain.decoding.mbr import rank, sentence_metric
from mtrain.decoding.search import search
from mtrain.decoding.split import Part
from mtrain.decoding.translation import Translation
from mtrain.decoding.workers import Helpers
from mtrain.device import resolve_precision, thread_pool, workers_for
from mtrain.errors import ModelError, UsageError
from mtrain.model.transformer import Transformer
from mtrain.tokenizer.tokenizer import Tokenizer

_LEAST = 256  # tokens of a batch
SHORT = 16  # tokens that the shortest line counts for: each row takes memory for its logits, however short


def in_batches(lengths: Sequence[int], budget: int) -> Iterator[list[int]]:
    """Indices of rows of like length that fit a budget of padded tokens, the longest first."""
    array = np.array(lengths, dtype=np.int64)
    order = np.argsort(array, kind="stable")
    for start, end in reversed(list(pairwise(cut_by_budget(array[order], budget)))):
        yield order[start:end].tolist()


def padded(rows: Sequence[Sequence[int]], fill: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Rows of ids as (rows, longest) on the device, and where they are not padding."""
    matrix, keep = pad(pa.array(rows, pa.list_(pa.int32())), fill)
    return torch.from_numpy(matrix).to(device), torch.from_numpy(keep).to(device)


def _metric(config: DecodingConfig, target_lang: str) -> Any:
    """What minimum Bayes risk measures likeness by, if it is asked for."""
    return sentence_metric(config.mbr, target_lang) if config.mbr else None


class Decoder:
    """Models of one vocabulary, an ensemble if they are several, and how they decode, on a device."""

    def __init__(
        self,
        config: DecodingConfig,
        models: Sequence[Transformer],
        tokenizer: Tokenizer,
        target_lang: str,
        device: torch.device,
        alone: bool = False,
    ):
        """`alone`: without helper processes, for weights that change."""
        self.originals, self.tokenizer, self.device = models, tokenizer, device
        self.config, self.target_lang, self.alone = config, target_lang, alone
        self.precision = resolve_precision(device, config.precision)
        dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(self.precision)
        self.models = [model.for_decoding(dtype) for model in models]
        self.workers = workers_for(device) if config.workers == "auto" else config.workers
        self.pool = thread_pool(self.workers)
        self.helpers = Helpers(0 if alone or device.type != "cpu" else self.workers - 1)
        self.metric = _metric(config, target_lang)

    def parts(self) -> tuple[Sequence[Transformer], Tokenizer, str, torch.device]:
        """What it is made of, but for its config."""
        return self.originals, self.tokenizer, self.target_lang, self.device

    def with_config(self, config: DecodingConfig) -> "Decoder":
        """The same with another config, sharing all that it can: copies of the weights, threads."""
        if (config.precision, config.workers) != (self.config.precision, self.config.workers):
            return Decoder(config, *self.parts(), self.alone)
        other = copy.copy(self)
        other.config, other.metric = config, _metric(config, self.target_lang)
        return other

    def __call__(
        self, parts: Sequence[Part], n_best: int, alignments: bool, scored: bool = True
    ) -> list[list[Translation]]:
        """Up to `n_best` translations of each part, best first, with word alignments if wanted. Their scores
        are NaN unless they are to be `scored`.

        Raises ModelError if the model's outputs are not finite, UsageError if all are barred.
        """
        results: list[list[Translation]] = [[]] * len(parts)
        lengths = [max(SHORT, len(part.source), len(part.prefix)) for part in parts]
        batches = list(in_batches(lengths, self._budget(lengths)))
        mapped = self.pool.map if self.pool and len(batches) > 1 else map
        decoded = mapped(
            lambda rows: self.helpers.decode(self, [parts[row] for row in rows], n_best, alignments, scored),
            batches,
        )
        for rows, batch in zip(batches, decoded, strict=True):
            for row, found in zip(rows, batch, strict=True):
                results[row] = found
        return results

    def _budget(self, lengths: list[int]) -> int:
        """Tokens of a batch: as many as `batch_tokens` allows, but so that the workers get as many batches
        each, of a size that pays."""
        most, total = max(1, self.config.batch_tokens // self.config.hypotheses), sum(lengths)
        rounds = math.ceil(total / (most * self.workers))
        even = math.ceil(total / (max(rounds, 1) * self.workers)) + max(lengths, default=0)
        return min(most, max(_LEAST, even))

    def batch(
        self, parts: Sequence[Part], n_best: int, alignments: bool, scored: bool
    ) -> list[list[Translation]]:
        """As a call, of parts that are decoded together."""
        source, keep = padded([part.source for part in parts], self.models[0].config.pad_id, self.device)
        prefixes, keys = [part.prefix for part in parts], [part.key for part in parts]
        found = search(self.models, source, keep, self.config, prefixes, keys, scored)
        found = [self._possible(hypotheses) for hypotheses in found]
        found = [self._ranked(hypotheses)[:n_best] for hypotheses in found]
        aligned = self._align(parts, source, keep, found) if alignments else None
        texts = iter(self.tokenizer.decode([h.ids for hypotheses in found for h in hypotheses]))
        return [
            [
                Translation(
                    next(texts),
                    h.score if scored else math.nan,
                    h.log_prob if scored else math.nan,
                    len(h.ids) + h.finished,
                    h.finished,
                    aligned[part][k] if aligned else None,
                )
                for k, h in enumerate(hypotheses)
            ]
            for part, hypotheses in enumerate(found)
        ]

    def _possible(self, hypotheses: list[Hypothesis]) -> list[Hypothesis]:
        """Those that were not barred, of which there is one at least."""
        possible = [h for h in hypotheses if h.log_prob > -math.inf]
        config = self.config
        least = config.min_length_offset or config.min_length_ratio
        barring = bool(config.no_repeat_ngram or least or config.forbidden_ids)
        finite = all(h.log_prob < math.inf for h in hypotheses)  # which NaN is not, either
        if not finite or not (possible or (barring and self._weights_are_finite())):
            raise ModelError("the model's outputs are not finite; its weights or its precision are at fault")
        if not possible:
            raise UsageError("what decoding bars leaves a line no translation at all")
        return possible

    def _weights_are_finite(self) -> bool:
        return all(bool(weight.isfinite().all()) for model in self.models for weight in model.parameters())

    def _ranked(self, hypotheses: list[Hypothesis]) -> list[Hypothesis]:
        """The hypotheses of a sentence, best first by `decoding.mbr` if it is set."""
        if self.metric is None:
            return hypotheses
        texts = self.tokenizer.decode([hypothesis.ids for hypothesis in hypotheses])
        return [hypotheses[i] for i in rank(texts, self.metric)]

    def _align(
        self, parts: Sequence[Part], source: Tensor, keep: Tensor, found: list[list[Hypothesis]]
    ) -> list[list[Alignment]]:
        """Word alignments of the hypotheses of each part, by another pass over them."""
        most, special = max(map(len, found)), self.tokenizer.special
        filled = [[*hypotheses, *[hypotheses[0]] * (most - len(hypotheses))] for hypotheses in found]
        rows = [h.ids or [special.eos] for hypotheses in filled for h in hypotheses]
        seen: list[Tensor] = []
        force(self.models, source, keep, padded(rows, special.pad, self.device)[0], seen)
        attention = torch.stack(seen).mean(dim=0).float().cpu().numpy()  # (B * most, T, S)
        return [
            [
                align(
                    attention[part * most + k],
                    self.tokenizer.word_starts(parts[part].source[:-1]),
                    self.tokenizer.word_starts(h.ids, target=True),
                )
                for k, h in enumerate(hypotheses)
            ]
            for part, hypotheses in enumerate(found)
        ]
