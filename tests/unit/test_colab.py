"""The set-up cell in Colab: it installs the course once, and what Colab's kernel stands on stays as it is.

The slow tests run the very cell in a fresh environment that pretends to be Colab: packages that Colab has are there
in name and version, `git clone` is led to a copy of this working tree, and pip asks the package index. Colab itself
has Python 3.13, here it is the Python of the tests.
"""

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from minillm.course.build import addresses, colab

# A GPU runtime of November 2026. The oldest numpy that the project takes is the hardest to keep.
COLAB = {
    "torch": "2.11.0+cu128",
    "triton": "3.6.0",
    "numpy": "2.0.2",
    "ipywidgets": "7.7.1",
    "ipython": "7.34.0",
    "transformers": "5.15.0",
}


def test_colab_keeps_the_packages_its_kernel_stands_on():
    kept = dict(line.split("==") for line in colab.keep_versions())
    import numpy
    import torch

    assert kept["numpy"] == numpy.__version__ and kept["torch"] == torch.__version__
    assert {"ipython", "ipywidgets"} <= kept.keys()


def test_colab_installs_a_clone_once(tmp_path, monkeypatch):
    clone = tmp_path / "clone"
    pretend(tmp_path / "site", "minillm-course", "9")
    info = tmp_path / "site" / "minillm_course-9.dist-info" / "direct_url.json"
    info.write_text(json.dumps({"url": clone.as_uri()}), encoding="utf-8")
    assert colab.needs_install(str(clone))
    monkeypatch.syspath_prepend(tmp_path / "site")
    assert not colab.needs_install(str(clone))
    assert colab.needs_install(str(tmp_path / "another"))


# The canary


def pretend(site, name, version):
    """Make pip and importlib believe that a package is installed in the folder `site`."""
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", encoding="utf-8")
    (info / "INSTALLER").write_text("pip\n", encoding="utf-8")
    (info / "RECORD").write_text(f"{info.name}/METADATA,,\n", encoding="utf-8")


class Runtime:
    """A Colab runtime in a folder: an environment of its own, and where `git clone` takes the project from."""

    def __init__(self, folder):
        self.home, self.origin = folder / "content" / "minillm", folder / "origin"
        self.python = folder / "env" / "bin" / "python"
        subprocess.run([sys.executable, "-m", "venv", str(folder / "env")], check=True)
        self.site = next((folder / "env" / "lib").glob("python3*/site-packages"))
        for name, version in COLAB.items():
            pretend(self.site, name, version)
        self.home.parent.mkdir()
        copy_working_tree(self.origin)

    def run(self, code, **more):
        """Run code as a cell would run; the project's address on GitHub leads to the copy."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
        address = f"https://github.com/{addresses.read_repo()}"
        git = {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_VALUE_0": address}
        git["GIT_CONFIG_KEY_0"] = f"url.{self.origin.as_uri()}.insteadOf"
        return subprocess.run(
            [str(self.python), "-c", code],
            **{"env": {**kept, **git, **more}, "cwd": self.home.parent, "capture_output": True, "encoding": "utf-8"},
        )

    def set_up(self):
        """The set-up cell of lesson 00, with Colab's folder moved."""
        cell = addresses.setup_cell(addresses.read_repo(), "main", "notebooks/00_the_wait.ipynb")
        assert "/content/minillm" in cell
        colab_is_there = "import sys, types\nsys.modules['google.colab'] = types.ModuleType('google.colab')\n"
        return self.run(colab_is_there + cell.replace("/content/minillm", str(self.home)))

    def resolve(self, keep):
        """What pip would install, name -> version, given the versions that the set-up cell keeps, or none."""
        code = f"""
import subprocess, sys
sys.path.insert(0, {str(self.origin)!r})
from pathlib import Path
from minillm.course.build import colab
Path("keep.txt").write_text("\\n".join(colab.keep_versions() if {keep!r} else []), encoding="utf-8")
command = colab.pip_command({str(self.origin)!r}, Path("keep.txt"))
sys.exit(subprocess.run([*command, "--dry-run", "--report", "report.json"]).returncode)
"""
        done = self.run(code)
        if done.returncode:
            raise RuntimeError(done.stdout + done.stderr)
        report = json.loads((self.home.parent / "report.json").read_text(encoding="utf-8"))
        return {item["metadata"]["name"].lower(): item["metadata"]["version"] for item in report["install"]}

    def versions(self):
        """Of each package that Colab had: the versions that are there now."""
        found = {name: [] for name in COLAB}
        for distribution in importlib.metadata.distributions(path=[str(self.site)]):
            if distribution.name.lower() in found:
                found[distribution.name.lower()].append(distribution.version)
        return found


