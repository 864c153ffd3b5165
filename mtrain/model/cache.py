"""What decoding need not compute again: keys and values. Letters in shapes: see `mtrain.model`."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

REGISTER = 16  # numbers in fp32 that a CPU works on at once; fewer keys take it several times as long
_FIRST_POSITIONS = 64  # that there is room for at first: a limit may be far longer than any translation
_FORGET_EVERY = 8  # positions; what is no beam's past any more goes then
_GAP = 16  # numbers between slots: at strides of a power of two their places in a CPU's caches would collide


class LayerCache:
    """Keys and values of one decoder layer: its own past, and the memory's, projected once.

    The K beams of a sentence share both. A slot of the past holds what one beam added at one position. The
    same slot of all sentences lies together, so that those that are full are one stretch, which a CPU reads
    several times as fast as pieces.
    """

    def __init__(self, cross: Tensor, beams: int, max_length: int):
        """`cross` (2, B, H, S, D): keys and values of the memory."""
        self.source_length = cross.size(3)
        self.least = REGISTER if cross.device.type == "cpu" else 0
        sentences, heads, length, width = cross.shape[1:]
        self.cross = cross.new_empty(2, sentences, heads, max(length, self.least), width)
        self.cross[:, :, :, :length], self.cross[:, :, :, length:] = cross, 0
        self._store(cross.new_empty(2, 0, sentences, heads, width), min(max_length, _FIRST_POSITIONS) * beams)

    def _store(self, own: Tensor, room: int) -> None:
        """Let the past be `own` (2, slots, B, H, D), with `room` for so many slots; take views of it and of
        the memory as batched products want them: keys (B*H, D, ..), values (B*H, .., D)."""
        self.full, row = own.size(1), math.prod(own.shape[2:])
        padded = own.new_empty(2, max(room, self.least), row + _GAP)
        self.own = padded[..., :row].view(2, -1, *own.shape[2:])
        self.own[:, : self.full] = own
        self.own[:, self.full : self.least] = 0
        memory, past = self.cross.flatten(1, 2), self.own.permute(0, 2, 3, 1, 4).flatten(1, 2)
        self.memory = memory[0].transpose(1, 2), memory[1]
        self._past = past[0].transpose(1, 2), past[1]

    @property
    def sentences(self) -> int:
        """How many are being decoded, B."""
        return self.own.size(2)

    def append(self, added: Tensor) -> tuple[Tensor, Tensor]:
        """Store keys and values (2, B, H, K, D) in the slots that follow; returns the keys (B*H, D, slots)
        and values (B*H, slots, D) of all so far, and at least `least`."""
        start, end = self.full, self.full + added.size(3)
        if end > self.own.size(1):
            self._store(self.own[:, :start], 2 * end)
        self.own[:, start:end] = added.permute(0, 3, 1, 2, 4)
        self.full = end
        keys, values = self._past
        slots = max(end, self.least)
        return keys[:, :, :slots], values[:, :slots]

    def keep(self, sentences: Tensor | None, slots: Tensor | None) -> None:
        """Go on with some of the sentences, (B'), and some slots of each of those, (B', slots); None: all."""
        own = self.own[:, : self.full]
        if sentences is not None:
            self.cross = self.cross[:, sentences]
        if slots is not None:
            rows = torch.arange(len(slots), device=slots.device) if sentences is None else sentences
            own = own[:, slots.t(), rows]
        elif sentences is not None:
            own = own[:, :, sentences]
        self._store(own, self.own.size(1))


class KeyValueCache:
    """A LayerCache for each decoder layer, `length` positions decoded.

    Beams that change places move no keys: `past` says which slots are the past of which beam. Masks are kept
    as what they add to attention scores, 0 where queries may look and -inf elsewhere.
    """

    def __init__(self, layers: list[LayerCache], source_keep: Tensor, beams: int):
        self.layers, self.beams, self.length = layers, beams, 0
        keys = layers[0].cross
        self.heads = keys.size(2)
        self.least = layers[0].least
        if source_keep.size(1) < self.least:
            source_keep = F.pad(source_keep, (0, self.least - source_keep.size(1)))
        self.source = None if source_keep.all() else self._for_heads(_bias(source_keep[:, None], keys))
        self.own = _bias(torch.eye(beams, dtype=torch.bool, device=keys.device), keys)  # (K, K)
        self.past = keys.new_zeros(len(source_keep), beams, 0)  # (B, K, slots), if there are several beams

    def extend(self) -> Tensor | None:
        """Count one more position for each beam. Returns what hides slots from them, (B*H or 1, K, slots);
        None: nothing does."""
        self.length += 1
        end = self.layers[0].full + self.beams
        missing = max(0, self.least - end)
        if self.beams == 1:
            if not missing:
                return None
            slots = torch.arange(self.least, device=self.past.device)
            return _bias(slots < end, self.past)[None, None]
        self.past = torch.cat([self.past, self.own.expand(len(self.past), -1, -1)], dim=-1)
        return self._for_heads(F.pad(self.past, (0, missing), value=-math.inf))

    def _for_heads(self, bias: Tensor) -> Tensor:
        """(B, .., ..) as (B*H, .., ..)."""
        return bias[:, None].expand(-1, self.heads, -1, -1).flatten(0, 1)

    def reorder(self, parents: Tensor, sentences: Tensor | None = None) -> None:
        """Let beam k of sentence b continue what its beam parents[b, k] has decoded; (B, K). `sentences`,
        where some are done, are those that go on, and `parents` has their rows alone."""
        if sentences is not None:
            if self.source is not None:
                by_sentence = self.source.view(-1, self.heads, *self.source.shape[1:])
                self.source = by_sentence[sentences].flatten(0, 1)
            self.past = self.past[sentences]
        slots = None
        if self.beams > 1:
            self.past = self.past.gather(1, parents[:, :, None].expand(-1, -1, self.past.size(2)))
            if sentences is not None or self.length % _FORGET_EVERY == 0:
                slots = self._used()
        if sentences is not None or slots is not None:
            for layer in self.layers:
                layer.keep(sentences, slots)

    def _used(self) -> Tensor | None:
        """The slots that are still some beam's past, (B, as many as the most that a sentence has), in their
        order, then others; `past` becomes theirs. None if that is all."""
        used = (self.past == 0).any(dim=1)  # (B, slots)
        count = int(used.sum(dim=1).max())
        if count == used.size(1):
            return None
        slots = used.byte().sort(dim=1, descending=True, stable=True).indices[:, :count]
        self.past = self.past.gather(2, slots[:, None].expand(-1, self.beams, -1))
        return slots


def _bias(allowed: Tensor, like: Tensor) -> Tensor:
    """0 where a mask is True, -inf elsewhere, in the dtype of another tensor."""
    return like.new_zeros(allowed.shape).masked_fill_(~allowed, -math.inf)
