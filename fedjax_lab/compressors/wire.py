"""The wire format of messages: sections of little-endian floats and of bit fields.

It runs on the host, in NumPy. Every section begins at a byte boundary. A bit field of width w
contains unsigned numbers below 2**w, most significant bit first.
"""

from collections.abc import Iterator

import numpy as np

_CHUNK = 1 << 20  # numbers whose bits are unpacked at once; a multiple of 8


def width_of(count: int) -> int:
    """Return the bits that distinguish ``count`` values: ceil(log2 count), 0 for one value."""
    return (count - 1).bit_length()


def section_bytes(count: int, width: int) -> int:
    """Return the bytes of ``count`` numbers of ``width`` bits."""
    return -(-count * width // 8)


def pack_floats(values: np.ndarray) -> bytes:
    """Pack floats in their own width."""
    return np.ascontiguousarray(values).tobytes()


def pack_bits(numbers: np.ndarray, width: int) -> bytes:
    """Pack unsigned numbers below 2**width in ``width`` bits each."""
    return b"".join(_packed_chunks(np.asarray(numbers), width)) if width else b""


def _packed_chunks(numbers: np.ndarray, width: int) -> Iterator[bytes]:
    for first in range(0, numbers.size, _CHUNK):
        words = numbers[first : first + _CHUNK].astype(">u4")
        bits = np.unpackbits(words.view(np.uint8).reshape(-1, 4), axis=1)
        yield np.packbits(bits[:, 32 - width :]).tobytes()


def unpack_bits(data: bytes, count: int, width: int) -> np.ndarray:
    """Unpack numbers, uint32 [count]: the inverse of ``pack_bits``."""
    numbers = np.zeros(count, np.uint32)
    if width == 0:
        return numbers
    for first in range(0, count, _CHUNK):
        size = min(_CHUNK, count - first)
        start = first * width // 8
        section = np.frombuffer(data, np.uint8, section_bytes(size, width), start)
        bits = np.zeros((size, 32), np.uint8)
        bits[:, 32 - width :] = np.unpackbits(section, count=size * width).reshape(size, width)
        numbers[first : first + size] = np.packbits(bits, axis=1).view(">u4")[:, 0]
    return numbers


class Reader:
    """Reads sections of packed bytes in order."""

    def __init__(self, data: bytes):
        self._data = data
        self._position = 0

    def take(self, size: int) -> bytes:
        """Read the next ``size`` bytes.

        Raises:
          ValueError: the data is too short.
        """
        end = self._position + size
        if end > len(self._data):
            raise ValueError(f"the packed message has {len(self._data)} bytes; it needs {end}.")
        section = self._data[self._position : end]
        self._position = end
        return section

    def floats(self, count: int, dtype: np.dtype) -> np.ndarray:
        """Read the next ``count`` floats."""
        return np.frombuffer(self.take(count * dtype.itemsize), dtype).copy()

    def bits(self, count: int, width: int) -> np.ndarray:
        """Read the next ``count`` numbers of ``width`` bits, uint32."""
        return unpack_bits(self.take(section_bytes(count, width)), count, width)

    def end(self) -> None:
        """Check that all bytes have been read.

        Raises:
          ValueError: bytes remain.
        """
        if self._position != len(self._data):
            raise ValueError(
                f"the packed message has {len(self._data)} bytes; it must have {self._position}."
            )
