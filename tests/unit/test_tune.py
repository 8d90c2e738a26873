"""The tuner of launch rows: its code runs under the interpreter; what it measures there means nothing."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_every_kernel_has_candidates_and_the_tables_own_row_is_among_them(tmp_path):
    out = tmp_path / "tune.json"
    command = [sys.executable, "-m", "benchmarks.tune", "--dry-run", "--out", str(out)]
    run = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    result = json.loads(out.read_text(encoding="utf-8"))
    assert result["dry_run"] and result["gpu"] is None
    assert [problem["kernel"] for problem in result["problems"]] == ["flash", "paged prefill", "paged decode"]
    for problem in result["problems"]:
        times = [one["median_us"] for one in problem["candidates"]]
        assert times == sorted(times) and len(times) >= 2
        assert problem["table"] in [one["candidate"][:4] for one in problem["candidates"]]
    assert run.stdout.count("<- table") >= 3
