"""Processes of the demo: torchrun in every region, and the evaluation aside.

Knows how they start and that they end with whoever started them; nothing of what they compute.
"""

from __future__ import annotations

import ctypes
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from torch_geomesh.emulate import Emulation, EmulationUnavailable, Health
from torch_geomesh.topology import Topology

_PR_SET_PDEATHSIG = 1


class DemoError(RuntimeError):
    """The demo cannot go on; the message says why and what to do."""


class Evaluator:
    """The process that evaluates saved parameters."""

    def __init__(self, settings_file: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "torch_geomesh.demo.evaluate", str(settings_file)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._answers: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        self.busy = False

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put("")

    def ask(self, snapshot: Path | None) -> None:
        """Begin to evaluate a snapshot, or None: the initial parameters."""
        assert self._process.stdin is not None
        assert not self.busy
        self.busy = True
        self._process.stdin.write(f"{snapshot or ''}\n")
        self._process.stdin.flush()

    def answer(self, timeout_s: float = 0.0) -> float | None:
        """Return the loss asked for, or None if it is not there yet."""
        try:
            line = self._answers.get(timeout=timeout_s) if timeout_s else self._answers.get(False)
        except queue.Empty:
            return None
        if not line:
            raise DemoError("the process that evaluates has ended; its error is above")
        self.busy = False
        return float(line)

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()


class Regions:
    """Where ranks run: in emulated regions, or plainly on this machine."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self.unavailable: str | None = None
        self._emulation: Emulation | None = None
        self._running: list[subprocess.Popen[bytes]] = []
        self._counted = 0

    def start(self) -> None:
        """Make the regions, where that is possible; `unavailable` says why it is not."""
        emulation = Emulation(self.topology)
        try:
            emulation.start()
        except EmulationUnavailable as error:
            self.unavailable = str(error)
        else:
            self._emulation = emulation

    def close(self) -> None:
        """End all ranks and the regions."""
        try:
            self.end()
        finally:
            if self._emulation is not None:
                self._emulation.close()

    def torchrun(self, script: list[str], folder: Path) -> None:
        """Start one torchrun a region, together one job; their output goes to `folder`."""
        port = 29500 if self._emulation else _free_port()
        command = [sys.executable, "-m", "torch.distributed.run", *script]
        for number, region in enumerate(self.topology.regions):
            environment = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
            with (folder / f"{region}.log").open("wb") as log:
                options: dict[str, Any] = {
                    "stdin": subprocess.DEVNULL,
                    "stdout": log,
                    "stderr": subprocess.STDOUT,
                    "start_new_session": True,
                }
                if self._emulation:
                    started = self._emulation.popen(region, command, env=environment, **options)
                else:
                    environment |= {
                        "GEOMESH_REGION": region,
                        "PET_MASTER_ADDR": "127.0.0.1",
                        "PET_MASTER_PORT": str(port),
                        "PET_NNODES": str(len(self.topology.regions)),
                        "PET_NODE_RANK": str(number),
                        "PET_NPROC_PER_NODE": "1",
                        "GLOO_SOCKET_IFNAME": "lo",
                    }
                    started = subprocess.Popen(
                        command,
                        env={**os.environ, **environment},
                        preexec_fn=_die_with_parent,
                        **options,
                    )
            self._running.append(started)

    def ended(self) -> bool:
        """Whether one of the torchruns has ended by itself."""
        return any(process.poll() is not None for process in self._running)

    def end(self) -> None:
        """End all ranks, at once."""
        if self._emulation is not None and self._running and self._emulation.alive():
            self._emulation.kill_processes()
        for process in self._running:
            process.kill()  # its workers have asked to die with it
            process.wait()
        self._running = []

    def reset_bytes(self) -> None:
        """Count WAN bytes from here."""
        self._counted = self._emulation.wan_bytes() if self._emulation else 0

    def wan_bytes(self) -> int | None:
        """Return the bytes between regions since `reset_bytes`; None without emulation."""
        return self._emulation.wan_bytes() - self._counted if self._emulation else None

    def health(self) -> Health | None:
        """Return how well the emulator itself did; None without emulation."""
        return self._emulation.health() if self._emulation else None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
