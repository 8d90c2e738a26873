"""Every lesson's code cells, run as a script on random weights of the embedded model's shape.

What a random model says is noise, so a cell that compares words may fail here; what must not fail is the code. The
failures are listed cell by cell, the others go on. Needs no Jupyter: where IPython, ipywidgets or the like are missing,
their calls do nothing.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from benchmarks.gpu_check.sections import Check

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 80  # for all of them
AT_ONCE = 6
KV_CACHE_BYTES = 2**30  # of each engine, so that several lessons fit one GPU


def rows(check: Check) -> Iterator[dict]:
    """One row per lesson: cells, and for each that failed its number and the error. A dry run has its own lesson."""
    with tempfile.TemporaryDirectory() as folder:
        if check.dry:
            lesson = Path(folder, "dry.ipynb")
            cells = [
                ["from minillm import LLM\n", "print(LLM().generate([1, 2, 3], use_tqdm=False))"],
                ["1 / 0"],
                ["x = 1"],
            ]
            cells = [{"cell_type": "code", "source": source} for source in cells]
            lesson.write_text(json.dumps({"cells": cells}), encoding="utf-8")
            lessons = [lesson]
        else:
            lessons = sorted((ROOT / "notebooks").glob("[0-9]*.ipynb"))
        model = "random:tiny" if check.dry else "random:135m"
        end = time.perf_counter() + SECONDS
        with ThreadPoolExecutor(min(AT_ONCE, os.cpu_count() or 1)) as pool:
            for done in as_completed([pool.submit(run_lesson, lesson, model, Path(folder), end) for lesson in lessons]):
                yield done.result()


def run_lesson(notebook: Path, model: str, folder: Path, end: float) -> dict:
    """Export a notebook's code cells to a script in `folder` and run it until `end` at most."""
    cells = [
        "".join(cell["source"])
        for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]
        if cell["cell_type"] == "code"
    ]
    script, found = folder / f"{notebook.stem}.py", folder / f"{notebook.stem}.json"
    script.write_text(export(cells, str(found)), encoding="utf-8")
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    env = os.environ | {"MINILLM_MODEL": model, "MPLBACKEND": "Agg", "PYTHONPATH": paths}
    where = notebook.parent if notebook.parent.is_relative_to(ROOT) else folder
    try:
        run = subprocess.run(
            [sys.executable, str(script)],
            env=env,
            cwd=where,
            capture_output=True,
            timeout=max(1, end - time.perf_counter()),
        )
        note = "" if run.returncode == 0 else run.stderr.decode(errors="replace")[-400:]
    except subprocess.TimeoutExpired:
        note = "stopped: no time was left"
    result = json.loads(found.read_text(encoding="utf-8")) if found.exists() else {"run": 0, "failed": []}
    row = {"lesson": notebook.stem, "cells": len(cells), "run": result["run"], "failed": result["failed"]}
    return row | ({"note": note} if note else {})


def export(cells: list[str], report: str) -> str:
    """A script that runs the cells in one namespace, goes on after an error, and lists the errors in `report`."""
    return (
        "\n".join(
            ["# Written by benchmarks.gpu_check.lessons", PRELUDE, f"main({cells!r}, {report!r}, {KV_CACHE_BYTES})"]
        )
        + "\n"
    )


PRELUDE = '''
import importlib.abc, importlib.machinery, importlib.util, json, sys, traceback, types

MISSING = ("IPython", "ipywidgets", "nbformat", "ipykernel")


class Nothing:
    """Stands for whatever a missing front end would offer: called, entered, indexed or asked, it is itself."""
    def __init__(self, *args, **options): pass
    def __call__(self, *args, **options): return args[0] if len(args) == 1 and callable(args[0]) else Nothing()
    def __getattr__(self, name):
        if name.startswith("__"): raise AttributeError(name)
        return Nothing()
    def __enter__(self): return self
    def __exit__(self, *error): return False
    def __iter__(self): return iter(())
    def __or__(self, other): return self
    __ror__ = __or__


class Front(types.ModuleType):
    __path__ = []
    def __getattr__(self, name):
        if name.startswith("__"): raise AttributeError(name)
        return None if name == "get_ipython" else type(name, (Nothing,), {})


class Stand(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.split(".")[0] in MISSING else None
    def create_module(self, spec):
        module = Front(spec.name)
        if spec.name == "IPython": module.get_ipython = lambda: None
        return module
    def exec_module(self, module): pass


sys.meta_path.append(Stand())  # last: what is installed is used


def main(cells, report, kv_cache_bytes):
    from minillm import LLM
    make = LLM.__init__
    LLM.__init__ = lambda self, model=None, **options: make(
        self, model, **({"kv_cache_memory_bytes": kv_cache_bytes} if "num_kv_blocks" not in options else {}) | options
    )
    names, failed = {"__name__": "__main__"}, []
    for number, cell in enumerate(cells):
        lines = ["pass" if line.lstrip().startswith(("%", "!")) else line for line in cell.split("\\n")]
        try:
            exec(compile("\\n".join(lines), f"cell {number}", "exec"), names)
        except Exception as error:
            place = [f"{f.name} line {f.lineno} of {f.filename}" for f in traceback.extract_tb(error.__traceback__)][-1]
            failed.append({"cell": number, "error": f"{type(error).__name__}: {error}"[:300], "at": place})
        with open(report, "w") as file:
            json.dump({"run": number + 1, "failed": failed}, file)
'''
