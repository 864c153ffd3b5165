"""The key-value cache of step-by-step decoding. Symbols in shapes: see `mtrain.model`."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from mtrain.kernels.attention.eager import REGISTER

INITIAL_POSITIONS = 64  # allocated initially; the length limit may be far above the length of any translation
COMPACT_EVERY = 8  # positions between removals of keys and values that no beam needs any more
# fp32 numbers of padding between slots. Without it, strides could be large powers of two, so that addresses
# would compete for the same sets of a CPU's cache.
_GAP = 16


class LayerCache:
    """Keys and values of one decoder layer, which the K beams of a sentence share.

    Each slot of the past holds the key and the value that one beam added at one position. Batched products
    read the tensors

        past_keys (B*H, D, slots), past_values (B*H, slots, D): of the target tokens so far
        memory_keys (B*H, D, S), memory_values (B*H, S, D): of the encoder output

    On a CPU the numbers of keys are multiples of REGISTER; the masks of `KeyValueCache` hide the surplus.
    This is faster for few keys, and makes sums over keys independent of the other sentences.
    """

    def __init__(self, memory_keys: Tensor, memory_values: Tensor, beams: int, max_length: int):
        """From keys and values of the encoder output, each (B, H, S, D)."""
        sentences, heads, self.source_length, width = memory_keys.shape
        self.multiple = REGISTER if memory_keys.device.type == "cpu" else 1
        shape = (2, sentences, heads, _rounded_up(self.source_length, self.multiple), width)
        self._memory = memory_keys.new_zeros(shape)
        self._memory[0, :, :, : self.source_length] = memory_keys
        self._memory[1, :, :, : self.source_length] = memory_values
        slots = min(max_length, INITIAL_POSITIONS) * beams
        self._allocate(memory_keys.new_empty(2, 0, sentences, heads, width), slots)

    def _allocate(self, past: Tensor, capacity: int) -> None:
        """Store `past` (2, slots, B, H, D) with room for `capacity` slots, and update the views.

        A slot of all sentences is contiguous, so the slots in use are one block of memory, which a CPU reads
        several times as fast as scattered pieces.
        """
        self.slots, row = past.size(1), math.prod(past.shape[2:])
        storage = past.new_empty(2, _rounded_up(capacity, self.multiple), row + _GAP)
        self._past = storage[..., :row].view(2, -1, *past.shape[2:])
        self._past[:, : self.slots] = past
        self._used = 0  # slots that the views of `append` have
        by_head = self._past.permute(0, 2, 3, 1, 4).flatten(1, 2)  # (2, B*H, capacity, D)
        self._all_past_keys, self._all_past_values = by_head[0].transpose(1, 2), by_head[1]
        memory = self._memory.flatten(1, 2)
        self.memory_keys, self.memory_values = memory[0].transpose(1, 2), memory[1]

    @property
    def sentences(self) -> int:
        """The number of sentences, B."""
        return self._past.size(2)

    def append(self, keys_values: Tensor) -> tuple[Tensor, Tensor]:
        """Store keys and values (2, B, H, K, D) of the next position; returns past_keys and past_values."""
        start, end = self.slots, self.slots + keys_values.size(3)
        if end > self._past.size(1):
            self._allocate(self._past[:, :start], 2 * end)
        used = _rounded_up(end, self.multiple)
        if used > self._used:
            self._past[:, end:used] = 0  # hidden keys and values must be finite
            self._used = used
            self._views = self._all_past_keys[:, :, :used], self._all_past_values[:, :used]
        self._past[:, start:end] = keys_values.permute(0, 3, 1, 2, 4)
        self.slots = end
        return self._views

    def select(self, sentences: Tensor | None, slots: Tensor | None) -> None:
        """Keep only `sentences` (B'), and of each of them only `slots` (B', slots). None keeps all."""
        past = self._past[:, : self.slots]
        if sentences is not None:
            self._memory = self._memory[:, sentences]
        if slots is not None:
            rows = torch.arange(len(slots), device=slots.device) if sentences is None else sentences
            past = past[:, slots.t(), rows]
        elif sentences is not None:
            past = past[:, :, sentences]
        self._allocate(past, max(past.size(1), self._past.size(1)))


class KeyValueCache:
    """A LayerCache for each decoder layer, and the masks that the layers share, in additive form:

        source_keep_bias (B*H, 1, S): hides padding of the source, and surplus keys of the last register; None
            if there are neither
        past_keep_bias (B, K, slots): hides from each beam the slots that are not part of its past, and
            surplus keys of the last register; (1, 1, slots) if K is 1

    Reordering beams changes past_keep_bias. Keys and values are copied only when sentences are removed, when
    slots that no beam needs are removed (every COMPACT_EVERY positions), and when `LayerCache.append` needs
    more memory.
    """

    def __init__(self, layers: list[LayerCache], source_keep: Tensor, beams: int):
        self.layers, self.beams = layers, beams
        self.length = 0  # positions decoded so far
        first = layers[0]
        self._like, self.heads = first.memory_keys, first.memory_keys.size(0) // first.sentences
        self.multiple = first.multiple
        source_keep = F.pad(source_keep, (0, -source_keep.size(1) % self.multiple))
        self.source_keep_bias: Tensor | None = None
        if not source_keep.all():
            self.source_keep_bias = self._for_heads(self._bias(source_keep[:, None]))
        self._own_slot = self._bias(torch.eye(beams, dtype=torch.bool, device=source_keep.device))  # (K, K)
        self.past_keep_bias = self._like.new_zeros(len(source_keep) if beams > 1 else 1, beams, 0)

    def extend(self) -> Tensor | None:
        """Add one position. Returns the past_keep_bias for attention at it, (B*H or 1, K, slots), valid until
        the next call; None if nothing is hidden."""
        self.length += 1
        start = self.layers[0].slots
        end = start + self.beams
        if self.beams == 1 and end % self.multiple == 0:
            return None  # the mask is not updated; a later call makes up for it
        missing = _rounded_up(end, self.multiple) - self.past_keep_bias.size(2)
        if missing > 0:
            self.past_keep_bias = F.pad(self.past_keep_bias, (0, missing), value=-math.inf)
        if self.beams == 1:
            self.past_keep_bias[:, :, :end] = 0
            return self.past_keep_bias
        self.past_keep_bias[:, :, start:end] = self._own_slot
        return self._for_heads(self.past_keep_bias)

    def reorder(self, parents: Tensor | None, sentences: Tensor | None = None) -> None:
        """Make beam k of sentence b continue its beam parents[b, k]; parents (B, K) or None (no change).

        If `sentences` (B') is given, all other sentences are removed; `parents` then has rows for these only.
        """
        if sentences is not None:
            if self.source_keep_bias is not None:
                self.source_keep_bias = self._for_heads(self.source_keep_bias[:: self.heads][sentences])
            if self.beams > 1:
                self.past_keep_bias = self.past_keep_bias[sentences]
        slots = None
        if self.beams > 1 and parents is not None:
            index = parents[:, :, None].expand(-1, -1, self.past_keep_bias.size(2))
            self.past_keep_bias = self.past_keep_bias.gather(1, index)
            if self.length % COMPACT_EVERY == 0:
                slots = self._compact()
        if sentences is not None or slots is not None:
            for layer in self.layers:
                layer.select(sentences, slots)

    def _compact(self) -> Tensor:
        """Choose the slots (B, n) to keep, and reduce past_keep_bias to them.

        First come the slots that are part of the past of at least one beam, in order. Sentences with fewer of
        them than others keep some unused slots in addition, which stay hidden. On a CPU, n is a multiple of
        REGISTER, so that the position of later slots within a register does not depend on the other
        sentences.
        """
        used = (self.past_keep_bias == 0).any(dim=1)  # (B, slots)
        count = _rounded_up(int(used.sum(dim=1).max()), self.multiple)
        slots = used.byte().sort(dim=1, descending=True, stable=True).indices[:, :count]
        self.past_keep_bias = self.past_keep_bias.gather(2, slots[:, None].expand(-1, self.beams, -1))
        # Of the surplus of the last register, there are no keys; any others do, because they stay hidden.
        return slots.clamp(max=self.layers[0].slots - 1)

    def _bias(self, keep: Tensor) -> Tensor:
        """0 where a mask is True, -inf elsewhere."""
        return self._like.new_zeros(keep.shape).masked_fill_(~keep, -math.inf)

    def _for_heads(self, bias: Tensor) -> Tensor:
        """(B, .., ..) as (B*H, .., ..)."""
        return bias[:, None].expand(-1, self.heads, -1, -1).flatten(0, 1)


def _rounded_up(number: int, multiple: int) -> int:
    return number + -number % multiple
