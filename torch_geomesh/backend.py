"""The ``"geomesh"`` backend in Python: how a group is made, its options and its figures.

Knows what c10d passes to a backend and where UCX lies. The compiled module is loaded when the first
group is made.
"""

from __future__ import annotations

import hashlib
import os
import threading
import warnings
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from types import ModuleType

    from torch_geomesh import _C

_extension: ModuleType | None = None


def extension() -> ModuleType:
    """Load the compiled module, with UCX before it.

    Returns
    -------
    module
        ``torch_geomesh._C``.

    Raises
    ------
    ImportError
        If the package was not built, with the command that builds it.
    """
    global _extension
    if _extension is None:
        # UCX reads these when it is loaded: keep its hands off signal handlers and off libc's
        # memory functions.
        os.environ.setdefault("UCX_DEBUG_SIGNO", "0")
        os.environ.setdefault("UCX_MEM_EVENTS", "n")
        os.environ.setdefault("UCX_HANDLE_ERRORS", "none")
        try:
            import libucx  # absent where the extension was built against a system UCX
        except ImportError:
            pass
        else:
            libucx.load_library()
        try:
            from torch_geomesh import _C
        except ImportError as error:
            raise ImportError(
                f"torch_geomesh's compiled module can't be loaded ({error}); build it with "
                "`pip install --no-build-isolation -e .` in torch_geomesh's source folder"
            ) from error
        _extension = _C
        for sentence in _C.unknown_variables(sorted(os.environ)):
            warnings.warn(sentence, stacklevel=2)
    return _extension


def Options(**values: object) -> _C.Options:  # noqa: N802 (stands in for the compiled class)
    """Make options for ``init_process_group(pg_options=...)``.

    Parameters
    ----------
    **values
        Named as in ``geomesh options``; for example ``lanes=4`` or ``dead_after="30s"``. What is
        not named comes from the ``GEOMESH_`` variables, then from the defaults.

    Raises
    ------
    ValueError
        For an unknown name or a value that does not fit, with what it takes.
    """
    return extension().Options(**values)


def backend_of(group: dist.ProcessGroup | None = None) -> _C.ProcessGroupGeoMesh:
    """Return the geomesh backend behind a process group.

    Parameters
    ----------
    group
        ``None``: the default group.

    Raises
    ------
    TypeError
        If the group's CPU backend is another one.
    """
    if group is None:
        group = dist.distributed_c10d._get_default_group()
    backend = group._get_backend(torch.device("cpu"))
    wanted = extension().ProcessGroupGeoMesh
    # TORCH_DISTRIBUTED_DEBUG=DETAIL wraps the backend.
    backend = getattr(backend, "wrapped_pg", backend)
    if not isinstance(backend, wanted):
        raise TypeError(
            f"the process group uses {dist.get_backend(group)!r}, not 'geomesh': "
            "call torch.distributed.init_process_group('geomesh')"
        )
    return backend


def stats(group: dist.ProcessGroup | None = None) -> list[dict[str, Any]]:
    """Return what the engine knows about each peer: traffic, measured rate, round-trip time.

    Parameters
    ----------
    group
        Any geomesh group of this process; the engine is one for all of them.

    Returns
    -------
    list of dict
        One a peer: ``peer`` (this rank too, without lanes and traffic), ``lanes``, ``bytes_sent``,
        ``bytes_received``, ``segments_sent``, ``segments_received``, ``unexpected_bytes``,
        ``delivery_bytes_per_s``, ``rtt_s``, ``silent_s``, ``lanes_lost``, ``queue_wait_s`` (all its
        segments' waiting for a lane together), and ``lane_stats``, one a lane: ``name``,
        ``bytes_sent``, ``segments_sent``, ``in_flight_bytes``, ``window_bytes``,
        ``delivery_bytes_per_s``, ``rtt_s``, ``min_rtt_s``.
    """
    return backend_of(group).stats()


def _topology_spec(name: str) -> _C.TopologySpec:
    from torch_geomesh.topology import Topology

    topology = Topology.load(name)
    plan = topology.plan([])
    bytes_per_s = [link[0] for link in plan["links"]]
    delay_s = [link[1] for link in plan["links"]]
    return extension().TopologySpec(topology.name, plan["regions"], bytes_per_s, delay_s)


_meetings: Counter[str] = Counter()
_meetings_lock = threading.Lock()


def _job() -> str:
    """Name this run of the job by its default group, as all its ranks do; "" before there is one.

    With a name of their own, groups leave no counter in the store, and do not depend on how many
    groups other ranks have made, as the prefix that torch gives them does.
    """
    default = dist.distributed_c10d._world.default_pg
    if default is None:
        return ""
    try:
        return f"{backend_of(default).channel:016x}"
    except (TypeError, RuntimeError):  # another backend's, or destroyed
        return ""


def _meeting_place(backend_options: Any) -> tuple[dist.Store, list[int], str, str]:
    """Return the store in which a group's ranks meet, its members, the job's name and its own."""
    store, members = backend_options.store, list(backend_options.global_ranks_in_group)
    job = _job()
    if not job or not members:
        return store, members, "", ""
    key = hashlib.sha1(f"{job}/{members}".encode(), usedforsecurity=False).hexdigest()
    with _meetings_lock:
        _meetings[key] += 1
        name = f"{key}/{_meetings[key]}"
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store, members, job, name


def _warn_of_missing_regions(regions: list[str], rank: int) -> None:
    """Say on rank 0 and on the ranks concerned that some have a region and some have not."""
    missing = [r for r, region in enumerate(regions) if not region]
    if rank not in {0, *missing} or len(missing) in (0, len(regions)):
        return
    named = ", ".join(dict.fromkeys(region for region in regions if region))
    shown = f"{missing[:16]}{' and more' if len(missing) > 16 else ''}"
    warnings.warn(
        f"ranks {shown} have no region, the others have {named}: those without one count as a "
        f"region of their own, far from the others; set GEOMESH_REGION on all ranks or on none",
        stacklevel=2,
    )


def create(backend_options: Any, pg_options: Any) -> _C.ProcessGroupGeoMesh:
    """Make a group's backend; c10d calls it with its extended arguments."""
    module = extension()
    options = pg_options if isinstance(pg_options, module.Options) else module.Options()
    if pg_options is not None and options is not pg_options:
        raise TypeError(
            "pg_options must be made by torch_geomesh.Options(...), got "
            f"{type(pg_options).__name__}"
        )
    if options.topology_name:
        options.topology = _topology_spec(options.topology_name)
    store, *meeting = _meeting_place(backend_options)
    options.set_meeting(*meeting)
    if getattr(backend_options, "enable_reconfigure", False):
        options.enable_reconfigure = True
    timeout = backend_options.timeout
    options.set_timeout(
        timeout.total_seconds() if hasattr(timeout, "total_seconds") else float(timeout)
    )
    rank = backend_options.group_rank
    group = module.ProcessGroupGeoMesh(store, rank, backend_options.group_size, options)
    if not meeting[1]:  # the first group of the job
        _warn_of_missing_regions(group.regions, rank)
    return group
