"""The GPU check, tried on a CPU: every section runs, what fails or dies loses only itself, and nothing is invented."""

import json
import os
import subprocess
import sys
import textwrap

import pytest

from benchmarks.gpu_check import __main__ as program
from benchmarks.gpu_check.measure import summary
from benchmarks.gpu_check.sections import SECTIONS
from benchmarks.gpu_check.tell import line, with_rates, with_shares

CHECK = [sys.executable, "-m", "benchmarks.gpu_check"]


def gpu_check(*args, **options):
    return subprocess.run(
        [*CHECK, *map(str, args)], capture_output=True, text=True, encoding="utf-8", timeout=500, **options
    )


@pytest.fixture(scope="module")
def dry_run(tmp_path_factory):
    out = tmp_path_factory.mktemp("gpu_check") / "dry.json"
    done = gpu_check("--dry-run", "--out", out)
    return done, json.loads(out.read_text(encoding="utf-8"))


# ---- the whole, in a dry run -----------------------------------------------------------------


@pytest.mark.slow
def test_every_section_runs_and_has_rows(dry_run):
    done, result = dry_run
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert list(result["sections"]) == [section.name for section in SECTIONS]
    for name, record in result["sections"].items():
        assert record["error"] is None and not record["cut"], (name, record)
        assert record["rows"], name
        for row in record["rows"]:
            assert row.get("ok", True)
            assert all("median_us" in time for time in row.get("times", {}).values()), row


@pytest.mark.slow
def test_a_dry_run_says_that_it_measured_no_gpu(dry_run):
    _, result = dry_run
    assert result["dry_run"] and result["environment"]["gpu"] is None and "interpreter" in result["note"]
    assert "percent" not in json.dumps(result)


@pytest.mark.slow
def test_a_failing_cell_of_a_lesson_is_listed_and_the_others_go_on(dry_run):
    _, result = dry_run
    (row,) = result["sections"]["lessons"]["rows"]
    assert (row["cells"], row["run"]) == (3, 3)
    (failed,) = row["failed"]
    assert failed["cell"] == 1 and "ZeroDivisionError" in failed["error"]


def test_without_a_gpu_it_says_so_and_fails(tmp_path):
    done = gpu_check("--out", tmp_path / "out.json", env={"CUDA_VISIBLE_DEVICES": "", "PATH": ""})
    assert done.returncode == 2
    assert "no NVIDIA GPU" in done.stderr and not (tmp_path / "out.json").exists()


def test_an_unknown_section_is_refused_with_the_known_ones():
    done = gpu_check("--dry-run", "--only", "prefil")
    assert done.returncode == 2 and "flash prefill" in done.stdout


@pytest.mark.slow
def test_the_check_needs_nothing_beside_torch_triton_and_numpy(tmp_path):
    """On a rented GPU there is often no more. Blocked: model files, tokenizers, notebooks, progress bars."""
    blocked = """gguf transformers tokenizers safetensors jinja2 regex tqdm psutil numba llvmlite matplotlib IPython
    ipykernel ipywidgets jupyterlab nbformat nbclient huggingface_hub accelerate pytest hypothesis yaml""".split()
    (tmp_path / "sitecustomize.py").write_text(
        textwrap.dedent(f"""
        import sys

        class Blocked:
            def find_spec(self, name, path=None, target=None):
                if name.split(".")[0] in {blocked!r}:
                    raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

        sys.meta_path.insert(0, Blocked())
        """),
        encoding="utf-8",
    )
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    out = tmp_path / "out.json"
    only = ["--only", "correctness", "--only", "transformers", "--only", "lessons"]
    done = gpu_check("--dry-run", "--out", out, *only, env=env)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    result = json.loads(out.read_text(encoding="utf-8"))
    assert "not installed" in result["sections"]["transformers"]["rows"][0]["note"]
    assert [failed["cell"] for failed in result["sections"]["lessons"]["rows"][0]["failed"]] == [1]


# ---- one process after another ---------------------------------------------------------------


def run_children(monkeypatch, script, names, limits=None, seconds=60.0):
    """`program.run` with a child process of our own: a script that reads the names as sys.argv[1]."""
    prelude = "import json, os, sys, time\ndef say(**message): print(json.dumps(message), flush=True)\n"
    real = subprocess.Popen

    def start(command, **options):
        child = command[command.index("--child") + 1]
        return real([sys.executable, "-c", prelude + textwrap.dedent(script), child], **options)

    monkeypatch.setattr(program.subprocess, "Popen", start)
    return dict(program.run(list(names), limits or dict.fromkeys(names, 30.0), False, seconds))