def copy_working_tree(target):
    """A repository with one commit on `main`: what git knows or would add here."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=addresses.ROOT, capture_output=True, encoding="utf-8", check=True).stdout
    for name in filter(lambda name: (addresses.ROOT / name).is_file(), names.splitlines()):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(addresses.ROOT / name, target / name)
    commit(target, "init", "-q", "-b", "main")


def commit(repository, *first):
    who = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
    for arguments in (first, ["add", "-A"], [*who, "commit", "-q", "-m", "a"]):
        subprocess.run(["git", *arguments], cwd=repository, check=True, capture_output=True)


@pytest.fixture(scope="module")
def runtime(tmp_path_factory):
    return Runtime(tmp_path_factory.mktemp("colab"))


@pytest.mark.slow
def test_pip_would_change_nothing_that_colab_stands_on(runtime):
    changed = runtime.resolve(keep=True)
    assert "minillm-course" in changed and "gguf" in changed
    assert not changed.keys() & COLAB.keys()


@pytest.mark.slow
def test_the_cell_installs_the_course_beside_what_colab_has(runtime):
    first = runtime.set_up()
    assert first.returncode == 0, first.stdout + first.stderr
    assert "Successfully installed" in first.stdout, "what pip says is shown"
    assert runtime.versions() == {name: [version] for name, version in COLAB.items()}
    again = runtime.set_up()
    assert (again.returncode, again.stdout) == (0, ""), "a second run does nothing"

    # The packages that were only pretended come from the environment of the tests; minillm comes from the clone.
    code = "import minillm\nfrom minillm import LLM\nprint(minillm.__file__)\nllm = LLM('random:tiny')\n"
    code += "print(len(llm.generate('a', use_tqdm=False)[0].outputs[0].token_ids) > 0)"
    imported = runtime.run(code, PYTHONPATH=sysconfig.get_paths()["purelib"])
    assert imported.returncode == 0, imported.stderr
    file, generated = imported.stdout.splitlines()
    assert Path(file).is_relative_to(runtime.home) and generated == "True"


@pytest.mark.slow
def test_a_pin_that_forces_numpy_up_is_refused(runtime):
    """Were it not kept, numpy would be replaced under the running kernel."""
    pyproject = runtime.origin / "pyproject.toml"
    text = pyproject.read_text(encoding="utf-8")
    pyproject.write_text(text.replace('"numpy>=2.0"', '"numpy>=2.3"'), encoding="utf-8")
    try:
        assert runtime.resolve(keep=False)["numpy"] > COLAB["numpy"]
        with pytest.raises(RuntimeError, match=r"conflict(.|\n)*numpy==2\.0\.2"):
            runtime.resolve(keep=True)
    finally:
        pyproject.write_text(text, encoding="utf-8")


OLD_DISPLAY = f"""
import IPython, ipywidgets
assert (IPython.__version__, ipywidgets.__version__) == ({COLAB["ipython"]!r}, {COLAB["ipywidgets"]!r})
from IPython.core.interactiveshell import InteractiveShell
InteractiveShell.instance()
from minillm.course import figures, source, widgets
from minillm.engine import Engine

drawn = []
def draw(**values):
    drawn.append(values)
    return figures.street("llm")

controls = dict(a=widgets.text_line("a", "x"), b=widgets.slider("b", 0, 3, 1), c=widgets.choice("c", ["u", "v"], "u"))
box = widgets.picture_box(draw, **controls)
controls["a"].value, controls["b"].value, controls["c"].value = "y", 2, "v"
assert drawn[-1] == dict(a="y", b=2, c="v") and box.children[-1].value.startswith("<img alt="), drawn
typed = widgets.text_box(drawn.append, "d", "x")
typed.children[0].value = "z"
assert drawn[-1] == "z"
source.show_code(Engine.step)
"""


@pytest.mark.slow
def test_boxes_and_pictures_work_with_the_ipywidgets_and_ipython_of_colab(tmp_path):
    """Both are years older in Colab than on a desk, and are installed here with what only they still need."""
    wanted = [f"{name}=={COLAB[name]}" for name in ("ipython", "ipywidgets")]
    wanted += ["backcall", "decorator", "ipython_genutils", "pickleshare", "setuptools"]
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(tmp_path), *wanted]
    subprocess.run(command, check=True, capture_output=True)
    path = {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(addresses.ROOT)])}
    done = subprocess.run([sys.executable, "-c", OLD_DISPLAY], env=os.environ | path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
