"""Why geomesh does not pass some of PyTorch's own tests, by name, for docs/compatibility.md."""

_LISTS = (
    "Gloo takes lists of several tensors a rank and reduces over them too; geomesh, as NCCL, takes "
    "one tensor a call. PyTorch's Python functions only pass one."
)
_ROOT_TENSOR = (
    "`rootTensor`, the number of a tensor in such a list, is not looked at: there is one tensor."
)

REASONS: dict[str, str] = {
    "test_ddp_logging_data_cpu": (
        'PyTorch calls every backend that it does not know by name "custom" in DDP\'s log.'
    ),
    "test_allgather_basics": _LISTS,
    "test_allgather_noncontiguous_input": _LISTS,
    "test_allreduce_basics": _LISTS,
    "test_broadcast_basics": _LISTS,
    "test_sparse_allreduce_basics": _LISTS,
    "test_broadcast_checks": _ROOT_TENSOR,
    "test_reduce_checks": _ROOT_TENSOR,
    "test_allgather_coalesced_checks": (
        "It takes an output of another size than the input for an error on every rank; here sizes "
        "may differ by rank, so only the rank whose own part does not fit can tell at once."
    ),
}