def test_a_process_that_dies_loses_only_its_section(monkeypatch, capsys):
    records = run_children(
        monkeypatch,
        """
        for name in sys.argv[1].split(","):
            say(begin=name)
            say(row={"of": name})
            if name == "b": os._exit(11)
            print("a library speaks")
            say(end=name, cut=False, error=None)
        """,
        "abc",
    )
    assert [*records] == ["a", "b", "c"]
    assert records["a"]["error"] is None and records["c"]["error"] is None
    assert "status 11" in records["b"]["error"]
    assert [record["rows"] for record in records.values()] == [[{"of": "a"}], [{"of": "b"}], [{"of": "c"}]]
    assert "a library speaks" in capsys.readouterr().out


def test_a_process_that_ends_between_sections_loses_none(monkeypatch):
    records = run_children(
        monkeypatch,
        """
        name = sys.argv[1].split(",")[0]
        say(begin=name)
        say(end=name, cut=False, error="Traceback: no luck" if name == "a" else None)
        sys.exit(3)
        """,
        "abc",
    )
    assert [record["error"] for record in records.values()] == ["Traceback: no luck", None, None]


def test_a_process_that_hangs_is_ended_and_the_next_section_runs(monkeypatch):
    monkeypatch.setattr(program, "GRACE", 1.0)
    records = run_children(
        monkeypatch,
        """
        for name in sys.argv[1].split(","):
            say(begin=name)
            if name == "a": time.sleep(60)
            say(end=name, cut=False, error=None)
        """,
        "ab",
        limits={"a": 0.5, "b": 30.0},
    )
    assert "did not answer" in records["a"]["error"] and records["b"]["error"] is None


def test_when_the_time_is_over_what_was_measured_is_kept(monkeypatch):
    records = run_children(
        monkeypatch,
        """
        say(begin="a")
        say(row={"n": 1})
        time.sleep(60)
        """,
        "abc",
        seconds=3.0,
    )
    assert [*records] == ["a", "b", "c"]
    assert records["a"]["rows"] == [{"n": 1}]
    assert all(record["cut"] and record["error"] is None for record in records.values())


# ---- rows ------------------------------------------------------------------------------------


def row_of(seconds, **more):
    return with_rates({"n": 5, "times": {"ours": summary(seconds), "theirs": summary([2e-3] * 3)}, **more})


def test_rates_and_ratios_follow_from_the_median():
    row = row_of([1e-3, 5e-3, 1e-3], work={"flops": 4e9}, against="theirs")
    assert row["times"]["ours"]["tflops"] == 4.0 and row["times"]["theirs"]["tflops"] == 2.0
    assert row["times"]["ours"]["times_as_fast"] == 2.0 and "times_as_fast" not in row["times"]["theirs"]
    assert "4 tflops" in line("flash", row) and "x2.00" in line("flash", row)


def test_a_body_that_failed_is_told_and_gets_no_rate():
    row = with_rates({"times": {"ours": {"error": "OutOfResources: shared memory"}}, "work": {"bytes": 1}})
    assert row["times"]["ours"] == {"error": "OutOfResources: shared memory"}
    assert "shared memory" in line("flash", row)


def test_shares_need_a_gpu_and_its_ceilings():
    def sections():
        ceiling = {"ceiling": "tb_per_s", "value": 4.0, "times": {}}
        row = row_of([1e-3], work={"bytes": 2e9})  # 2 TB/s
        return {"ceilings": {"rows": [ceiling]}, "decode": {"rows": [row]}}

    gpu = {"gpu": "NVIDIA H200", "datasheet": {"tb_per_s": 4.8}}
    time = with_shares(sections(), gpu)["decode"]["rows"][0]["times"]["ours"]
    assert time["tb_per_s_percent_of_measured"] == 50.0 and time["tb_per_s_percent_of_datasheet"] == 41.7
    assert "percent" not in json.dumps(with_shares(sections(), {"gpu": None}))
    unknown = with_shares(sections(), {"gpu": "Some new GPU"})["decode"]["rows"][0]["times"]["ours"]
    assert "tb_per_s_percent_of_datasheet" not in unknown


def test_the_summary_keeps_the_spread():
    times = summary([i * 1e-6 for i in range(1, 101)])
    assert times == {"median_us": 50.5, "low_us": 6.0, "high_us": 95.0, "runs": 100}


def test_a_row_that_is_not_ok_fails_its_section():
    good = {"rows": [{"ok": True}, {}], "error": None}
    assert not program.is_failure(good)
    assert program.is_failure(good | {"rows": [{"ok": False}]}) and program.is_failure(good | {"error": "x"})


def test_the_limits_of_the_sections_leave_something_to_each():
    assert sum(section.seconds for section in SECTIONS[:7]) < program.TOTAL_SECONDS <= 360
