"""The comparison with other engines: its code runs, and every engine answers with the same figures."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_each_engine_runs_in_a_process_of_its_own(tmp_path):
    out = tmp_path / "peers.json"
    command = [sys.executable, "-m", "benchmarks.peers", "--quick", "--rounds", "1", "--out", str(out)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr[-2000:]
    engines = json.loads(out.read_text(encoding="utf-8"))["engines"]
    assert list(engines) == ["minillm", "minillm, no 4-bit copy", "transformers"]
    figures = {"ttft_32_s", "decode_at_16_tok_s", "mix_s", "mix_output_tok_s"}
    assert all(set(row) == figures and min(row.values()) > 0 for row in engines.values())


def test_an_engine_that_fails_says_why(tmp_path):
    command = [
        sys.executable,
        "-m",
        "benchmarks.peers",
        "--child",
        "transformers",
        "--folder",
        str(tmp_path),
        "--quick",
    ]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert run.returncode != 0 and str(tmp_path) in run.stderr
