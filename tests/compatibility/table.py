"""Makes docs/compatibility.md from test results, in four steps.

    python tests/compatibility/table.py --tests | xargs python -m pytest -q --junitxml tests.xml
    python tests/compatibility/torch_suite.py --backend geomesh --world 3 --out results/a.json
    python tests/compatibility/c10d_suite.py --folder ... --backend geomesh --out results/b.json
    python tests/compatibility/table.py --junit tests.xml --results results

Repeat the second and third for other worlds and for Gloo. Gloo's column is measured here and now,
by probes.py.
"""

from __future__ import annotations

import argparse
import json
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

from features import FEATURES, Feature
from reasons import REASONS

PAGE = Path(__file__).parents[2] / "docs" / "compatibility.md"
HEAD = """\
# Compatibility

Made by `tests/compatibility/table.py` from test results with PyTorch {torch}; its first lines say
how to make it anew.

- **geomesh**: "yes" where every test named in the row passed; "not run" where one needs a GPU.
- **Gloo**: what a small program did (`tests/compatibility/probes.py`), on CPU tensors and three
  ranks; with \\* it is from PyTorch's documentation.
- **NCCL**: from PyTorch's documentation, headers and the skips of its tests, for CUDA tensors; not
  measured. "–": they do not say.
"""

OLDER = """\
## Older PyTorch

2.11 to 2.15 are supported. What an older one lacks, or refuses to backends that it does not know
(tests marked `needs_torch`):

- since 2.15: the flight recorder, time estimates, `suspend` and `resume`, completion hooks,
  `split_group` without a device
- since 2.14: `monitored_barrier`, windows, groups made to be configured anew, abort hooks,
  ephemeral timeouts, timeouts changed later, `gather_single`
"""


def outcomes(path: Path) -> dict[str, set[str]]:
    """Read a JUnit file: for each test, without its parameters, the outcomes that occurred."""
    found: dict[str, set[str]] = {}
    for case in ElementTree.parse(path).iter("testcase"):
        file = case.get("classname", "").replace(".", "/") + ".py"
        name = case.get("name", "").split("[")[0]
        if case.find("failure") is not None or case.find("error") is not None:
            outcome = "failed"
        elif case.find("skipped") is not None:
            outcome = "skipped"
        else:
            outcome = "passed"
        found.setdefault(f"{file}::{name}", set()).add(outcome)
    return found


def ours(feature: Feature, found: dict[str, set[str]]) -> str:
    """Return geomesh's cell: yes only where all tests ran and passed."""
    seen = [found.get(test, {"not run"}) for test in feature.tests]
    if all(one == {"passed"} for one in seen):
        return "yes"
    return "**no**" if any("failed" in one for one in seen) else "not run"


def gloos(feature: Feature) -> str:
    """Return Gloo's cell, measured where there is a probe."""
    import probes

    if feature.gloo not in probes.PROBES:
        return feature.gloo if feature.gloo == "–" else f"{feature.gloo} \\*"
    problem = probes.run("gloo", feature.gloo)
    print(f"{feature.gloo:36} {problem.splitlines()[0][:100] if problem else 'yes'}", flush=True)
    return "no" if problem else "yes"


def shown_by(feature: Feature) -> str:
    """Return the cell that names the tests, file by file."""
    files: dict[str, list[str]] = {}
    for test in feature.tests:
        file, name = test.split("::")
        files.setdefault(file, []).append(f"`{name.removeprefix('test_')}`")
    return "; ".join(f"[{Path(f).name}](../{f}): {', '.join(names)}" for f, names in files.items())


def tables(found: dict[str, set[str]]) -> list[str]:
    """Return the lines of the tables of features."""
    lines: list[str] = []
    for area, features in FEATURES.items():
        lines += [f"## {area}", "", "| feature | Gloo | NCCL | geomesh | tests |"]
        lines.append("|---|---|---|---|---|")
        for feature in features:
            cells = (feature.name, gloos(feature), feature.nccl, ours(feature, found))
            lines.append(f"| {' | '.join(cells)} | {shown_by(feature)} |")
        lines.append("")
    return lines


