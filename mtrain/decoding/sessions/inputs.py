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
from mtrain.kernels.sequences import Packed
from mtrain.tokenizer.rows import Rows as PackedRows

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
    """What is known of each sentence, as views of one buffer of integers, which is copied to the device at
    once. Sentences that fill the buffer up have neither source tokens nor positions."""

    spans: Tensor  # (B, 2) the place of the first source token among those of all sentences, and their number
    limits: Tensor  # (B) maximum lengths; 0: no sentence
    min_lengths: Tensor  # (B)
    prefixes: Tensor  # (B, T) the tokens that translations begin with, then FREE; (B, 0) without any
    noise: Tensor  # (B, K, T) of `noise_keys`; (B, K, 0) without samples

    @classmethod
    def of(cls, shape: Shape, device: torch.device, pinned: bool = False) -> tuple[Tensor, Tensor, Self]:
        """A new int64 buffer for a shape, filled with zeros, and views of it: the source ids (B*S) of all
        sentences, and the inputs."""
        sentences, beams, source, positions, prefixed, sampled = shape
        parts = [(sentences * source,), (sentences, 2), (sentences,), (sentences,)]
        parts += [(sentences, positions * prefixed), (sentences, beams, positions * sampled)]
        sizes = [math.prod(part) for part in parts]
        buffer = torch.zeros(sum(sizes), dtype=torch.int64, device=device, pin_memory=pinned)
        views = zip(torch.split(buffer, sizes), parts, strict=True)
        source_ids, *inputs = (view.view(part) for view, part in views)
        return buffer, source_ids, cls(*inputs)

    def fill(self, source_ids: Tensor, batch: Batch, limits: Tensor) -> int:
        """Store a batch, whose translations have these maximum lengths; its source ids in `source_ids` (B*S).
        Returns their number."""
        count, config = len(batch.rows), batch.config
        ids, lengths = map(torch.from_numpy, PackedRows.from_lists(batch.rows))
        source_ids[: len(ids)] = ids
        firsts, counts = self.spans.unbind(1)
        counts.zero_()
        counts[:count] = lengths
        firsts.copy_(counts.cumsum(0) - counts)
        self.limits.zero_()
        self.limits[:count] = limits
        self.min_lengths[:count] = minimum_lengths(lengths.double(), config)
        if positions := self.prefixes.size(1):
            assert batch.prefixes is not None
            self.prefixes.fill_(FREE)
            self.prefixes[:count] = padded(batch.prefixes, FREE, limits.device, positions)[0]
        if config.samples is not None:
            noise = noise_keys(config.seed, batch.keys, config.samples, int(limits.max()))
            self.noise[:count, :, : noise.size(2)] = noise
        return len(ids)

    def sources(self, tokens: int, longest: int) -> Packed:
        """The sentences as sequences of up to `longest` source tokens. If `tokens` are more than they have,
        the surplus, up to `longest` or a third of all, forms further sequences."""
        firsts, counts = self.spans.unbind(1)
        surplus = torch.arange(tokens // (3 * longest) + 2, device=firsts.device)
        ends = (firsts[-1:] + counts[-1:] + longest * surplus).clamp(max=tokens)
        starts = torch.cat([firsts, ends]).int()
        place = torch.arange(tokens, dtype=torch.int32, device=starts.device)
        place -= starts[torch.searchsorted(starts, place, right=True) - 1]
        return Packed(starts, place, longest)
