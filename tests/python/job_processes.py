"""Starts a command on several ranks, with the environment that torchrun gives each."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass
class Ended:
    """How one rank's process ended, and what it wrote."""

    status: int
    out: str
    err: str


def _free_port() -> int:
    with socket.socket() as trial:
        trial.bind(("127.0.0.1", 0))
        return int(trial.getsockname()[1])


def _start(rank: int, command: list[str], env: dict[str, str], **options: Any) -> Any:
    return subprocess.Popen(command, env={**os.environ, **env}, **options)


def run_job(
    count: int,
    command: Sequence[str],
    *,
    master: str = "127.0.0.1",
    hosts: int = 1,
    env: Sequence[dict[str, str]] | None = None,
    start: Callable[..., Any] = _start,
    timeout: float = 120,
) -> list[Ended]:
    """Run `command` on `count` ranks to its end; `env` is added to each rank's environment."""
    port = str(_free_port())
    processes = []
    try:
        for rank in range(count):
            variables = {
                "RANK": str(rank),
                "WORLD_SIZE": str(count),
                "LOCAL_RANK": str(rank % (count // hosts)),
                "LOCAL_WORLD_SIZE": str(count // hosts),
                "MASTER_ADDR": master,
                "MASTER_PORT": port,
                "OMP_NUM_THREADS": "1",
                **(env[rank] if env else {}),
            }
            processes.append(
                start(
                    rank,
                    list(command),
                    variables,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        ends = []
        for process in processes:
            out, err = process.communicate(timeout=timeout)
            ends.append(Ended(process.returncode, out, err))
        return ends
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.communicate()
