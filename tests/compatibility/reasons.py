"""Why geomesh does not pass some of PyTorch's own tests, by name, for docs/compatibility.md."""

REASONS: dict[str, str] = {
    "test_ddp_logging_data_cpu": (
        'PyTorch calls every backend that it does not know by name "custom" in DDP\'s log.'
    ),
}
