"""Drives CMake: finds what depends on the Python environment (torch, UCX), prints it, builds.

    pip install --no-build-isolation -e .[dev]

Build isolation would fetch a second PyTorch to compile against, perhaps of another version.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
TORCH_VERSIONS = ((2, 11), (2, 15))


def package_dir(name: str) -> Path | None:
    """Return the folder of an installed package, without importing it."""
    spec = importlib.util.find_spec(name)
    return Path(spec.origin).parent if spec is not None and spec.origin else None


def torch_dir() -> Path:
    """Return the folder of a supported PyTorch, or stop with what to do."""
    found = package_dir("torch")
    if found is None:
        sys.exit(
            "torch_geomesh: PyTorch is not in this environment. Install it (pip install torch), "
            "then run pip install --no-build-isolation -e .[dev]"
        )
    match = re.search(r"(\d+)\.(\d+)", (found / "version.py").read_text())
    version = (int(match[1]), int(match[2])) if match else (0, 0)
    low, high = TORCH_VERSIONS
    if not low <= version <= high:
        sys.exit(
            f"torch_geomesh: PyTorch {version[0]}.{version[1]} is installed; {low[0]}.{low[1]} to "
            f"{high[0]}.{high[1]} are supported. Install one of those and try again."
        )
    return found


def ucx_dir() -> Path:
    """Return the prefix of UCX: GEOMESH_UCX_ROOT, or the wheel."""
    root = os.environ.get("GEOMESH_UCX_ROOT")
    prefix = Path(root) if root else package_dir("libucx")
    if prefix is None:
        sys.exit(
            "torch_geomesh: UCX was not found. Install the wheel (pip install libucx-cu13) or set "
            "GEOMESH_UCX_ROOT to the prefix of a UCX of at least 1.13."
        )
    if not (prefix / "include/ucp/api/ucp.h").exists():
        sys.exit(
            f"torch_geomesh: {prefix} has no include/ucp/api/ucp.h; set GEOMESH_UCX_ROOT to a UCX "
            "with its headers."
        )
    return prefix


def build_cuda() -> str:
    """Return CMake's GEOMESH_BUILD_CUDA: the variable of that name, or AUTO where torch has CUDA.

    AUTO builds cuda/ where nvcc works; where it doesn't, CMake prints what it said and goes on.
    """
    wanted = os.environ.get("GEOMESH_BUILD_CUDA", "").upper()
    if wanted in ("AUTO", "ON", "OFF"):
        return wanted
    if wanted:
        sys.exit(f"torch_geomesh: GEOMESH_BUILD_CUDA takes AUTO, ON or OFF, got {wanted!r}.")
    version = (torch_dir() / "version.py").read_text()
    if re.search(r"^cuda\b.*=\s*None", version, re.MULTILINE):
        print("torch_geomesh: cuda/ is left out, this PyTorch is for the CPU only", flush=True)
        return "OFF"
    return "AUTO"


def requirements() -> list[str]:
    """List what pip must bring; UCX only where neither a wheel nor a system one is there."""
    wanted = ["torch>=2.11,<2.16", "numpy>=1.26", "rich>=13.7", "matplotlib>=3.8"]
    if not os.environ.get("GEOMESH_UCX_ROOT") and package_dir("libucx") is None:
        wanted.append("libucx-cu13>=1.18,<1.23")
    return wanted


class BuildWithCMake(build_ext):
    """Builds torch_geomesh/_C and the emulator's program into the package folder."""

    def run(self) -> None:
        """Configure, print every switch, build."""
        if shutil.which("cmake") is None or shutil.which("ninja") is None:
            sys.exit(
                "torch_geomesh: cmake and ninja are needed; run `make setup`, or apt-get install "
                "cmake ninja-build."
            )
        package = Path(self.get_ext_fullpath("torch_geomesh._C")).resolve().parent
        switches = {
            "CMAKE_BUILD_TYPE": os.environ.get("CMAKE_BUILD_TYPE", "RelWithDebInfo"),
            "GEOMESH_TORCH_DIR": torch_dir(),
            "GEOMESH_UCX_DIR": ucx_dir(),
            "GEOMESH_PYTHON_INCLUDE": sysconfig.get_path("include"),
            "GEOMESH_PYTHON_SUFFIX": sysconfig.get_config_var("EXT_SUFFIX"),
            "GEOMESH_PYTHON_OUTPUT": package,
            "GEOMESH_BUILD_CUDA": build_cuda(),
        }
        build = ROOT / "build"
        for name, value in switches.items():
            print(f"torch_geomesh: {name}={value}", flush=True)
        jobs = os.environ.get("MAX_JOBS", str(os.cpu_count() or 2))
        configure = [
            "cmake",
            "-S",
            ROOT,
            "-B",
            build,
            "-G",
            "Ninja",
            *(f"-D{k}={v}" for k, v in switches.items()),
        ]
        for command in (
            configure,
            ["cmake", "--build", build, "-j", jobs, "--target", "geomesh_python", "geomesh_wan"],
        ):
            if subprocess.run([str(part) for part in command]).returncode != 0:
                sys.exit(
                    "torch_geomesh: the C++ build failed; the compiler's first error is above. "
                    "Needed: g++ 12 or newer and the packages that `make setup` installs."
                )
        (package / "bin").mkdir(exist_ok=True)
        shutil.copy2(build / "csrc/emulator/geomesh-wan", package / "bin/geomesh-wan")


setup(
    ext_modules=[Extension("torch_geomesh._C", sources=[])],
    cmdclass={"build_ext": BuildWithCMake},
    install_requires=requirements(),
)
