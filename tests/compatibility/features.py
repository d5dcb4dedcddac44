"""The rows of docs/compatibility.md: features, how Gloo is measured, the tests that show geomesh's.

To add a row, add a ``Feature`` with the pytest ids that show it (without parameters) and, where it
is simple, a probe of probes.py. Then make the page anew, as table.py says.
"""

from __future__ import annotations

from dataclasses import dataclass

# What PyTorch's documentation or headers say of NCCL, for tensors on a GPU.
YES, NO, UNSTATED = "yes", "no", "–"


@dataclass(frozen=True)
class Feature:
    """One row.

    Parameters
    ----------
    name
        What the row is about.
    nccl
        What is documented of NCCL.
    gloo
        The name of a probe, or what is documented where there is no probe.
    tests
        Ids of tests in tests/, all of which must pass for a "yes".
    """

    name: str
    nccl: str
    gloo: str
    tests: tuple[str, ...]


def dist(file: str, *names: str) -> tuple[str, ...]:
    """Return the ids of tests in tests/dist."""
    return tuple(f"tests/dist/test_{file}.py::test_{name}" for name in names)


def single(file: str, *names: str) -> tuple[str, ...]:
    """Return the ids of tests in tests/python."""
    return tuple(f"tests/python/test_{file}.py::test_{name}" for name in names)


_COLLECTIVE = dist("collectives", "every_collective")
_UNEVEN = dist("collectives", "uneven_sizes")
_COALESCED = dist("collectives", "coalesced_forms")
_REDUCTIONS = dist("collectives", "all_reduce_every_dtype_and_op")
_DTYPES = dist("operations", "unusual_dtypes")
_MONITORED = "monitored_barrier"

