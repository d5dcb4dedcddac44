"""Held-out loss of saved parameters, in a process of its own so that no arm pays for it.

Reads paths from standard input, one a line, and answers each with its loss on one line; ends with
its input.  Usage: ``evaluate.py SETTINGS.json``.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from torch_geomesh.demo import data
from torch_geomesh.demo.model import build, loss_of
from torch_geomesh.demo.settings import Settings


def main() -> None:
    """Answer until standard input ends."""
    os.nice(10)
    torch.set_num_threads(1)
    settings = Settings.from_json(Path(sys.argv[1]).read_text())
    text = data.load(settings.data, least_bytes=settings.model.context + 1)
    batch = data.held_out_batch(text.held_out, settings.model.context, settings.held_out_samples)
    model = build(settings.model, settings.seed).eval()
    for line in sys.stdin:
        path = Path(line.rstrip("\n"))
        if path.name:
            flat = torch.from_file(str(path), size=sum(p.numel() for p in model.parameters()))
            torch.nn.utils.vector_to_parameters(flat, model.parameters())
        with torch.no_grad():
            loss = float(loss_of(model, *batch))
        print(loss, flush=True)


if __name__ == "__main__":
    main()
