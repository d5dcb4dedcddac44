"""The compiled module's types. Its docstrings and docs/architecture.md say what each does."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch import Tensor
from torch.distributed import Store
from torch.distributed import Work as _Work

def option_table() -> list[dict[str, str]]: ...
def unknown_variables(names: Sequence[str]) -> list[str]: ...
def built_for_torch() -> str: ...
def choose_device(
    interface: str | None = None, master: str = "", single_host: bool | None = None
) -> dict[str, Any]: ...

class TopologySpec:
    def __init__(
        self,
        name: str,
        regions: Sequence[str],
        bytes_per_s: Sequence[float],
        delay_s: Sequence[float],
    ) -> None: ...

class Options:
    topology: TopologySpec
    def __init__(self, **values: object) -> None: ...
    @property
    def topology_name(self) -> str: ...
    @property
    def region(self) -> str: ...
    def set_meeting(self, members: Sequence[int], job: str, name: str) -> None: ...
    def set_timeout(self, seconds: float) -> None: ...

class Work(_Work):
    @property
    def total_weight(self) -> int: ...
    @property
    def bytes_sent(self) -> int: ...
    @property
    def bytes_received(self) -> int: ...

class ProcessGroupGeoMesh:
    def __init__(self, store: Store, rank: int, size: int, options: Options) -> None: ...
    @property
    def regions(self) -> list[str]: ...
    @property
    def channel(self) -> int: ...
    def sign_all_reduce(
        self,
        current: Sequence[Tensor],
        anchor: Sequence[Tensor] | None,
        out: Tensor,
        *,
        weight: int,
        rotation_seed: int,
        names: Sequence[str] = ...,
        row_elements: Sequence[int] = ...,
        rotate: bool = True,
        residual: Tensor | None = None,
        residual_decay: float = 1.0,
        form: str = "auto",
        timeout: timedelta | None = None,
    ) -> Work: ...
    def stats(self) -> list[dict[str, object]]: ...

def features() -> dict[str, str]: ...
def sign_encode(
    tensors: Sequence[Tensor],
    rotation_seed: int,
    dither_seed: int,
    weight: int = 1,
    row_elements: Sequence[int] = ...,
    rotate: bool = True,
) -> bytes: ...
def sign_decode_mean(
    codes: Sequence[bytes],
    like: Sequence[Tensor],
    rotation_seed: int,
    row_elements: Sequence[int] = ...,
    rotate: bool = True,
) -> Tensor: ...
def outer_step_(
    anchor: Sequence[Tensor],
    current: Sequence[Tensor],
    momentum: Tensor,
    mean: Tensor,
    lr: float,
    mu: float,
    nesterov: bool = True,
) -> None: ...
