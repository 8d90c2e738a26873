"""Run notebooks again under nbval and compare every output with the committed one. `make test` calls this.

    python -m minillm.course.build.nbval_run notebooks solutions

nbval alone is too kind: after a cell that timed out the rest counts as expected failures, a cell without a count is
never compared, and an empty folder passes. Here every code cell has to pass, and a notebook may take 60 s.
What a fresh run writes to stderr is not compared (a library's warning depends on the machine); the committed
notebook has none, structure.py sees to that.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from pathlib import Path

import pytest

from minillm.course import mine
from minillm.course.build.addresses import ROOT
from minillm.course.build.cells import code_cells, marks, read

CELL_TIMEOUT_S = 300
NOTEBOOK_LIMIT_S = 60.0
SHARED = "MINILLM_NBVAL_MINE"  # the empty folder that all workers share


def main(folders: list[str]) -> int:
    notebooks = [path for folder in folders for path in sorted((ROOT / folder).glob("*.ipynb"))]
    if not notebooks:
        print(f"nbval: no notebook in {', '.join(folders)}", file=sys.stderr)
        return 1
    os.environ["JUPYTER_PREFER_ENV_PATH"] = "1"
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # two kernels share the cores; no time is compared here
    tally = Tally()
    with mine.nothing_solved():
        status = int(pytest.main([*nbval_options(len(notebooks)), *map(str, notebooks)], plugins=[tally]))
    problems = tally.problems({path.name: count_cells(path) for path in notebooks})
    print("\n".join(f"nbval: {problem}" for problem in problems), end="\n" if problems else "")
    compared = sum(count_cells(path)[1] for path in notebooks)
    print(f"nbval: {len(notebooks)} notebooks, {tally.outcomes['passed']} cells passed, {compared} compared")
    return status or bool(problems)


def nbval_options(num_notebooks: int) -> list[str]:
    options = ["--nbval", "--nbval-current-env", "--nbval-cell-timeout", str(CELL_TIMEOUT_S)]
    options += ["--nbval-sanitize-with", str(Path(__file__).with_name("nbval_sanitize.cfg"))]
    options += [
        "-q",
        "-p",
        "minillm.course.build.nbval_run",
        "--rootdir",
        str(ROOT),
        "-c",
        str(ROOT / "pyproject.toml"),
    ]
    if num_notebooks > 1:  # each file in one worker: its cells share a kernel
        options += ["-n", "2", "--dist", "loadfile"]
    return options


def count_cells(path: Path) -> tuple[int, int]:
    """(code cells, those of them whose output nbval compares)."""
    cells = code_cells(read(path))
    compared = [c for c in cells if c["execution_count"] is not None and "nbval-ignore-output" not in marks(c)]
    return len(cells), len(compared)


class Tally:
    """pytest plugin: outcomes and seconds per notebook, also when workers ran them."""

    def __init__(self):
        self.outcomes: Counter[str] = Counter()
        self.passed: Counter[str] = Counter()
        self.seconds: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report) -> None:
        name = Path(report.nodeid.split("::")[0]).name
        self.seconds[name] += report.duration
        if report.when == "call" or report.skipped:
            outcome = "xfailed" if hasattr(report, "wasxfail") else report.outcome
            self.outcomes[outcome] += 1
            self.passed[name] += outcome == "passed"

    def problems(self, cells: dict[str, tuple[int, int]]) -> list[str]:
        found = []
        for name, (total, compared) in cells.items():
            if self.passed[name] != total:
                found.append(f"{name}: {self.passed[name]} of {total} code cells passed")
            if not compared:
                found.append(f"{name}: no output was compared")
            if self.seconds[name] > NOTEBOOK_LIMIT_S:
                found.append(f"{name}: took {self.seconds[name]:.0f} s, allowed are {NOTEBOOK_LIMIT_S:.0f} s")
        return found


def pytest_collectstart(collector) -> None:
    """pytest loads this module as a plugin too: leave stderr out of nbval's comparison."""
    if hasattr(collector, "skip_compare"):
        collector.skip_compare += ("stderr",)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item) -> None:
    """Before a notebook's kernel starts: a folder of its own for what it solves, so that none sees another's."""
    if mine.VARIABLE in os.environ:
        shared = Path(os.environ.setdefault(SHARED, os.environ[mine.VARIABLE]))
        os.environ[mine.VARIABLE] = str(shared / item.path.stem)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
