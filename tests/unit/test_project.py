"""The project's own files agree with each other, and its house rules hold in every file."""

import ast
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
import urllib.error
import urllib.request
import zipfile
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
EXTRAS = PYPROJECT["project"]["optional-dependencies"]
DISTRIBUTIONS = packages_distributions()  # import name -> the distributions that hold it
TARGETS = ["help", "setup", "lab", "demo", "test", "test-all", "lint", "format", "notebooks", "gpu-check", "exercises"]
TEXT_SUFFIXES = {".py", ".md", ".ipynb", ".toml", ".txt", ".yml", ".json", ".cfg", ".jinja", ""}


def tracked(*patterns):
    """Files that git knows or would add, so that a new file is checked before it is committed."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *patterns]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, encoding="utf-8", check=True).stdout.splitlines()
    return [ROOT / name for name in sorted(set(names)) if (ROOT / name).is_file()]


def read(name):
    return (ROOT / name).read_text(encoding="utf-8")


def declared(extra=None):
    """The requirements of the base or of one extra, the project's own extras followed."""
    lines = PYPROJECT["project"]["dependencies"] if extra is None else EXTRAS[extra]
    found = []
    for requirement in map(Requirement, lines):
        if requirement.name == PYPROJECT["project"]["name"]:
            found += [r for inner in requirement.extras for r in declared(inner)]
        else:
            found.append(requirement)
    return found


