"""docs/errors.md shows what is really raised: every one of its texts is provoked here.

Texts are compared after `comparable`, which the page explains to its readers. GEOMESH_WRITE_DOCS=1
puts into the page what is raised now: read the difference before committing it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest
from errors_page import REGIONS, Texts, comparable, entries, write
from provoked_errors import NEVER_CONNECTED, never_connected, provokers, stopped_when_met
from ranks import World, start_ranks


@pytest.fixture(scope="module", autouse=True)
def unconnected() -> Iterator[World]:
    world = start_ranks(4, stopped_when_met, initialize=False, per_rank_environment=REGIONS)
    yield world
    for process in world.processes:
        process.kill()


def check(texts: Texts) -> None:
    if os.environ.get("GEOMESH_WRITE_DOCS"):
        write(texts)
    page = entries()
    for heading, raised in texts.items():
        assert len(page[heading]) == len(raised), (heading, raised)
        for written, text in zip(page[heading], raised, strict=True):
            if text is not None:
                assert comparable(written) == comparable(text), heading


def test_every_entry_is_provoked() -> None:
    provoked = [heading for _, headings in provokers for heading in headings]
    assert sorted(entries()) == sorted([*provoked, NEVER_CONNECTED])
    assert all(blocks and all(blocks) for blocks in entries().values())


@pytest.mark.parametrize("provoker", provokers, ids=lambda one: one[0].__name__)
def test_the_page_shows_what_is_raised(
    provoker: tuple[Callable[[], Texts], tuple[str, ...]],
) -> None:
    function, headings = provoker
    texts = function()
    assert tuple(texts) == headings
    check(texts)


def test_the_page_shows_a_rank_that_never_connects(unconnected: World) -> None:
    check(never_connected(unconnected))
