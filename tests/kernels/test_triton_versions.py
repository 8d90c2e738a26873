"""The whole table and the interpreter, with the installed Triton and with 3.6.0, the one that PyTorch 2.11 brings."""

import os
import subprocess
import sys
from importlib.metadata import version

import pytest

from minillm.kernels.compile import table
from tests.kernels.compile_checks import ROOT, all_broken_promises, compile_report, narrow_products

OLD = "3.6.0"
TESTED = "3.7.1"  # the version for which half-precision rows were chosen without any spill
MOST_COMPILATIONS = 160

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def old_triton(tmp_path_factory):
    """A folder with Triton 3.6.0, and a NumPy that its interpreter can use."""
    folder = tmp_path_factory.mktemp("triton")
    packages = [f"triton=={OLD}", "numpy<2.4"]
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), *packages]
    subprocess.run(install, check=True, timeout=600)
    return folder


def test_the_table_is_small_enough_to_be_compiled_in_every_run():
    assert len(table()) <= MOST_COMPILATIONS


def test_the_whole_table_with_the_installed_triton(tmp_path):
    report = compile_report(dump=tmp_path)
    assert len(report["rows"]) == len(table())
    assert all_broken_promises(report, half_spill_limit=0 if version("triton") == TESTED else 64) == []
    for path in tmp_path.glob("*.ttir"):
        assert narrow_products(path.read_text(encoding="utf-8")) == [], path.name


def test_the_whole_table_with_the_older_triton(old_triton):
    report = compile_report(packages=old_triton)
    assert report["versions"]["triton"] == OLD and len(report["rows"]) == len(table())
    assert all_broken_promises(report, half_spill_limit=64) == []


def test_the_kernels_under_the_interpreter_of_the_older_triton(old_triton):
    env = os.environ | {"PYTHONPATH": str(old_triton), "TRITON_INTERPRET": "1"}
    assert (
        subprocess.run(
            [sys.executable, "-c", f"import triton; assert triton.__version__ == {OLD!r}"], env=env
        ).returncode
        == 0
    )
    names = ("small_kernels", "flash", "paged_attention", "coded_linear", "rounding_kernels")
    files = [f"tests/kernels/test_{name}.py" for name in names]
    tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", *files]
    done = subprocess.run(tests, env=env, cwd=ROOT, capture_output=True, text=True, encoding="utf-8", timeout=1500)
    assert done.returncode == 0, done.stdout[-4000:]