def canonical(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def pins():
    lines = [line.split("#")[0].strip() for line in read("constraints.txt").splitlines()]
    return [tuple(line.split("==")) for line in lines if line]


# Dependencies


def test_every_tested_dependency_is_pinned_once_to_a_supported_version():
    versions = {canonical(name): version for name, version in pins()}
    assert len(versions) == len(pins()), "a package is pinned twice"
    for requirement in declared() + declared("dev"):
        pin = versions.get(canonical(requirement.name))
        assert pin, f"constraints.txt does not pin {requirement.name}"
        assert requirement.specifier.contains(pin), f"constraints.txt pins {requirement.name}=={pin}, not {requirement}"


def test_torch_and_triton_are_pinned_as_the_pair_that_was_released_together():
    versions = dict(pins())
    assert (versions["torch"], versions["triton"]) == ("2.13.0", "3.7.1")


def test_constraints_leave_the_installers_alone():
    assert not {"pip", "setuptools", "wheel", "minillm-course"} & {canonical(name) for name, _ in pins()}


def test_environment_yml_has_no_packages_of_its_own():
    environment = yaml.safe_load(read("environment.yml"))
    assert environment["channels"] == ["conda-forge"]
    assert environment["dependencies"] == ["python=3.12", "pip", {"pip": ["-e .[course,dev]"]}]
    assert {"course", "dev"} <= EXTRAS.keys()


def test_one_lowest_python_version_everywhere():
    lowest = PYPROJECT["project"]["requires-python"].removeprefix(">=")
    assert PYPROJECT["tool"]["ruff"]["target-version"] == "py" + lowest.replace(".", "")
    assert f"Programming Language :: Python :: {lowest}" in PYPROJECT["project"]["classifiers"]
    assert f"(3, {lowest.split('.')[1]}) <= sys.version_info" in read("Makefile")


def test_version_stands_once():
    import minillm

    assert "version" not in PYPROJECT["project"]
    assert PYPROJECT["tool"]["hatch"]["version"]["path"] == "minillm/__init__.py"
    assert Version(minillm.__version__)


def imported_packages(source):
    """Top-level names of all packages that one file imports anywhere, other than Python's own and minillm."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.add(node.module.split(".")[0])
    return found - set(sys.stdlib_module_names) - {"minillm", "tests", "benchmarks"}


def undeclared(source):
    declarations = declared() + [requirement for extra in EXTRAS for requirement in declared(extra)]
    known = {canonical(requirement.name) for requirement in declarations}
    return {n for n in imported_packages(source) if not {canonical(d) for d in DISTRIBUTIONS.get(n, [n])} & known}


def test_every_imported_package_is_declared():
    for path in tracked("minillm/*.py", "tests/*.py", "benchmarks/*.py"):
        offence = undeclared(path.read_text(encoding="utf-8"))
        assert not offence, f"{path.relative_to(ROOT)} imports {offence}, which neither the base nor an extra declares"


def test_undeclared_packages_are_found_at_any_depth():
    source = "import torch, os\nfrom yaml.a import b\nfrom . import c\ndef f():\n    from nowhere.x import y\n"
    assert imported_packages(source) == {"torch", "yaml", "nowhere"} and undeclared(source) == {"nowhere"}


# import minillm


def run_python(code):
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, encoding="utf-8", check=True)


def test_import_minillm_loads_neither_torch_nor_anything_optional():
    code = "import sys, minillm; print(sorted({'torch', 'numpy', 'triton', 'transformers'} & set(sys.modules)))"
    assert run_python(code).stdout.strip() == "[]"


def test_the_engine_works_with_the_base_dependencies_alone():
    """Everything that only the extras cpu, course and serve bring is hidden, then a random model generates."""
    base = {canonical(requirement.name) for requirement in declared()}
    extra = {canonical(r.name) for name in ("cpu", "course", "serve") for r in declared(name)} - base
    hidden = {name for name, owners in DISTRIBUTIONS.items() if {canonical(owner) for owner in owners} & extra}
    assert {"numba", "triton", "transformers", "IPython", "matplotlib"} <= hidden
    code = f"""
import sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {hidden!r}:
            raise ModuleNotFoundError(f"{{name}} is hidden", name=name)
sys.meta_path.insert(0, Hidden())
from minillm import LLM, EngineConfig, SamplingParams
import minillm.cli
with LLM(model="random:tiny") as llm:
    output = llm.generate("a", SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False)[0]
print(len(output.outputs[0].token_ids), sorted({hidden!r} & set(sys.modules)))
"""
    assert run_python(code).stdout.strip() == "3 []"


def test_an_unknown_public_name_is_an_attribute_error():
    import minillm

    with pytest.raises(AttributeError, match="Llm"):
        _ = minillm.Llm
    assert set(minillm.__all__) == set(dir(minillm))


# make


def test_make_help_lists_every_target_and_every_target_exists():
    text = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, encoding="utf-8", check=True).stdout
    assert sorted(re.findall(r"^  make ([a-z-]+) +\S", text, re.MULTILINE)) == sorted(TARGETS)


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md", ".devcontainer/devcontainer.json", ".ci/run"])
def test_documents_name_only_make_targets_that_exist(document):
    named = set(re.findall(r"(?:`|\"|^| \d+m )make ([a-z-]+)(?=[`\s\",]|$)", read(document), re.MULTILINE))
    targets = set(re.findall(r"^([a-z-]+):", read("Makefile"), re.MULTILINE))
    assert named and named <= targets, f"{document} names {named - targets}"


def test_readme_names_the_two_commands():
    assert "make lab" in read("README.md") and "make test" in read("README.md")


def test_every_recipe_path_is_relative_so_that_a_space_above_does_no_harm():
    assert not re.findall(r"\$\(CURDIR\)|\$\(abspath|\$\(realpath|\$\$PWD", read("Makefile"))
    assert ".venv/bin/pip" not in read("Makefile") and ".venv/bin/jupyter" not in read("Makefile")


# House rules in every file

# Put together here so that this file obeys the rule it checks.
MACHINE_PATHS = re.compile("|".join(["/" + "root/", "/" + r"home/\w", "/" + r"Users/\w", "/" + r"work/\w"]))


def opens_without_encoding(source):
    """Line numbers of calls that read or write text in the machine's own encoding."""
    lines = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or any(k.arg == "encoding" for k in node.keywords):
            continue
        function = node.func
        name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
        modes = [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
        modes += [k.value.value for k in node.keywords if k.arg == "mode" and isinstance(k.value, ast.Constant)]
        binary = any(re.fullmatch(r"[rwax+]*b[rwax+]*", mode) for mode in modes)
        builtin_open = name == "open" and isinstance(function, ast.Name)
        # Path.read_text(encoding) and Path.write_text(data, encoding) may take it as an argument without a name.
        path_method = {"read_text": 1, "write_text": 2}.get(name, 0) > len(node.args)
        if (builtin_open and not binary) or path_method:
            lines.append(node.lineno)
    return lines


def test_every_text_file_is_opened_with_an_encoding():
    offences = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in tracked("*.py")
        for line in opens_without_encoding(path.read_text(encoding="utf-8"))
    ]
    assert offences == []


@pytest.mark.parametrize(
    "source, bad",
    [
        ("open('x')", True),
        ("open('x', 'w')", True),
        ("open('x', 'rb')", False),
        ("open('x', mode='wb')", False),
        ("open('x', encoding='utf-8')", False),
        ("p.read_text()", True),
        ("p.read_text('utf-8')", False),
        ("p.write_text(t)", True),
        ("p.write_text(t, encoding='utf-8')", False),
        ("archive.open('member')", False),
    ],
)
def test_encoding_guard(source, bad):
    assert bool(opens_without_encoding(source)) == bad


def text_files():
    return [p for p in tracked() if p.suffix in TEXT_SUFFIXES]


def test_no_file_names_a_path_of_one_machine():
    own = {str(ROOT), str(Path.home())} - {"/"}
    for path in text_files():
        text = path.read_text(encoding="utf-8")
        match = MACHINE_PATHS.search(text)
        assert not match, f"{path.relative_to(ROOT)} holds {match.group()}"
        assert not any(word in text for word in own), f"{path.relative_to(ROOT)} holds a path of this machine"


def test_machine_path_guard():
    assert MACHINE_PATHS.search("see /" + "home/ada/minillm") and MACHINE_PATHS.search("/" + "root/.cache")
    assert not MACHINE_PATHS.search("/content/minillm, ~/.cache, the root/leaf and a homework/x")


def test_no_unfinished_places():
    words = re.compile(r"\b(" + "|".join(["TO" + "DO", "FIX" + "ME", "XX" + "X", "LESSON_" + "TABLE"]) + r")\b")
    for path in text_files():
        text = re.sub(r'"image/png": "[^"]*"', "", path.read_text(encoding="utf-8"))  # base64 holds any three letters
        match = words.search(text)
        assert not match, f"{path.relative_to(ROOT)} holds {match.group()}"


def test_every_document_that_a_text_names_exists():
    for path in text_files():
        for name in re.findall(r"(?<![\w/.*-])([A-Z][A-Z_-]+\.md)\b", path.read_text(encoding="utf-8")):
            assert (ROOT / name).is_file(), f"{path.relative_to(ROOT)} names {name}, which does not exist"


def test_both_licences_are_stated():
    assert "Apache License" in read("LICENSE") and "END OF TERMS AND CONDITIONS" in read("LICENSE")
    assert "CC-BY-4.0" in read("LICENSE-TEXT") and "Apache License 2.0" in read("LICENSE-TEXT")
    assert PYPROJECT["project"]["license"] == "Apache-2.0 AND CC-BY-4.0"
    assert "Apache-2.0" in read("README.md") and "CC-BY-4.0" in read("README.md")


def test_top_level_folders_are_the_six_that_a_reader_expects():
    folders = {p.relative_to(ROOT).parts[0] for p in tracked() if len(p.relative_to(ROOT).parts) > 1}
    allowed = {"minillm", "notebooks", "exercises", "solutions", "tests", "benchmarks", ".ci", ".devcontainer"}
    assert folders <= allowed


def test_the_kernel_of_the_notebooks_is_this_python():
    from jupyter_client.kernelspec import KernelSpecManager
    from jupyter_client.manager import KernelManager

    spec = KernelSpecManager().get_kernel_spec("python3")
    assert spec.language == "python"
    assert KernelManager(kernel_name="python3").format_kernel_cmd()[0] == sys.executable


# In a copy, in a folder with a space


@pytest.fixture(scope="module")
def copy_with_a_space(tmp_path_factory):
    """The working tree as a newcomer's clone would hold it, sharing this environment."""
    if subprocess.run(["make", "-q", "setup"], cwd=ROOT).returncode != 0:
        pytest.skip("run make setup first, or the copy would set up this environment for itself")
    copy = tmp_path_factory.mktemp("fresh clone") / "mini llm"
    for path in tracked():
        target = copy / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, target)
    (copy / ".venv").symlink_to(ROOT / ".venv")
    subprocess.run(["git", "init", "-q", "."], cwd=copy, check=True)
    return copy


