"""Sends and receives: order, any source, tags, batches, dtypes, and what is refused."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks, start_ranks


def full(value: float, size: int = 5) -> torch.Tensor:
    return torch.full((size,), float(value))


def any_source_takes_each_message_once(large: int) -> list[tuple[int, float]]:
    """Rank 0 gets two messages from each other rank, in each sender's order, whoever is first."""
    rank, world = dist.get_rank(), dist.get_world_size()
    if rank != 0:
        dist.send(full(10 * rank, large), 0)
        dist.send(full(10 * rank + 1, large), 0)
        return []
    taken = []
    for _ in range(2 * (world - 1)):
        tensor = torch.empty(large)
        source = dist.recv(tensor)
        assert (tensor == tensor[0]).all()
        taken.append((source, tensor[0].item()))
    return taken


@pytest.mark.parametrize("large", [1, 5, 1_000_003])
def test_receives_from_any_rank(large):
    taken = run_ranks(4, any_source_takes_each_message_once, large)[0]
    assert sorted(taken) == [(r, 10.0 * r + i) for r in (1, 2, 3) for i in (0, 1)]
    for rank in (1, 2, 3):
        assert [v for source, v in taken if source == rank] == [10 * rank, 10 * rank + 1]


def receives_take_messages_in_the_order_they_were_posted() -> None:
    """A receive from any rank, and behind it one from rank 1: the first message is the first's."""
    rank = dist.get_rank()
    if rank == 1:
        dist.barrier()  # both receives are posted
        dist.send(full(1), 0)
        dist.send(full(2), 0)
    else:
        first, second = torch.empty(5), torch.empty(5)
        works = [dist.irecv(first), dist.irecv(second, src=1)]
        dist.barrier()
        for work in works:
            work.wait()
        assert works[0]._source_rank() == 1
        assert (first == 1).all()
        assert (second == 2).all()


def messages_that_came_before_are_taken_in_order() -> None:
    """Messages wait in the engine, for a receive from their rank and one from any."""
    rank = dist.get_rank()
    if rank == 1:
        for value in (1, 2, 3):
            dist.send(full(value), 0)
        dist.barrier()
    else:
        dist.barrier()
        for value, source in ((1, 1), (2, None), (3, 1)):
            tensor = torch.empty(5)
            assert dist.recv(tensor, src=source) == 1
            assert (tensor == value).all()


def tags_are_apart() -> None:
    rank = dist.get_rank()
    if rank == 1:
        dist.send(full(7), 0, tag=7)
        dist.send(full(2**31 - 1), 0, tag=2**31 - 1)
    else:
        late, early = torch.empty(5), torch.empty(5)
        dist.recv(late, tag=2**31 - 1)
        dist.recv(early, tag=7)
        assert (late == torch.tensor(2.0**31 - 1)).all()
        assert (early == 7).all()


def any_source_in_a_subgroup() -> None:
    rank = dist.get_rank()
    group = dist.new_group([1, 2])
    if rank == 2:
        dist.send(full(3), group=group, group_dst=0)
    elif rank == 1:
        tensor = torch.empty(5)
        assert dist.recv(tensor, group=group) == 2  # the rank in the job
        assert (tensor == 3).all()


@pytest.mark.parametrize(
    ("world", "function"),
    [
        (2, receives_take_messages_in_the_order_they_were_posted),
        (2, messages_that_came_before_are_taken_in_order),
        (2, tags_are_apart),
        (3, any_source_in_a_subgroup),
    ],
)
def test_order_and_tags(world, function):
    run_ranks(world, function)


def both_directions_at_once(elements: int) -> None:
    """A ring of large messages, as one batch."""
    rank, world = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % world, (rank - 1) % world
    incoming = torch.empty(elements)
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, full(rank, elements), right),
            dist.P2POp(dist.irecv, incoming, left),
        ]
    )
    for work in works:
        work.wait()
    assert (incoming == left).all()


@pytest.mark.parametrize("world", [2, 3])
def test_a_batch_in_both_directions(world):
    run_ranks(world, both_directions_at_once, 3_000_001)


def other_dtype() -> str:
    rank = dist.get_rank()
    try:
        if rank == 0:
            dist.send(torch.ones(2, dtype=torch.float64), 1)
            dist.barrier()
        else:
            dist.recv(torch.empty(4, dtype=torch.float32), 0)
    except RuntimeError as error:
        return str(error)
    return ""


def test_another_dtype_of_the_same_bytes_is_refused():
    texts = run_ranks(2, other_dtype)
    for text in texts:
        assert "different dtypes" in text
    assert "recv(Float[4], from rank 0, tag 0)" in texts[1]


def nothing_comes() -> str:
    from datetime import timedelta

    if dist.get_rank() == 1:
        return ""
    dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1), dist.group.WORLD)
    with pytest.raises(RuntimeError, match="no message with its tag has come") as error:
        dist.recv(torch.empty(3))
    return str(error.value)


def test_a_receive_from_any_rank_has_a_deadline():
    outcomes = start_ranks(2, nothing_comes).join()
    assert "recv(Float[3], from any rank, tag 0)" in outcomes[0].value, outcomes[0].error


def alone() -> None:
    with pytest.raises(RuntimeError, match="the group has one rank, so nothing can come"):
        dist.recv(torch.empty(3))


def test_alone():
    run_ranks(1, alone)
