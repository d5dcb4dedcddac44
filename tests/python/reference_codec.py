"""The sign code in NumPy, written from docs/wire-format.md alone: slow, and independent of csrc.

Always one range: the whole vector.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

F32 = np.float32
_MASK = (1 << 64) - 1
_ROTATION, _DITHER = 0x726F746174696F6E, 0x6469746865722020


def _mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


class Stream:
    def __init__(self, seed: int, domain: int) -> None:
        self.state = _mix((_mix((seed + domain) & _MASK) + domain) & _MASK)

    def word(self, index: int) -> int:
        return _mix((self.state + (index + 1) * 0x9E3779B97F4A7C15) & _MASK)

    def mark(self) -> int:
        return _mix(~self.state & _MASK) >> 32

    def flips(self, begin: int, elements: int) -> np.ndarray:
        """True where an element's value is negated."""
        words = [self.word(begin // 64 + i) for i in range(elements // 64)]
        return np.unpackbits(np.array(words, dtype="<u8").view(np.uint8), bitorder="little").astype(
            bool
        )


@dataclass
class Vector:
    """Pieces of a vector: values in fp32, and the length of their rows (0: one row)."""

    pieces: Sequence[np.ndarray]
    row_elements: Sequence[int]

    @property
    def values(self) -> np.ndarray:
        flat = [np.asarray(p, dtype=F32).reshape(-1) for p in self.pieces]
        return np.concatenate([*flat, np.zeros(0, F32)])

    def rows(self) -> Iterator[tuple[int, int]]:
        begin = 0
        for piece, row in zip(self.pieces, self.row_elements, strict=True):
            size = piece.size
            step = row or max(size, 1)
            for at in range(0, size, step):
                yield begin + at, begin + min(at + step, size)
            begin += size


def blocks(elements: int) -> Iterator[tuple[int, int]]:
    """Begin and padded length of each block."""
    padded = -(-elements // 64) * 64
    begin = 0
    while padded - begin >= 4096:
        yield begin, 4096
        begin += 4096
    for size in (2048, 1024, 512, 256, 128, 64):
        if (padded - begin) & size:
            yield begin, size
            begin += size


def transform(block: np.ndarray) -> np.ndarray:
    z, h = block.astype(F32), 1
    while h < z.size:
        pairs = z.reshape(-1, 2, h)
        z = np.stack([pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]], axis=1).reshape(-1)
        h *= 2
    return z


def lane_sum(terms: np.ndarray) -> np.float32:
    lanes = np.zeros(16, F32)
    order = sorted(range(terms.size), key=lambda i: (i % 256, i))
    # Each lane in its own order: entries of one lane never interleave with another's.
    per_lane: list[list[np.float32]] = [[] for _ in range(16)]
    for i in order:
        per_lane[i % 16].append(terms[i])
    for step in range(len(per_lane[0])):
        lanes = lanes + np.array([lane[step] for lane in per_lane], F32)
    for width in (8, 4, 2, 1):
        lanes = lanes[:width] + lanes[width : 2 * width]
    return lanes[0]


def value_of(v: int) -> np.float32:
    return np.array([v << 19], np.uint32).view(F32)[0]


def _magnitude(z: np.ndarray, rotated: bool, live: int) -> np.float32:
    a, q = lane_sum(np.abs(z)), lane_sum(z * z)
    if not (np.isfinite(a) and np.isfinite(q)):
        raise ValueError("not finite")
    if not rotated:
        return F32(a / F32(live))
    if q >= F32(2.0**-100):
        return F32(q / a)
    wide_a = wide_q = 0.0
    for x in z.astype(np.float64):
        wide_a += abs(x)
        wide_q += x * x
    return F32(wide_q / wide_a)


def _leb128(n: int) -> bytes:
    out = bytearray()
    while n >= 0x80:
        out.append(n & 0x7F | 0x80)
        n >>= 7
    return bytes([*out, n])


def _row_map(live: list[bool]) -> tuple[int, bytes]:
    if all(live):
        return 0, b""
    bitmap = np.packbits(np.array(live), bitorder="little").tobytes()
    runs, state, length = b"", True, 0
    for row in live:
        if row != state:
            runs, state, length = runs + _leb128(length), row, 0
        length += 1
    runs += _leb128(length)
    return (2, runs) if len(runs) < len(bitmap) else (1, bitmap)


def encode(
    vector: Vector, *, rotation_seed: int, dither_seed: int, weight: int = 1, rotate: bool = True
) -> bytes:
    values = vector.values
    if not np.isfinite(values).all():
        raise ValueError("NaN or infinity")
    rows = list(vector.rows())
    rotation, dither = Stream(rotation_seed, _ROTATION), Stream(dither_seed, _DITHER)

    def header(base: int, row_map: int) -> bytes:
        flags = int(rotate) | row_map << 1
        begin = struct.pack("<2sBBhHQ", b"GS", 1, flags, base, len(rows) % 65536, weight)
        return begin + struct.pack("<QII", values.size, 0, rotation.mark())

    if weight == 0:
        return header(0, 0)
    live = [bool((values[b:e] != 0).any()) for b, e in rows]
    alive = np.zeros(values.size + 64, bool)
    for (begin, end), row in zip(rows, live, strict=True):
        alive[begin:end] = row
    padded = np.concatenate([values, np.zeros(-values.size % 64, F32)])

    coded: list[tuple[int, bytes] | None] = []  # v and bits, or nothing
    words = []
    for begin, size in blocks(values.size):
        block = padded[begin : begin + size]
        word = dither.word(begin // 64)
        words.append(word)
        if not block.any():
            coded.append(None)
            continue
        z = block
        if rotate:
            z = transform(np.where(rotation.flips(begin, size), -block, block))
        magnitude = _magnitude(z, rotate, int(alive[begin : begin + size].sum()))
        pattern = int(np.array([magnitude]).view(np.uint32)[0])
        v = (pattern + ((word >> 32) & ((1 << 19) - 1))) >> 19
        coded.append((v, np.packbits(z < 0, bitorder="little").tobytes()))

    largest = max((c[0] for c in coded if c), default=0)
    base = largest - 255 if largest else 0
    magnitudes, bits = bytearray(), b""
    for entry, word in zip(coded, words, strict=True):
        byte = 0
        if entry and entry[0] and largest:
            v = entry[0]
            if v > base:
                byte = v - base
            else:
                left = (word % (1 << 24)) * Fraction(float(value_of(base + 1)))
                byte = int(left < (1 << 24) * Fraction(float(value_of(v))))
        magnitudes.append(byte)
        if byte and entry:
            bits += entry[1]
    kind, row_map = _row_map(live)
    return header(base, kind) + row_map + bytes(magnitudes) + bits


def _read_rows(code: bytes, kind: int, rows: int) -> tuple[list[bool], int]:
    """Which rows are live, and where the row map ends."""
    if kind == 0:
        return [True] * rows, 32
    if kind == 1:
        size = -(-rows // 8)
        bits = np.unpackbits(np.frombuffer(code[32 : 32 + size], np.uint8), bitorder="little")
        return [bool(b) for b in bits[:rows]], 32 + size
    live: list[bool] = []
    at, state = 32, True
    while len(live) < rows:
        length = shift = 0
        while True:
            byte = code[at]
            at += 1
            length |= (byte & 0x7F) << shift
            shift += 7
            if not byte & 0x80:
                break
        live += [state] * length
        state = not state
    return live, at


def decode_mean(codes: Sequence[bytes], like: Vector, *, rotation_seed: int) -> np.ndarray:
    """The weighted mean of rotated codes, added in order."""
    elements = sum(p.size for p in like.pieces)
    rows = list(like.rows())
    rotation = Stream(rotation_seed, _ROTATION)
    total = np.zeros(-(-elements // 64) * 64, F32)
    ever_live = [False] * len(rows)
    weights = 0
    for code in codes:
        magic, _, flags, base, _, weight = struct.unpack("<2sBBhHQ", code[:16])
        assert magic == b"GS"
        assert flags & 1
        weights += weight
        if weight == 0:
            continue
        live, at = _read_rows(code, flags >> 1, len(rows))
        ever_live = [a or b for a, b in zip(ever_live, live, strict=True)]
        layout = list(blocks(elements))
        magnitudes = code[at : at + len(layout)]
        at += len(layout)
        for (begin, size), byte in zip(layout, magnitudes, strict=True):
            if not byte:
                continue
            signs = np.unpackbits(
                np.frombuffer(code[at : at + size // 8], np.uint8), bitorder="little"
            )
            at += size // 8
            scaled = F32(float(weight) * float(value_of(base + byte)))
            total[begin : begin + size] += np.where(signs == 1, -scaled, scaled)
    mean = np.zeros(total.size, F32)
    if weights:
        c = F32(1.0 / weights)
        for begin, size in blocks(elements):
            z = transform(total[begin : begin + size] * F32(1.0 / size))
            z = np.where(rotation.flips(begin, size), -z, z)
            mean[begin : begin + size] = z * c + F32(0)
    for (begin, end), row in zip(rows, ever_live, strict=True):
        if not row:
            mean[begin:end] = 0
    return mean[:elements]
