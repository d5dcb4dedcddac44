"""The demo's text: the Python standard library's own sources, or any text the user names.

Turns files into one byte string in a fixed order, splits it into training and held-out text by
file, and cuts it into samples.  Knows nothing of ranks: samplers decide who takes which sample.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

# Folders of the standard library left out: tests (not on every machine), third-party code, and
# tables of numbers that are not text.
_SKIPPED_FOLDERS = frozenset(
    [
        *("__pycache__", "dist-packages", "site-packages", "ensurepip", "encodings"),
        *("idlelib", "lib2to3", "test", "tests", "turtledemo"),
    ]
)
_MAX_TRAIN_BYTES = 16 << 20
_HELD_OUT_ONE_IN = 20  # of the files


class DataError(ValueError):
    """The text for the demo cannot be used; the message says why and what to do."""


@dataclasses.dataclass(frozen=True)
class Text:
    """Training and held-out text, and where they come from."""

    train: bytes
    held_out: bytes
    source: str


def standard_library() -> Path:
    """Return the folder of this Python's standard library."""
    return Path(sysconfig.get_path("stdlib"))


def _python_files(root: Path) -> list[Path]:
    found: list[Path] = []
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(set(folders) - _SKIPPED_FOLDERS)
        found += [Path(folder) / name for name in names if name.endswith(".py")]
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def _is_held_out(name: str) -> bool:
    """Tell by the file's name alone, so that the split is the same on every machine."""
    digest = hashlib.sha256(name.encode()).digest()
    return digest[0] * 256 + digest[1] < 65536 // _HELD_OUT_ONE_IN


def load(path: Path | None, least_bytes: int) -> Text:
    """Read the text to train on.

    Parameters
    ----------
    path
        A text file, a folder of them, or None for the Python standard library.  A single file is
        split by position: its last twentieth is held out.
    least_bytes
        Bytes needed on each side of the split.
    """
    if path is None:
        root = standard_library()
        text = _from_files(root, _python_files(root), f"Python standard library, {root}")
    elif path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.is_file() and not p.name.startswith("."))
        text = _from_files(path, files, str(path))
    elif path.is_file():
        content = _read(path)
        cut = len(content) - len(content) // _HELD_OUT_ONE_IN
        text = Text(content[:cut][:_MAX_TRAIN_BYTES], content[cut:], str(path))
    else:
        raise DataError(f"no text at {path}: give a text file or a folder of text files")
    for part, content in (("training", text.train), ("held-out", text.held_out)):
        if len(content) < least_bytes:
            raise DataError(
                f"{text.source} has {len(content)} bytes of {part} text, the demo needs "
                f"{least_bytes}: give a longer text"
            )
    return text


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error


def _from_files(root: Path, files: Sequence[Path], source: str) -> Text:
    train, held_out = bytearray(), bytearray()
    for path in files:
        part = held_out if _is_held_out(path.relative_to(root).as_posix()) else train
        part += _read(path)
        part += b"\n"
    return Text(bytes(train[:_MAX_TRAIN_BYTES]), bytes(held_out), source)


class ByteWindows(Dataset):
    """Samples of `context` bytes and the bytes that follow each of them.

    Windows do not overlap, so an epoch shows each byte once.  ``__getitems__`` lets a DataLoader
    fetch a batch with one gather; use it with ``collate_fn=as_is``.
    """

    def __init__(self, text: bytes, context: int) -> None:
        self._bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self._context = context

    def __len__(self) -> int:
        return (len(self._bytes) - 1) // self._context

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, targets = self.__getitems__([index])
        return inputs[0], targets[0]

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        starts = torch.as_tensor(indices, dtype=torch.int64) * self._context
        window = self._bytes[starts[:, None] + torch.arange(self._context + 1)].long()
        return window[:, :-1], window[:, 1:]


def as_is(batch: Any) -> Any:
    """Collate function for datasets whose ``__getitems__`` returns whole batches."""
    return batch


def held_out_batch(text: bytes, context: int, samples: int) -> tuple[Tensor, Tensor]:
    """Return `samples` windows spread evenly over the held-out text."""
    windows = ByteWindows(text, context)
    step = max(1, len(windows) // samples)
    return windows.__getitems__(list(range(0, len(windows), step))[:samples])


def bigram_loss(text: Text) -> float:
    """Held-out loss, in nats a byte, of counting which byte follows which in the training text."""
    train = np.frombuffer(text.train, np.uint8).astype(np.int64)
    held_out = np.frombuffer(text.held_out, np.uint8).astype(np.int64)
    pairs = np.bincount(train[:-1] * 256 + train[1:], minlength=65536).reshape(256, 256) + 0.02
    share = pairs / pairs.sum(axis=1, keepdims=True)
    return float(-np.log(share[held_out[:-1], held_out[1:]]).mean())
