"""The compiled module's types. Its docstrings and docs/architecture.md say what each does."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, overload

import torch
from torch import Tensor
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    Backend,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceOp,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
    Store,
)
from torch._C._distributed_c10d import Work as _Work

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

class Options(Backend.Options):
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

class _Collectives(Backend):
    """What c10d's backends have and PyTorch's stub of them leaves out."""

    @overload
    def allreduce(self, tensors: Sequence[Tensor], opts: AllreduceOptions = ...) -> _Work: ...
    @overload
    def allreduce(
        self,
        tensors: Sequence[Tensor] | Tensor,
        op: ReduceOp | ReduceOp.RedOpType = ...,
        timeout: timedelta | None = None,
    ) -> _Work: ...
    def allreduce_coalesced(
        self, tensors: Sequence[Tensor], opts: AllreduceCoalescedOptions = ...
    ) -> _Work: ...
    def allreduce_sparse(
        self, tensors: Sequence[Tensor], opts: AllreduceOptions = ...
    ) -> _Work: ...
    @overload
    def broadcast(self, tensors: Sequence[Tensor], opts: BroadcastOptions = ...) -> _Work: ...
    @overload
    def broadcast(self, tensor: Tensor, root: int, timeout: timedelta | None = None) -> _Work: ...
    @overload
    def reduce(self, tensors: Sequence[Tensor], opts: ReduceOptions = ...) -> _Work: ...
    @overload
    def reduce(
        self,
        tensor: Tensor,
        root: int,
        op: ReduceOp | ReduceOp.RedOpType = ...,
        timeout: timedelta = ...,
    ) -> _Work: ...
    @overload
    def allgather(
        self,
        output_tensors: Sequence[Sequence[Tensor]],
        input_tensors: Sequence[Tensor],
        opts: AllgatherOptions = ...,
    ) -> _Work: ...
    @overload
    def allgather(
        self, output_tensors: Sequence[Tensor], input_tensor: Tensor, timeout: timedelta = ...
    ) -> _Work: ...
    def allgather_coalesced(
        self,
        output_lists: Sequence[Sequence[Tensor]],
        input_list: Sequence[Tensor],
        opts: AllgatherOptions = ...,
    ) -> _Work: ...
    @overload
    def gather(
        self,
        output_tensors: Sequence[Sequence[Tensor]],
        input_tensors: Sequence[Tensor],
        opts: GatherOptions = ...,
    ) -> _Work: ...
    @overload
    def gather(
        self,
        output_tensors: Sequence[Tensor],
        input_tensor: Tensor,
        root: int,
        timeout: timedelta = ...,
    ) -> _Work: ...
    @overload
    def scatter(
        self,
        output_tensors: Sequence[Tensor],
        input_tensors: Sequence[Sequence[Tensor]],
        opts: ScatterOptions = ...,
    ) -> _Work: ...
    @overload
    def scatter(
        self,
        output_tensor: Tensor,
        input_tensors: Sequence[Tensor],
        root: int,
        timeout: timedelta = ...,
    ) -> _Work: ...
    @overload
    def reduce_scatter(
        self,
        output_tensors: Sequence[Tensor],
        input_tensors: Sequence[Sequence[Tensor]],
        opts: ReduceScatterOptions = ...,
    ) -> _Work: ...
    @overload
    def reduce_scatter(
        self,
        output_tensors: Tensor,
        input_tensor: Sequence[Tensor],
        op: ReduceOp | ReduceOp.RedOpType = ...,
        timeout: timedelta = ...,
    ) -> _Work: ...
    def alltoall(
        self,
        output_tensor: Sequence[Tensor],
        input_tensor: Sequence[Tensor],
        opts: AllToAllOptions = ...,
    ) -> _Work: ...
    @overload
    def alltoall_base(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        opts: AllToAllOptions = ...,
    ) -> _Work: ...
    @overload
    def alltoall_base(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        timeout: timedelta = ...,
    ) -> _Work: ...
    def send(self, tensors: Sequence[Tensor], dst_rank: int, tag: int, /) -> _Work: ...
    def recv(self, tensors: Sequence[Tensor], src_rank: int, tag: int, /) -> _Work: ...
    def recv_anysource(self, tensors: Sequence[Tensor], tag: int, /) -> _Work: ...
    def barrier(self, opts: BarrierOptions = ...) -> _Work: ...
    def monitored_barrier(self, timeout: timedelta = ..., wait_all_ranks: bool = False) -> None: ...

class ProcessGroupGeoMesh(_Collectives):
    def __init__(self, store: Store, rank: int, size: int, options: Options) -> None: ...
    def perform_nocolor_split(self, device: torch.device) -> None: ...
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
