"""Marks for tests of what PyTorch itself does not have, or refuses a plugin, before a release."""

from __future__ import annotations

import pytest
import torch

TORCH_MINOR = int(torch.__version__.split(".")[1])
"""2.11 to 2.15 are supported: 11 to 15."""


def needs_torch(minor: int, what: str) -> pytest.MarkDecorator:
    """Skip a test where PyTorch is older than 2.``minor``; docs/compatibility.md lists these."""
    return pytest.mark.skipif(minor > TORCH_MINOR, reason=f"needs PyTorch 2.{minor}: {what}")
