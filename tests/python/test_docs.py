"""The documentation says what is: examples run, tables are the code's, links lead somewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from torch_geomesh.backend import extension

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def options_page() -> str:
    """The text that docs/options.md must have, made from the one table of options."""
    lines = [
        "# Options",
        "",
        "Made from the table in csrc/base/options.cc; `geomesh options` prints the same. A name",
        "can be given to `gm.Options(...)` for `pg_options`; without one its variable is read.",
        "",
        "| variable | name | type | default | meaning |",
        "|---|---|---|---|---|",
    ]
    for row in extension().option_table():
        name = f"`{row['name']}`" if row["name"] else ""
        default = f"`{row['default']}`" if row["default"] else ""
        lines.append(
            f"| `{row['variable']}` | {name} | {row['type']} | {default} | {row['meaning']} |"
        )
    return "\n".join(lines) + "\n"


def test_options_page_is_the_table() -> None:
    page = ROOT / "docs" / "options.md"
    if os.environ.get("GEOMESH_WRITE_DOCS"):
        page.write_text(options_page())
    assert page.read_text() == options_page()


def test_readme_example_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert code is not None
    generator = torch.Generator().manual_seed(0)
    dataset = [(torch.randn(4, generator=generator), i % 2) for i in range(200)]
    model = torch.nn.Linear(4, 2)
    losses = []

    def step(model: torch.nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        loss = torch.nn.functional.cross_entropy(model(batch[0]), batch[1])
        losses.append(loss.item())
        return loss

    names = {
        "dataset": dataset,
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "step": step,
    }
    before = model.weight.detach().clone()
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "0" if name == "RANK" else "1")
    alone = f'"geomesh", init_method="file://{tmp_path}/store", rank=0, world_size=1'
    source = code[1].replace('init_process_group("geomesh"', f"init_process_group({alone}")
    try:
        exec(compile(source, "README.md", "exec"), names)
    finally:
        dist.destroy_process_group()
    assert len(losses) >= 3
    assert not torch.equal(before, model.weight)


def test_example_script_runs_under_torchrun() -> None:
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *(str(ROOT / "examples/train_lm.py"), "--text", str(ROOT / "CONTRIBUTING.md")),
    ]
    run = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert run.returncode == 0, run.stderr[-3000:]
    assert re.search(r"epoch 0: loss \d\.\d{3}", run.stdout), run.stdout
    assert "geomesh E" not in run.stderr, run.stderr


@pytest.mark.parametrize(
    "variables",
    [
        {"GEOMESH_PSK_FILE": "geomesh.key"},
        {
            "GEOMESH_TLS_CERT": "rank.pem",
            "GEOMESH_TLS_KEY": "rank.key",
            "GEOMESH_TLS_CA": "ca.pem",
        },
    ],
    ids=["key", "certificate"],
)
def test_keys_made_as_the_security_page_says_are_accepted(
    variables: dict[str, str], tmp_path: Path
) -> None:
    commands = re.findall(r"```sh\n(.*?)```", (ROOT / "docs/security.md").read_text(), re.S)
    assert len(commands) == 2
    for command in commands:
        subprocess.run(["sh", "-ec", command], cwd=tmp_path, check=True, capture_output=True)
    code = (
        "import torch, torch.distributed as dist, torch_geomesh\n"
        "dist.init_process_group('geomesh', store=dist.HashStore(), rank=0, world_size=1)\n"
        "dist.all_reduce(torch.ones(3))\n"
        "dist.destroy_process_group()\n"
    )
    environment = {**os.environ, **variables, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, check=True)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#:]+?)(?:#[^)]*)?\)", page.read_text())
    missing = [target for target in targets if not (page.parent / target).exists()]
    assert not missing, f"{page.name} links to {missing}"


def test_public_names_load() -> None:
    import torch_geomesh as gm

    assert sorted(gm.__all__) == sorted(gm._HOMES)
    for name in gm.__all__:
        assert getattr(gm, name).__doc__, f"{name} has no docstring"
    with pytest.raises(AttributeError, match="no attribute 'Geomesh'"):
        _ = gm.Geomesh


def test_import_starts_no_thread_and_no_compiled_module() -> None:
    code = (
        "import os, sys, torch, torch_geomesh\n"
        "assert 'torch_geomesh._C' not in sys.modules\n"
        "before = len(os.listdir('/proc/self/task'))\n"
        "import torch_geomesh.backend, torch_geomesh.train\n"
        "assert len(os.listdir('/proc/self/task')) == before\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("first", ["torch", "torch_geomesh", "torch.distributed"])
def test_any_import_order_registers(first: str) -> None:
    code = f"import {first}\nimport torch.distributed as d\nassert 'GEOMESH' in d.Backend._plugins"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_signal_handlers_stay() -> None:
    code = (
        "import signal, torch\n"
        "before = [signal.getsignal(s) for s in signal.valid_signals()]\n"
        "import ctypes, torch_geomesh.backend\n"
        "def dispositions():\n"
        "    with open('/proc/self/status') as f:\n"
        "        return [l for l in f if l.startswith(('SigCgt', 'SigIgn', 'SigBlk'))]\n"
        "first = dispositions()\n"
        "torch_geomesh.backend.extension()\n"
        "import torch.distributed as d\n"
        "store = d.HashStore()\n"
        "d.init_process_group('geomesh', store=store, rank=0, world_size=1)\n"
        "d.all_reduce(torch.ones(3))\n"
        "assert dispositions() == first, (first, dispositions())\n"
        "d.destroy_process_group()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_probing_page_commands_run(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "probing.md").read_text()
    tool = tmp_path / "geomesh"
    tool.write_text(
        f"#!{sys.executable}\nimport sys\nfrom torch_geomesh.cli import main\nsys.exit(main())\n"
    )
    tool.chmod(0o755)
    commands = re.findall(r"^torchrun (--standalone .*)$", page, re.M)
    assert len(commands) == 2
    shown = ""
    for words in commands:
        run = subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", *words.split()],
            env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert run.returncode == 0, run.stdout + run.stderr
        shown += run.stdout
    for file in ("checks.json", "local.toml", "figures.json"):
        assert (tmp_path / file).exists()
    # The page's examples have the titles and checks of today.
    doctor, probe = (block for block in page.split("```") if "\nok  " in block or "row to" in block)
    checks = set(re.findall(r"^(?:ok|warning) +(\w+(?: \w+)?)  ", doctor, re.M))
    # On one host the engine takes loopback, which strangers do not reach.
    assert checks - {"privacy"} == set(
        re.findall(r"^(?:ok|warning) +(\w+(?: \w+)?)  ", shown, re.M)
    )
    titles = re.findall(r"^.*(?:busy|alone|median).*$", probe, re.M)
    assert len(titles) == 4
    assert all(f"\n{title}\n" in shown for title in titles)