def newcomer(home):
    keep = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "MINILLM", "OMP"))}
    return {**keep, "HOME": str(home), "BROWSER": "none"}


@pytest.mark.slow
@pytest.mark.parametrize("target", ["help", "setup", "lint"])
def test_make_works_in_a_folder_with_a_space(copy_with_a_space, tmp_path, target):
    result = subprocess.run(
        ["make", target], cwd=copy_with_a_space, env=newcomer(tmp_path), capture_output=True, encoding="utf-8"
    )
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.slow
def test_make_demo_answers_in_a_folder_with_a_space(copy_with_a_space, tmp_path):
    result = subprocess.run(
        ["make", "demo"], cwd=copy_with_a_space, env=newcomer(tmp_path), capture_output=True, encoding="utf-8"
    )
    assert result.returncode == 0, result.stderr
    assert "Paris" in result.stdout and "tok/s" in result.stdout
    assert re.search(r"^TTFT", result.stdout, re.MULTILINE)


def status_of(url, patience=60):
    """HTTP status; the address is printed a moment before the server listens."""
    for _ in range(10 * patience):
        try:
            with urllib.request.urlopen(url, timeout=patience) as answer:
                return answer.status
        except urllib.error.HTTPError as error:
            return error.code
        except urllib.error.URLError:
            time.sleep(0.1)
    raise AssertionError(f"{url} does not answer")


@pytest.mark.slow
def test_make_lab_serves_lesson_00_on_loopback_and_prints_its_address(copy_with_a_space, tmp_path):
    lab = subprocess.Popen(
        ["make", "lab"],
        cwd=copy_with_a_space,
        env=newcomer(tmp_path),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        start_new_session=True,
    )
    lines = []
    try:
        for line in lab.stdout:
            lines.append(line)
            match = re.search(r"(http://127\.0\.0\.1:\d+)(/lab/tree/notebooks/00_the_wait\.ipynb)\?(token=\w+)", line)
            if match:
                break
        else:
            raise AssertionError("no address:\n" + "".join(lines))
        host, page, token = match.groups()
        for path in (page, "/api/contents/notebooks/00_the_wait.ipynb"):
            assert status_of(f"{host}{path}?{token}") == 200
    finally:
        os.killpg(lab.pid, signal.SIGTERM)
        lab.wait(timeout=60)


@pytest.mark.slow
def test_the_wheel_holds_every_file_of_the_package(tmp_path):
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(tmp_path), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    wheel = next(tmp_path.glob("*.whl"))
    assert wheel.name.startswith("minillm_course-")
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("minillm/")}
    assert packed == {p.relative_to(ROOT).as_posix() for p in tracked("minillm")}
