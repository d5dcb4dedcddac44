"""Who is behind: what each rank has called, in the error of an operation that does not end."""

from __future__ import annotations

import re
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

REGIONS = [
    {"GEOMESH_REGION": name} for name in ("eastus", "brazilsouth", "eastasia", "northeurope")
]


def wait_for_others(name: str, *ranks: int) -> None:
    """Wait until these ranks have come here too, without any collective."""
    store = dist.distributed_c10d._get_default_store()
    store.set(f"{name}{dist.get_rank()}", "here")
    store.wait([f"{name}{rank}" for rank in ranks])


def error_of(function, *args, **options) -> str:
    with pytest.raises(RuntimeError) as caught:
        function(*args, **options)
    return str(caught.value)


def stalls() -> dict[str, str]:
    rank = dist.get_rank()
    limit = timedelta(seconds=3)
    skipping, differing, empty = (dist.new_group(timeout=limit) for _ in range(3))
    texts = {}

    # Rank 0 skips operation 12. A doubling program waits for rank 0 on one rank only.
    for _ in range(11):
        dist.all_reduce(torch.ones(4), group=skipping)
    if rank != 0:
        texts["skipped"] = error_of(dist.all_reduce, torch.ones(8), group=skipping)
    wait_for_others("skipped", 1, 2, 3)
    if rank == 0:
        texts["skipped"] = error_of(dist.all_reduce, torch.ones(8), group=skipping)

    # Rank 0 calls another operation than the others.
    dist.all_reduce(torch.ones(4), group=differing)
    if rank == 0:
        gather = dist.all_gather_into_tensor  # (a broadcast's root may be done at once)
        texts["differs"] = error_of(gather, torch.empty(32), torch.ones(8), group=differing)
    else:
        texts["differs"] = error_of(dist.all_reduce, torch.ones(8), group=differing)

    # Rank 3 has called nothing, and ranks 1 and 2 are ahead with operations they don't wait for.
    if rank != 3:
        works = [dist.all_reduce(torch.ones(4), group=empty, async_op=True) for _ in range(3)]
        texts["empty"] = error_of(works[-1].wait)
    wait_for_others("empty", 0, 1, 2)

    tensor = torch.ones(1)
    dist.all_reduce(tensor)  # other groups go on
    assert tensor.item() == 4
    return texts


def test_errors_list_the_ranks_that_have_not_called_or_called_something_else() -> None:
    values = run_ranks(4, stalls, per_rank_environment=REGIONS)
    behind = (
        r"all_reduce\(Float\[8\], SUM\), sequence 12: .*not called by rank 0 on host \S+ \(eastus\) "  # noqa: E501
        r"\(its last: all_reduce\(Float\[4\], SUM\), sequence 11\)"
    )
    for rank, texts in enumerate(values):
        assert re.search(behind, texts["skipped"], re.S), (rank, texts["skipped"])
        assert "not called by rank 0" in texts["skipped"]
        assert not re.search(r"not called by[^;]*rank [123]\b", texts["skipped"]), texts["skipped"]
        match = re.search(
            r"here: (.*?), fingerprint (\w{8}); not the same on ([^;]*)", texts["differs"]
        )
        assert match, (rank, texts["differs"])
        here, fingerprint, there = match.groups()
        other = re.search(r"on host .*?: (\w+\(.*?\)), fingerprint (\w{8})", there)
        assert other, there
        assert {here, other[1]} == {"all_reduce(Float[8], SUM)", "all_gather_single(Float[8])"}
        assert fingerprint != other[2]
        assert ("rank 0" in there) == here.startswith("all_reduce"), texts["differs"]
        if rank != 3:
            text = texts["empty"]
            assert re.search(
                r"not called by rank 3 on host \S+ \(northeurope\) \(which has called nothing yet\)",  # noqa: E501
                text,
            ), text
            assert not re.search(r"not called by[^;]*rank [012]\b", text), text
