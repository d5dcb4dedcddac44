"""Where nvcc works, the extension has the CUDA part; where there is no GPU, it says so."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from torch_geomesh.backend import extension

ROOT = Path(__file__).parents[2]


def left_out() -> str:
    """Why this build has no CUDA part, or nothing."""
    if torch.version.cuda is None:
        return "PyTorch for the CPU"
    if shutil.which("nvcc") is None and not Path("/usr/local/cuda/bin/nvcc").exists():
        return "no nvcc"
    cache = ROOT / "build/CMakeCache.txt"
    if cache.exists() and "GEOMESH_BUILD_CUDA:STRING=OFF" in cache.read_text():
        return "GEOMESH_BUILD_CUDA=OFF"
    return ""


def test_the_cuda_part_is_there_where_it_can_be_built() -> None:
    if reason := left_out():
        pytest.skip(reason)
    assert "cuda" in extension().features()


def test_a_machine_without_a_gpu_is_told_so() -> None:
    features = extension().features()
    if "cuda" not in features:
        pytest.skip("built without the CUDA part")
    if torch.cuda.is_available():
        assert features["cuda"] == "ready"
    else:
        assert "no GPU can be used" in features["cuda"]
        assert "Use tensors on the CPU" in features["cuda"]
