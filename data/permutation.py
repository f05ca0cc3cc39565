"""A random order of 0..n-1 that needs no memory: any place in it, or any run of places, is computed by itself.

A Feistel network over the smallest power of two that holds n, walked along its cycle until it lands below n (Black and
Rogaway, "Ciphers with arbitrary finite domains"). It depends on (key, n) alone: never on ranks, versions or platform.
"""

from __future__ import annotations

import hashlib

import numpy as np

ROUNDS = 6
BLOCK = 1 << 16  # numbers worked on at once, so that they stay in the cache


def derive_key(*parts: int | str) -> int:
    """A 64-bit key that is a stable hash of `parts` (the same on every machine and in every process)."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


class Permutation:
    """`Permutation(n, key)(places)` gives the numbers at `places` of a random order of 0..n-1."""

    def __init__(self, count: int, key: int) -> None:
        self.count = count
        bits = max(2, (count - 1).bit_length())
        self._low_bits = bits // 2
        self._high_bits = bits - self._low_bits
        keys = [derive_key("round", key, number) for number in range(ROUNDS)]
        self._keys = np.array(keys, dtype=np.uint64)

    def __call__(self, places: np.ndarray) -> np.ndarray:
        """int64 numbers at the int64 `places`, all of which lie in [0, n)."""
        places = np.asarray(places)
        result = np.empty(places.shape, dtype=np.int64)
        for start in range(0, len(places), BLOCK):
            result[start : start + BLOCK] = self._block(places[start : start + BLOCK].astype(np.uint64))
        return result

    def _block(self, numbers: np.ndarray) -> np.ndarray:
        numbers = self._once(numbers)
        outside = np.flatnonzero(numbers >= self.count)
        while len(outside):
            walked = self._once(numbers[outside])
            numbers[outside] = walked
            outside = outside[walked >= self.count]
        return numbers.astype(np.int64)

    def _once(self, numbers: np.ndarray) -> np.ndarray:
        low_bits, high_bits = self._low_bits, self._high_bits
        high, low = numbers >> np.uint64(low_bits), numbers & np.uint64((1 << low_bits) - 1)
        for number in range(ROUNDS):
            # An unbalanced network: the halves change places, and with them their widths.
            mixed = (low + self._keys[number]) * np.uint64(0x9E3779B97F4A7C15)
            mixed ^= mixed >> np.uint64(32)
            mixed *= np.uint64(0xD6E8FEB86659FD93)
            mixed >>= np.uint64(64 - high_bits)
            high, low = low, high ^ mixed
            low_bits, high_bits = high_bits, low_bits
        return (high << np.uint64(low_bits)) | low
