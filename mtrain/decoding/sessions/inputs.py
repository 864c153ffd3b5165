"""What a batch consists of, in one buffer. Symbols in shapes: see `mtrain.decoding.sessions`."""

import math
from collections.abc import Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor

from mtrain.config.sections.decoding import DecodingConfig
from mtrain.decoding.batches import padded
from mtrain.decoding.search.constraints import FREE, minimum_lengths
from mtrain.decoding.search.sample import noise_keys

Rows = Sequence[Sequence[int]]
Keys = Sequence[tuple[int, ...]]


class Shape(NamedTuple):
    """The sizes of the buffers of a session."""

    sentences: int  # B
    beams: int  # K
    source: int  # S
    positions: int  # T
    prefixed: bool  # whether translations begin with given tokens
    sampled: bool  # whether tokens are drawn


class Batch(NamedTuple):
    """What to search for. `prefixes` and `keys` are as in `mtrain.decoding.search.search`."""

    rows: Rows  # source ids that end with EOS
    config: DecodingConfig
    prefixes: Rows | None = None
    keys: Keys = ()
    n_best: int | None = None  # hypotheses of beam search that are wanted; None: all


class Inputs(NamedTuple):
    """A batch as views of one buffer of integers, which is copied to the device at once. Sentences that fill
    the buffer up have a source of one token and no positions."""

    sources: Tensor  # (B, S)
    source_lengths: Tensor  # (B)
    limits: Tensor  # (B) maximum lengths; 0: no sentence
    min_lengths: Tensor  # (B)
    prefixes: Tensor  # (B, T) the tokens that translations begin with, then FREE; (B, 0) without any
    noise: Tensor  # (B, K, T) of `noise_keys`; (B, K, 0) without samples

    @classmethod
    def of(cls, shape: Shape, device: torch.device, pinned: bool = False) -> tuple[Tensor, Self]:
        """A new buffer and its views."""
        sentences, beams, source, positions, prefixed, sampled = shape
        parts = [(sentences, source), *[(sentences,)] * 3]
        parts += [(sentences, positions * prefixed), (sentences, beams, positions * sampled)]
        sizes = [math.prod(part) for part in parts]
        buffer = torch.zeros(sum(sizes), dtype=torch.int64, device=device, pin_memory=pinned)
        views = zip(torch.split(buffer, sizes), parts, strict=True)
        return buffer, cls(*(view.view(part) for view, part in views))

    def fill(self, batch: Batch, limits: Tensor, eos_id: int) -> None:
        """Store a batch, whose translations have these maximum lengths."""
        count, config = len(batch.rows), batch.config
        self.sources.fill_(eos_id)
        self.sources[:count] = padded(batch.rows, eos_id, limits.device, self.sources.size(1))[0]
        self.source_lengths.fill_(1)
        self.source_lengths[:count] = torch.tensor([len(row) for row in batch.rows])
        self.limits.zero_()
        self.limits[:count] = limits
        self.min_lengths[:count] = minimum_lengths(self.source_lengths[:count].double(), config)
        if positions := self.prefixes.size(1):
            assert batch.prefixes is not None
            self.prefixes.fill_(FREE)
            self.prefixes[:count] = padded(batch.prefixes, FREE, limits.device, positions)[0]
        if config.samples is not None:
            noise = noise_keys(config.seed, batch.keys, config.samples, int(limits.max()))
            self.noise[:count, :, : noise.size(2)] = noise
