"""The demo's settings: what is trained, on which emulated GPUs, and how each arm does it.

Plain data that travels to the ranks as JSON and into the report.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from torch_geomesh.demo.model import GPTConfig
from torch_geomesh.demo.speeds import HALOS_SPEEDS, StepCost

ARMS = ("ddp", "diloco", "geomesh")
TITLES = {"ddp": "DDP over Gloo", "diloco": "DiLoCo over Gloo", "geomesh": "GeoMesh"}


@dataclasses.dataclass(frozen=True)
class ArmSettings:
    """How one arm trains; an outer step only where there are rounds of inner steps."""

    backend: str
    batch_size: int
    lr: float
    warmup_steps: int
    inner_steps: int = 1  # GeoMesh: the mean over the ranks
    outer_lr: float = 0.0
    outer_momentum: float = 0.0
    parallel_groups: int = 1
    bucket_mb: float = 25.0
    form: str = "auto"  # GeoMesh: of its sign all-reduce


@dataclasses.dataclass(frozen=True)
class Settings:
    """One run of the demo."""

    out: Path
    data: Path | None = None
    topology: str = "azure-4"
    # With it DiLoCo, in rounds at the best settings found for that (docs/results.md), spends about
    # the published 65.8 % of its time on synchronisation: waiting for slower ranks and the WAN.
    bandwidth_scale: float = 1 / 61
    seed: int = 0
    speeds: tuple[float, ...] = tuple(region[0] for region in HALOS_SPEEDS)
    # Per unit of speed; the ratio of the two is a step's real one on a CPU core.
    cost: StepCost = dataclasses.field(default_factory=lambda: StepCost(0.024, 0.0146))
    model: GPTConfig = dataclasses.field(default_factory=GPTConfig)
    # The target: this much of the held-out loss of a bigram model of the same text.
    target_of_bigram: float = 0.925
    held_out_samples: int = 256
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1
    arms: dict[str, ArmSettings] = dataclasses.field(
        default_factory=lambda: {
            "ddp": ArmSettings("gloo", batch_size=32, lr=3e-3, warmup_steps=2),
            "diloco": ArmSettings(
                "gloo",
                batch_size=4,
                lr=1.2e-3,
                warmup_steps=20,
                inner_steps=103,
                outer_lr=0.9,
                outer_momentum=0.4,
            ),
            "geomesh": ArmSettings(
                "geomesh",
                batch_size=6,
                lr=1.2e-3,
                warmup_steps=15,
                inner_steps=85,
                outer_lr=0.9,
                outer_momentum=0.3,
                form="exchange",  # one delay a round; recoding takes half the bytes, two delays
            ),
        }
    )

    @property
    def ranks(self) -> int:
        """Number of ranks, one in each region."""
        return len(self.speeds)

    @property
    def file(self) -> Path:
        """Where the ranks read these settings."""
        return self.out / "run" / "settings.json"

    def to_json(self) -> str:
        """Return the settings as JSON text."""
        return json.dumps(dataclasses.asdict(self), default=str, indent=1)

    @staticmethod
    def from_json(text: str) -> Settings:
        """Invert `to_json`."""
        fields: dict[str, Any] = json.loads(text)
        fields["out"] = Path(fields["out"])
        fields["data"] = Path(fields["data"]) if fields["data"] else None
        fields["speeds"] = tuple(fields["speeds"])
        fields["betas"] = tuple(fields["betas"])
        fields["cost"] = StepCost(**fields["cost"])
        fields["model"] = GPTConfig(**fields["model"])
        fields["arms"] = {name: ArmSettings(**arm) for name, arm in fields["arms"].items()}
        return Settings(**fields)
