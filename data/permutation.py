"""A random order of 0..n-1 that needs no memory: any place in it, or any run of places, is computed by itself.

A Feistel network over the smallest power of two that holds n, walked along its cycle until it lands below n (Black and
Rogaway, "Ciphers with arbitrary finite domains"). It depends on (key, n) alone: never on ranks, versions or platform.
"""

from __future__ import annotations

import hashlib

import numpy as np

FIRST_FACTOR, SECOND_FACTOR, ALL_BITS = 0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93, (1 << 64) - 1
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
        # Four rounds are enough where the halves are wide; narrow ones need more to be mixed. An even number, always.
        rounds = 4 if bits >= 16 else 8
        keys = [derive_key("round", key, number) for number in range(rounds)]
        self._keys, self._key_numbers = np.array(keys, dtype=np.uint64), keys

    def __call__(self, places: np.ndarray) -> np.ndarray:
        """int64 numbers at the int64 `places`, all of which lie in [0, n)."""
        places = np.asarray(places)
        result = np.empty(places.shape, dtype=np.int64)
        for start in range(0, len(places), BLOCK):
            result[start : start + BLOCK] = self._block(places[start : start + BLOCK].astype(np.uint64))
        return result

    def at(self, place: int) -> int:
        """The number at one place: the same as the array's, in whole numbers of Python, six times as fast for one."""
        number = self._once_alone(place)
        while number >= self.count:
            number = self._once_alone(number)
        return number

    def _once_alone(self, number: int) -> int:
        low_bits, high_bits = self._low_bits, self._high_bits
        high, low = number >> low_bits, number & ((1 << low_bits) - 1)
        for key in self._key_numbers:
            mixed = ((low + key) * FIRST_FACTOR) & ALL_BITS
            mixed = ((mixed ^ (mixed >> 32)) * SECOND_FACTOR) & ALL_BITS
            high, low = low, high ^ (mixed >> (64 - high_bits))
            low_bits, high_bits = high_bits, low_bits
        return (high << low_bits) | low

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
        for key in self._keys:
            # An unbalanced network: the halves change places, and with them their widths.
            mixed = low + key
            mixed *= np.uint64(FIRST_FACTOR)
            mixed ^= mixed >> np.uint64(32)
            mixed *= np.uint64(SECOND_FACTOR)
            mixed >>= np.uint64(64 - high_bits)
            mixed ^= high
            high, low = low, mixed
            low_bits, high_bits = high_bits, low_bits
        return (high << np.uint64(low_bits)) | low
