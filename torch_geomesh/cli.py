"""The ``geomesh`` command: one subcommand a tool, each in a module of its own.

Knows arguments and exit statuses: 0 done, 1 failed, 2 wrong arguments or an unusable machine, 130
interrupted.  Modules are imported when their subcommand runs.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch_geomesh

_INTERRUPTED = 130


def _path(text: str) -> Path:
    if not text:  # often a shell variable that is not set; as a path it would be this folder
        raise argparse.ArgumentTypeError("an empty path")
    return Path(text)


def _demo_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--data",
        type=_path,
        metavar="PATH",
        help="text to train on: a file or a folder of text files, at least about 100 KB "
        "(default: the Python standard library's sources)",
    )
    parser.add_argument(
        "--out",
        type=_path,
        default=Path("demo-out"),
        metavar="DIR",
        help="where report.html, report.png and run.json go (default: demo-out)",
    )
    parser.add_argument(
        "--json", type=_path, metavar="FILE", help="write the figures there too, as JSON"
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="of the initial weights and the order of samples (default: 0)",
    )


def _demo(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from torch_geomesh.demo.data import DataError
    from torch_geomesh.demo.run import DemoError, run
    from torch_geomesh.demo.settings import Settings
    from torch_geomesh.emulate import EmulationError
    from torch_geomesh.topology import TopologyError

    try:
        arguments.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return _refuse("demo", f"--out {arguments.out}: {error.strerror}")
    if not os.access(arguments.out, os.W_OK):
        return _refuse("demo", f"--out {arguments.out}: not writable")
    if arguments.json is not None:
        folder = arguments.json.absolute().parent
        if arguments.json.is_dir() or not os.access(folder, os.W_OK):
            return _refuse("demo", f"--json {arguments.json}: no file can be written there")
    if not 0 <= arguments.seed < 1 << 32:
        return _refuse("demo", f"--seed {arguments.seed}: must be from 0 to 4294967295")
    settings = Settings(
        out=arguments.out.absolute(),
        data=arguments.data.absolute() if arguments.data else None,
        seed=arguments.seed,
    )
    console = Console()
    if not console.is_terminal:
        console = Console(width=110)  # of a log file, not of a terminal that is not there
    try:
        run(settings, arguments.json, console)
    except DataError as error:
        return _refuse("demo", str(error))
    except (DemoError, EmulationError, TopologyError) as error:
        print(f"geomesh demo: {error}", file=sys.stderr)
        return 1
    return 0


def _doctor_arguments(parser: argparse.ArgumentParser) -> None:
    from torch_geomesh import doctor

    doctor.add_arguments(parser)


def _doctor(arguments: argparse.Namespace) -> int:
    from torch_geomesh import doctor

    return doctor.run(arguments)


def _emulate_arguments(parser: argparse.ArgumentParser) -> None:
    from torch_geomesh import emulate

    emulate.add_arguments(parser)


def _emulate(arguments: argparse.Namespace) -> int:
    from torch_geomesh import emulate

    return emulate.run(arguments)


def _options(arguments: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.table import Table

    from torch_geomesh import backend

    try:
        rows = backend.extension().option_table()
    except ImportError as error:
        return _refuse("options", str(error))
    if not sys.stdout.isatty():
        for row in rows:
            print(
                f"{row['variable']} (gm.Options: {row['name']}; {row['type']}; "
                f"default {row['default'] or 'none'})\n    {row['meaning']}"
            )
        return 0
    table = Table(box=None, pad_edge=False)
    for column in ("variable", "gm.Options", "type", "default", "meaning"):
        table.add_column(column, no_wrap=column == "variable")
    for row in rows:
        table.add_row(row["variable"], row["name"], row["type"], row["default"], row["meaning"])
    Console().print(table)
    return 0


def _probe_arguments(parser: argparse.ArgumentParser) -> None:
    from torch_geomesh import probe

    probe.add_arguments(parser)


def _probe(arguments: argparse.Namespace) -> int:
    from torch_geomesh import probe

    return probe.run(arguments)


def _report_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder", type=_path, metavar="FOLDER", help="of a run that has ended, such as demo-out"
    )


def _report(arguments: argparse.Namespace) -> int:
    from torch_geomesh import report

    try:
        for path in report.write(arguments.folder):
            print(path)
    except (report.ReportError, OSError) as error:
        return _refuse("report", str(error))
    return 0


def _version(arguments: argparse.Namespace) -> int:
    print(f"torch_geomesh {torch_geomesh.__version__}")
    return 0


def _refuse(command: str, why: str) -> int:
    print(f"geomesh {command}: {why}", file=sys.stderr)
    return 2


def _no_arguments(parser: argparse.ArgumentParser) -> None:
    pass


_COMMANDS = {
    "demo": (_demo_arguments, _demo, "train across four emulated regions, three ways (6 minutes)"),
    "doctor": (_doctor_arguments, _doctor, "check this machine, or under torchrun the whole job"),
    "emulate": (_emulate_arguments, _emulate, "run a command in emulated regions"),
    "options": (_no_arguments, _options, "list the options and their GEOMESH_ variables"),
    "probe": (_probe_arguments, _probe, "measure the ways between ranks, write a topology file"),
    "report": (_report_arguments, _report, "make one HTML file and a PNG from a run's folder"),
    "version": (_no_arguments, _version, "print the version"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="geomesh", description="PyTorch training across regions, almost as fast as inside one."
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (add_arguments, run, meaning) in _COMMANDS.items():
        sub = commands.add_parser(
            name, help=meaning, description=f"{meaning[0].upper()}{meaning[1:]}."
        )
        add_arguments(sub)
        sub.set_defaults(run=run)
    arguments = parser.parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except KeyboardInterrupt:
        print(f"geomesh {arguments.command}: interrupted; everything it started has ended")
        return _INTERRUPTED
    except BrokenPipeError:  # the reader of the output has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


if __name__ == "__main__":
    sys.exit(main())
