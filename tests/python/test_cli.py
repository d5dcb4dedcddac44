"""The command line, started as a user would."""

import os
import subprocess
import sys

import pytest

import torch_geomesh
from torch_geomesh import backend, cli


def _geomesh(*words, **options):
    return subprocess.run(
        [sys.executable, "-m", "torch_geomesh.cli", *words],
        capture_output=True,
        text=True,
        timeout=120,
        **options,
    )


def test_version():
    done = _geomesh("version")
    assert done.returncode == 0
    assert done.stdout == f"torch_geomesh {torch_geomesh.__version__}\n"


def test_help_lists_the_commands_and_real_defaults():
    done = _geomesh("--help")
    assert done.returncode == 0
    for name in cli._COMMANDS:
        assert f"    {name} " in done.stdout
    assert "default: demo-out" in " ".join(_geomesh("demo", "--help").stdout.split()).replace(
        "demo- out", "demo-out"
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "COMMAND"),
        (("nonsense",), "nonsense"),
        (("demo", "--data", "/no/such/text"), "/no/such/text"),
        (("demo", "--json", "/no/such/folder/f.json"), "/no/such/folder/f.json"),
        (("demo", "--data", ""), "--data: an empty path"),
        (("demo", "--out", ""), "--out: an empty path"),
        (("demo", "--json", ""), "--json: an empty path"),
        (("report", ""), "FOLDER: an empty path"),
        (("demo", "--seed", "-1"), "--seed -1"),
        (("demo", "--seed", "many"), "many"),
        (("demo", "--out", "/proc/nowhere"), "/proc/nowhere"),
        (("report", "/no/such/run"), "/no/such/run"),
        (("emulate", "no-such-wan", "--", "true"), "no-such-wan"),
    ],
)
def test_wrong_arguments_are_named(words, message, tmp_path):
    done = _geomesh(*words, cwd=tmp_path, env={**os.environ, "PYTHONPATH": _source()})
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def _source():
    return os.pathsep.join(path for path in sys.path if path)


def test_options_are_the_extension_table():
    done = _geomesh("options")
    assert done.returncode == 0
    table = backend.extension().option_table()
    assert table
    for row in table:
        assert row["variable"] in done.stdout
        assert row["meaning"] in done.stdout


def test_interruption_ends_with_its_own_status(monkeypatch, capsys):
    def interrupted(arguments):
        raise KeyboardInterrupt

    monkeypatch.setitem(cli._COMMANDS, "version", (cli._no_arguments, interrupted, "print"))
    assert cli.main(["version"]) == 130
    assert "interrupted" in capsys.readouterr().out
