"""Random bits that are a function of int32 numbers, the same on every device and in every kernel."""

from torch import Tensor


def lowbias32(x: Tensor, seed: Tensor | None = None) -> Tensor:
    """A hash of int32 numbers, `lowbias32` of Chris Wellons' "hash-prospector" (2018): a bijection in which
    each bit of the input flips each bit of the output with a probability near 1/2.

    With a seed (int32, broadcast), it is a different function for each seed.
    """
    x = x ^ (x >> 16).bitwise_and_(2**16 - 1)  # the mask makes it a logical shift
    x = x * 0x7FEB352D
    if seed is not None:
        # Seeds that only flip bits of x would give the same outputs in another order.
        x = x + seed
    x = x ^ (x >> 15).bitwise_and_(2**17 - 1)
    x = x * (0x846CA68B - 2**32)
    return x ^ (x >> 16).bitwise_and_(2**16 - 1)


def kept(index: Tensor, key: Tensor, salt: Tensor, rate: float) -> Tensor:
    """Whether dropout keeps each element of a tensor, for its index, a key and a salt (all int32, broadcast).

    Masks of different `key ^ salt` are independent in practice.
    """
    seed = lowbias32(key ^ salt)  # Seeds have to differ in many bits: `lowbias32` mixes them only half.
    return lowbias32(index ^ seed, seed) >= threshold(rate)


def threshold(rate: float) -> int:
    """A uniformly distributed int32 number is below it with a probability of `rate`."""
    return min(round(rate * 2**32) - 2**31, 2**31 - 1)