FEATURES: dict[str, tuple[Feature, ...]] = {
    "Collectives": (
        Feature("broadcast", YES, "broadcast", _COLLECTIVE),
        Feature("all_reduce", YES, "all_reduce", _COLLECTIVE),
        Feature("reduce", YES, "reduce", _COLLECTIVE),
        Feature(
            "reduce: other ranks' tensors stay as they are",
            UNSTATED,
            "reduce_leaves_the_others_alone",
            _COLLECTIVE,
        ),
        Feature("all_gather", YES, "all_gather", _COLLECTIVE),
        Feature("all_gather, sizes differ by rank", YES, "all_gather_uneven", _UNEVEN),
        Feature("all_gather_into_tensor", YES, "all_gather_into_tensor", _COLLECTIVE),
        Feature("gather", YES, "gather", _COLLECTIVE),
        Feature("gather_single", UNSTATED, "gather_single", dist("operations", "gather_single")),
        Feature("scatter", YES, "scatter", _COLLECTIVE),
        Feature("reduce_scatter", YES, "reduce_scatter", _COLLECTIVE),
        Feature("reduce_scatter_tensor", YES, "reduce_scatter_tensor", _COLLECTIVE),
        Feature("all_to_all_single", YES, "all_to_all_single", _COLLECTIVE),
        Feature("all_to_all_single with split sizes", YES, "all_to_all_single_uneven", _UNEVEN),
        Feature("all_to_all, sizes differ", YES, "all_to_all", _UNEVEN),
        Feature("barrier", YES, "barrier", _COLLECTIVE),
        Feature(
            "a barrier comes after all that was issued before it",
            YES,
            YES,
            dist("operations", "what_was_issued_before_a_barrier_is_done_after_it"),
        ),
        Feature(
            "monitored_barrier names who is missing",
            NO,
            "monitored_barrier",
            dist(_MONITORED, "passes_when_all_come", "a_missing_rank_is_named_and_may_come_late"),
        ),
        Feature("all_reduce, coalesced", YES, "all_reduce_coalesced", _COALESCED),
        Feature("all_gather_into_tensor, coalesced", YES, "all_gather_coalesced", _COALESCED),
        Feature("reduce_scatter_tensor, coalesced", YES, "reduce_scatter_coalesced", _COALESCED),
        Feature(
            "all_gather, coalesced, of several dtypes",
            YES,
            UNSTATED,
            dist("collectives", "tensors_gathered_together_are_one_operation"),
        ),
        Feature(
            "lists of several tensors a rank",
            NO,
            "lists_of_tensors",
            dist("lists", "reduction_counts_every_tensor_of_every_rank", "lists"),
        ),
        Feature(
            "coalescing manager, several kinds of calls",
            UNSTATED,
            "coalescing_of_several_kinds",
            dist("operations", "coalescing"),
        ),
        Feature(
            "all_reduce of sparse tensors",
            UNSTATED,
            "sparse_all_reduce",
            dist("operations", "sparse_tensors"),
        ),
        Feature(
            "sign-coded all-reduce (1/32 of the bytes)",
            NO,
            NO,
            single("hooks", "one_bucket_bit_for_bit")
            + single("train_codec", "bytes_are_those_of_the_reference"),
        ),
        Feature(
            "a group of one rank",
            YES,
            YES,
            dist("alone", "a_group_of_one_gives_identical_results_and_keeps_no_memory"),
        ),
    ),
    "Point to point": (
        Feature(
            "send, recv, isend, irecv", YES, "send_recv", dist("collectives", "point_to_point")
        ),
        Feature("tags", NO, "tags", dist("point_to_point", "order_and_tags")),
        Feature(
            "recv from any rank", NO, "any_source", dist("point_to_point", "receives_from_any_rank")
        ),
        Feature(
            "batch_isend_irecv", YES, "batch", dist("point_to_point", "a_batch_in_both_directions")
        ),
        Feature(
            "another dtype of the same size is refused",
            UNSTATED,
            "wrong_dtype_is_refused",
            dist("point_to_point", "another_dtype_of_the_same_bytes_is_refused"),
        ),
        Feature(
            "one-sided windows (put, signal)",
            UNSTATED,
            "windows",
            dist("windows", "puts_are_there_when_their_signal_is", "windows_of_one_group"),
        ),
    ),
    "Groups": (
        Feature(
            "new_group, also with local synchronization",
            YES,
            "subgroups",
            dist("collectives", "groups_do_not_disturb_each_other")
            + dist("groups", "legal_patterns_work_without_cross_talk"),
        ),
        Feature("split_group", YES, "split", dist("regrouping", "split_groups")),
        Feature(
            "shrink_group", YES, "shrink", dist("regrouping", "the_group_shrinks_when_a_rank_dies")
        ),
        Feature(
            "shrink_group after a rank died",
            YES,
            "shrink_after_a_death",
            dist("regrouping", "the_group_shrinks_when_a_rank_dies"),
        ),
        Feature("merge_remote_group", UNSTATED, "merge", dist("regrouping", "groups_merge")),
        Feature(
            "reconfigure", UNSTATED, "reconfigure", dist("regrouping", "a_group_is_configured_anew")
        ),
        Feature(
            "destroy, and join again on the same store",
            UNSTATED,
            UNSTATED,
            dist("failures", "destroy_and_join_again_on_the_same_store"),
        ),
    ),
    "Data types of all_reduce": (
        Feature("float32, float64", YES, "sum_floats", _REDUCTIONS),
        Feature("float16", YES, "sum_float16", _REDUCTIONS),
        Feature("bfloat16", YES, "sum_bfloat16", _REDUCTIONS),
        Feature("float8 (e4m3fn, e5m2)", YES, "sum_float8", _DTYPES),
        Feature("int8, uint8, int32, int64", YES, "sum_integers", _REDUCTIONS),
        Feature("int16", NO, "sum_int16", _REDUCTIONS),
        Feature("bool", YES, "sum_bool", _REDUCTIONS),
        Feature("uint16, uint32, uint64", NO, "sum_unsigned", _DTYPES),
        Feature("complex64", YES, "sum_complex", dist("operations", "premul_sum")),
        Feature(
            "any other dtype (bits8, complex32) where nothing is computed",
            NO,
            "gather_of_any_dtype",
            _DTYPES,
        ),
    ),
    "Reductions": (
        Feature("SUM", YES, "all_reduce", _REDUCTIONS),
        Feature("PRODUCT", YES, "op_product", _REDUCTIONS),
        Feature("MIN", YES, "op_min", _REDUCTIONS),
        Feature("MAX", YES, "op_max", _REDUCTIONS),
        Feature(
            "AVG", YES, "op_avg", _REDUCTIONS + dist("collectives", "average_does_not_overflow")
        ),
        Feature(
            "float16 and bfloat16: summed in float32, rounded once",
            UNSTATED,
            "halves_rounded_once",
            dist("collectives", "halves_are_summed_in_float32_and_rounded_once"),
        ),
        Feature("BAND", NO, "op_band", _REDUCTIONS),
        Feature("BOR", NO, "op_bor", _REDUCTIONS),
        Feature("BXOR", NO, "op_bxor", _REDUCTIONS),
        Feature("PREMUL_SUM", YES, "op_premul_sum", dist("operations", "premul_sum")),
    ),
    "Tensors": (
        Feature(
            "not contiguous",
            UNSTATED,
            "not_contiguous",
            dist("collectives", "layouts_come_back_through_the_callers_view"),
        ),
        Feature("without elements", UNSTATED, "zero_size", _COLLECTIVE),
        Feature(
            "overlapping input and output are refused",
            UNSTATED,
            "overlaps_are_refused",
            dist("operations", "overlapping_tensors"),
        ),
        Feature(
            "CUDA tensors, ordered by streams",
            YES,
            "yes, of most collectives",
            dist(
                "cuda",
                "a_call_returns_before_the_gpu_comes_to_it",
                "futures_are_ordered_and_later_calls_come_behind",
            ),
        ),
    ),
    "Handles, limits and hooks": (
        Feature(
            "futures", YES, "futures", dist("collectives", "async_work_futures_and_issue_order")
        ),
        Feature(
            "a limit for one call",
            YES,
            "limit_of_one_call",
            dist("failures", "an_operations_own_limit_is_stronger_than_the_groups"),
        ),
        Feature(
            "a limit for one wait",
            UNSTATED,
            "limit_of_one_wait",
            dist("failures", "the_waits_own_limit_is_the_strongest"),
        ),
        Feature("ephemeral timeouts", YES, UNSTATED, dist("operations", "ephemeral_timeouts")),
        Feature(
            "on-completion hook",
            YES,
            "on_completion_hook",
            dist("operations", "on_completion_hooks"),
        ),
        Feature("abort hooks", UNSTATED, "abort_hooks", dist("operations", "abort_hooks")),
        Feature("time estimates", YES, "time_estimates", dist("operations", "time_estimates")),
        Feature(
            "TORCH_DISTRIBUTED_DEBUG=DETAIL",
            YES,
            "debug_detail",
            dist("torch_features", "debug_detail_wraps_the_backend"),
        ),
        Feature(
            "Ctrl-C ends a blocking wait",
            UNSTATED,
            UNSTATED,
            dist("interrupts", "ctrl_c_and_sigterm_end_what_blocks"),
        ),
    ),
    "When something is wrong": (
        Feature(
            "a killed rank is an error within seconds",
            UNSTATED,
            "killed_rank_is_an_error",
            dist("failures", "killed_rank_is_named_with_its_region_by_all_others"),
        ),
        Feature(
            "and is named",
            UNSTATED,
            "killed_rank_is_named",
            dist("failures", "killed_rank_is_named_with_its_region_by_all_others"),
        ),
        Feature(
            "a stopped rank is an error before the group's timeout",
            UNSTATED,
            "stopped_rank_is_an_error",
            dist("failures", "stopped_rank_is_given_up_after_the_liveness_limit"),
        ),
        Feature(
            "a deadline is kept",
            YES,
            "deadline_is_kept",
            dist("failures", "deadline_names_operation_number_and_missing_rank"),
        ),
        Feature(
            "its error names the operation and who is missing",
            UNSTATED,
            "deadline_names_who_is_missing",
            dist("failures", "deadline_names_operation_number_and_missing_rank")
            + dist("behind", "errors_list_the_ranks_that_have_not_called_or_called_something_else"),
        ),
        Feature(
            "ranks that call different things are told which",
            UNSTATED,
            "different_calls_are_told",
            dist("failures", "ranks_that_call_different_things_are_told"),
        ),
        Feature(
            "different roots are noticed",
            UNSTATED,
            "different_roots_are_told",
            dist("operations", "different_roots_are_noticed"),
        ),
        Feature(
            "a failed monitored_barrier leaves the group usable",
            NO,
            "monitored_barrier_leaves_the_group",
            dist(_MONITORED, "a_missing_rank_is_named_and_may_come_late"),
        ),
        Feature(
            "ranks that never came are named at the start",
            UNSTATED,
            UNSTATED,
            dist("failures", "missing_ranks_are_named_when_the_group_does_not_meet"),
        ),
        Feature(
            "abort reaches the other ranks",
            UNSTATED,
            UNSTATED,
            dist("failures", "abort_returns_and_reaches_the_others"),
        ),
        Feature(
            "a forked process is refused",
            UNSTATED,
            UNSTATED,
            dist("bad_input", "a_fork_is_told_so_and_does_not_hang"),
        ),
    ),
    "What is built on it": (
        Feature(
            "object collectives",
            YES,
            "objects",
            dist("collectives", "groups_do_not_disturb_each_other") + dist("objects", "objects"),
        ),
        Feature("DDP", YES, "ddp", dist("torch_features", "debug_detail_wraps_the_backend")),
        Feature(
            "DDP with sparse gradients",
            UNSTATED,
            "ddp_with_sparse_gradients",
            dist("operations", "ddp_with_sparse_gradients"),
        ),
        Feature(
            "DDP with the sign hook",
            NO,
            NO,
            single("hooks", "gradients_stay_near_ddps_own_whatever_the_buckets"),
        ),
        Feature(
            "DeviceMesh, DTensor",
            YES,
            "dtensor",
            dist("torch_features", "device_meshes_dtensor_and_fsdp2"),
        ),
        Feature("FSDP2", YES, "fsdp2", dist("torch_features", "device_meshes_dtensor_and_fsdp2")),
        Feature(
            "DDP with Join, no_sync, static graphs, unused parameters",
            YES,
            YES,
            dist("ddp_variants", "joins_accumulation_and_unused_parameters"),
        ),
        Feature(
            "ZeroRedundancyOptimizer, post-local SGD",
            YES,
            YES,
            dist("ddp_variants", "sharded_optimizer_and_post_local_sgd"),
        ),
        Feature("PowerSGD's hook", YES, YES, dist("ddp_variants", "powersgd")),
        Feature(
            "a future's callbacks start operations and wait for them",
            YES,
            YES,
            dist(
                "callbacks",
                "a_callback_starts_an_operation",
                "a_callback_waits_for_an_operation",
                "a_callback_that_takes_its_time",
            ),
        ),
        Feature(
            "functional collectives, torch.compile",
            YES,
            YES,
            dist("functional", "functional_collectives", "compiled"),
        ),
        Feature("torch.distributed.nn, gradients", YES, YES, dist("functional", "gradients")),
        Feature(
            "pipeline schedules (GPipe, 1F1B, interleaved)",
            YES,
            YES,
            dist("pipeline", "gpipe_and_1f1b", "interleaved"),
        ),
        Feature(
            "distributed checkpoint, another world size",
            YES,
            YES,
            dist("checkpoint", "another_world_size"),
        ),
        Feature(
            "profiler: names, shapes, durations",
            YES,
            YES,
            dist(
                "profiler",
                "names_and_shapes_are_gloos",
                "no_shapes_unless_asked",
                "a_range_ends_with_its_operation",
            ),
        ),
        Feature(
            "flight recorder, read by PyTorch's analyzer",
            YES,
            UNSTATED,
            dist(
                "flight_recorder",
                "a_healthy_run",
                "a_mismatch_is_dumped_and_found",
                "a_rank_that_stays_away_leaves_a_trace",
            ),
        ),
        Feature(
            "other backends beside it, by device, group and mesh dimension",
            YES,
            YES,
            dist(
                "mixed_backends",
                "per_device",
                "a_group_of_another_backend",
                "a_mesh_with_a_backend_a_dimension",
            ),
        ),
        Feature(
            "a script for Gloo, with the backend's name changed",
            UNSTATED,
            YES,
            dist("gloo_script", "a_script_for_gloo"),
        ),
        Feature("torchrun starts the job again", YES, YES, dist("torchrun", "restarts")),
        Feature("Accelerate", YES, YES, dist("frameworks", "accelerate")),
        Feature("Lightning", YES, YES, dist("frameworks", "lightning")),
        Feature(
            "64 ranks on a machine, 256 descriptors each",
            UNSTATED,
            UNSTATED,
            dist("many_ranks", "sixty_four_ranks_within_256_descriptors_each"),
        ),
        Feature(
            "50,000 collectives, 200 groups: nothing is left behind",
            UNSTATED,
            UNSTATED,
            dist(
                "groups",
                "fifty_thousand_collectives_leave_nothing_behind",
                "groups_come_and_go_without_a_trace",
            ),
        ),
        Feature(
            "GeoMesh training, a killed rank included",
            NO,
            NO,
            single(
                "train_ranks",
                "all_ranks_hold_the_same_bits_and_agree_on_tokens",
                "a_killed_rank_is_named_and_the_round_does_not_commit",
            ),
        ),
    ),
}