def title(result: dict[str, Any]) -> str:
    """Return what a run of PyTorch's tests is called."""
    if result["suite"] == "DistributedTest":
        names = "" if result["names"] == "widened" else ", names as they are"
        return f"DistributedTest{names}"
    return f"test/distributed of PyTorch {result['files_version'].split('a')[0]}"


def suites(results: list[dict[str, Any]]) -> list[str]:
    """Return the lines on PyTorch's own tests: counts, then each failure of geomesh."""
    lines = [
        "## PyTorch's own tests",
        "",
        "`DistributedTest` comes with PyTorch. Its decorators skip much for backends whose names",
        "it does not know; unless said otherwise, names are widened: geomesh runs what Gloo runs,",
        "and both run the all-to-all tests that are kept for MPI. The files of test/distributed",
        'are of an older PyTorch. Skipped are, above all, tests that need GPUs. "Worded": the',
        "error is there, but the test compares the text of Gloo's own.",
        "",
        "| tests | ranks | backend | passed | worded | failed | skipped |",
        "|---|---|---|---|---|---|---|",
    ]
    order = sorted(results, key=lambda r: (title(r), r["world"], r["backend"]))
    for result in order:
        counts = [
            str(result["counts"].get(k, 0)) for k in ("passed", "worded", "failed", "skipped")
        ]
        world = str(result["world"] or "1 to 4")
        lines.append(f"| {title(result)} | {world} | {result['backend']} | {' | '.join(counts)} |")

    lines += ["", "What Gloo passes and geomesh does not:", ""]
    failures: dict[str, dict[str, str]] = {}
    gloo: dict[str, set[str]] = {}
    for result in results:
        for name, test in result["tests"].items():
            if result["backend"] == "gloo":
                gloo.setdefault(name, set()).add(test["outcome"])
            elif test["outcome"] == "failed":
                failures.setdefault(name, {})[title(result)] = test["reason"]
    reasons: dict[str, list[str]] = {}
    for name, said in failures.items():
        short = name.split(".")[-1]
        reason = REASONS.get(short, f"not explained yet: {next(iter(said.values()))}")
        if "passed" in gloo.get(name, {"passed"}):
            reasons.setdefault(reason, []).append(f"`{short}`")
    for reason, names in sorted(reasons.items()):
        lines.append(f"- {', '.join(sorted(set(names)))}: {reason}")
    if not reasons:
        lines.append("- nothing")
    both = (
        "What both fail needs a GPU or is not of this PyTorch: `test_default_store_timeout_gloo` "
        'wants "Timeout" where the store says "Wait timeout", `test_new_group_local_sync` None '
        "where `NON_GROUP_MEMBER` is returned."
    )
    return [*lines, "", both, ""]


def main() -> int:
    """Print the tests' ids, or make the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tests", action="store_true", help="print the ids of the tests")
    parser.add_argument("--junit", type=Path, help="results of the project's tests")
    parser.add_argument("--results", type=Path, help="folder of the suites' JSON files")
    parser.add_argument("--out", type=Path, default=PAGE)
    options = parser.parse_args()
    if options.tests:
        features = [feature for area in FEATURES.values() for feature in area]
        print("\n".join(sorted({test for feature in features for test in feature.tests})))
        return 0
    if options.junit is None or options.results is None:
        parser.error("--junit and --results are needed")
    import torch

    results = [json.loads(file.read_text()) for file in sorted(options.results.glob("*.json"))]
    head = HEAD.format(torch=torch.__version__.split("+")[0]).splitlines()
    lines = [*head, "", *tables(outcomes(options.junit)), *OLDER.splitlines(), "", *suites(results)]
    options.out.write_text("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
