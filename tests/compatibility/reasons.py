"""Why geomesh does not pass some of PyTorch's own tests, by name, for docs/compatibility.md."""

REASONS: dict[str, str] = {
    "test_ddp_logging_data_cpu": (
        'PyTorch calls every backend that it does not know by name "custom" in DDP\'s log.'
    ),
    "test_allgather_coalesced_checks": (
        "It takes an output of another size than the input for an error on every rank; here sizes "
        "may differ by rank, so only the rank whose own part does not fit can tell at once."
    ),
}
