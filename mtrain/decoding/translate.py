"""Lines to translations in the same order: segment, batch by length, search, detokenize.

The one path by which `fit` validates, `translate` translates and `evaluate` scores.
"""

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import Self

import numpy as np
import pyarrow as pa
import torch

from mtrain.data.batch import pad
from mtrain.data.batching import cut_by_budget
from mtrain.decoding.search import Hypothesis, search
from mtrain.device import autocast, decoding_precision, resolve_device
from mtrain.errors import ModelError
from mtrain.model.transformer import Transformer
from mtrain.modelfolder import load_model
from mtrain.schema import DecodingConfig
from mtrain.tokenizer import Tokenizer

log = logging.getLogger(__name__)

WINDOW = 4096  # lines that are read, sorted by length and translated before the next are read


@dataclass(frozen=True)
class Translation:
    """One translation of a line."""

    text: str
    score: float  # log-probability / length ** length_penalty; 0 for an empty line
    log_prob: float  # nats
    tokens: int  # EOS counted
    finished: bool  # ended by the model, not cut at the maximum length


class Translator:
    """A model, its tokenizer and its decoding settings on a device."""

    def __init__(
        self,
        model: Transformer,
        tokenizer: Tokenizer,
        decoding: DecodingConfig,
        max_length: int,
        target_lang: str,
        device: torch.device,
    ):
        self.model, self.tokenizer, self.decoding, self.device = model, tokenizer, decoding, device
        self.max_length, self.target_lang = max_length, target_lang

    @classmethod
    def load(cls, path: str | Path, device: str = "auto", overrides: Iterable[str] = ()) -> Self:
        """Load a model or run folder. `overrides` are `section.key=value` over its config.

        Raises ModelError if the folder is missing or damaged, UsageError if the device is.
        """
        place = resolve_device(device)
        loaded = load_model(Path(path), tuple(overrides))
        config = loaded.config
        model = loaded.model.to(place)
        return cls(model, loaded.tokenizer, config.decoding, config.max_length, config.target_lang, place)

    def translate(self, texts: Iterable[str]) -> list[Translation]:
        """The best translation of each text, in order. An empty text gives an empty translation."""
        return [best[0] for best in self.translate_n_best(texts)]

    def translate_n_best(self, texts: Iterable[str]) -> list[list[Translation]]:
        """Up to `beam_size` translations of each text, best first."""
        texts = [texts] if isinstance(texts, str) else list(texts)
        if not all(isinstance(text, str) for text in texts):
            raise TypeError("texts must be strings")
        encoded = self.tokenizer.encode_source(texts)
        if cut := sum(len(ids) >= self.max_length for ids in encoded):
            log.warning("%d line(s) longer than data.max_length (%d tokens) were cut", cut, self.max_length)
        ids = [[*row[: self.max_length - 1], self.tokenizer.special.eos] for row in encoded]
        results = [[Translation("", 0.0, 0.0, 0, True)]] * len(texts)
        for rows in self._batches([len(row) for row in ids]):
            for row, found in zip(rows, self._search([ids[row] for row in rows]), strict=True):
                results[row] = self._detokenize(found)
        return results

    def translate_lines(self, lines: Iterable[str], window: int = WINDOW) -> Iterator[list[Translation]]:
        """As `translate_n_best` for a stream of any length, in bounded memory: `window` lines at a time."""
        iterator = iter(lines)
        while block := list(islice(iterator, window)):
            yield from self.translate_n_best(block)

    def _batches(self, lengths: list[int]) -> Iterator[list[int]]:
        """Rows of like length that fit the budget, the longest first; rows of EOS alone are left out."""
        order = [row for row in np.argsort(lengths, kind="stable").tolist() if lengths[row] > 1]
        ascending = np.array([lengths[row] for row in order], dtype=np.int64)
        budget = self.decoding.batch_tokens // self.decoding.beam_size
        for start, end in reversed(list(pairwise(cut_by_budget(ascending, budget)))):
            yield order[start:end]

    def _search(self, ids: list[list[int]]) -> list[list[Hypothesis]]:
        matrix, keep = pad(pa.array(ids, pa.list_(pa.int32())), self.model.config.pad_id)
        source, source_keep = (torch.from_numpy(array).to(self.device) for array in (matrix, keep))
        with autocast(self.device, decoding_precision(self.device, self.decoding.precision)):
            found = search(self.model, source, source_keep, self.decoding)
        if not all(found):
            raise ModelError("the model's outputs are not finite; its weights or its precision are at fault")
        return found

    def _detokenize(self, found: list[Hypothesis]) -> list[Translation]:
        texts = self.tokenizer.decode([hypothesis.ids for hypothesis in found])
        return [
            Translation(text, h.score, h.log_prob, len(h.ids) + h.finished, h.finished)
            for text, h in zip(texts, found, strict=True)
        ]
