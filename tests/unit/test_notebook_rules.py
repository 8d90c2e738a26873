"""Every committed notebook obeys the rules, each rule catches its offence, and `make notebooks` writes good ones.

The notebook of these tests lies in a folder of no kind, so that only the rules for all notebooks hold; those for
lessons and exercises are tested in test_notebook_text.py.
"""

import copy
import json
import subprocess
import sys
from types import SimpleNamespace

import nbformat
import pytest

from minillm.course.build import addresses, nbval_run, structure
from minillm.course.build.notebooks import NotebookError, rebuild
from minillm.course.build.structure import committed, find_problems

REPO = "ada/course"
PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR4nGNgYGBgAAAABQABpfZFQAAAAABJRU5ErkJggg=="
NBVAL_CFG = addresses.ROOT / "minillm/course/build/nbval_sanitize.cfg"


def test_all_committed_notebooks_obey_the_rules():
    offences = [f"{path.name}: {problem}" for path in committed() for problem in find_problems(path)]
    assert offences == []


# One good notebook, and what spoils it


@pytest.fixture
def root(tmp_path):
    """A repository in miniature, in a folder with a space."""
    root = tmp_path / "a course"
    (root / "drafts").mkdir(parents=True)
    (root / "pyproject.toml").write_text(f'[tool.minillm]\nREPO = "{REPO}"\n', encoding="utf-8")
    (root / "README.md").write_text("# A course\n", encoding="utf-8")
    return root


def code(name, source, count, outputs=()):
    cell = {"cell_type": "code", "id": name, "metadata": {}, "source": source}
    return {**cell, "execution_count": count, "outputs": list(outputs)}


def markdown(name, source):
    return {"cell_type": "markdown", "id": name, "metadata": {}, "source": source}


def picture(alt):
    return {"output_type": "display_data", "data": {"image/png": PNG}, "metadata": {"image/png": {"alt": alt}}}


def good_notebook():
    path = "drafts/00_first.ipynb"
    printed = {"output_type": "stream", "name": "stdout", "text": "3\n"}
    return {
        "nbformat": 4,
        "nbformat_minor": 5,
        "metadata": {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}},
        "cells": [
            markdown("badge", addresses.badge_cell(REPO, "main", path)),
            markdown("title", "# First\n\nSee [the readme](../README.md#top) and [a paper](https://arxiv.org/abs/1)."),
            code("setup", addresses.setup_cell(REPO, "main", path), 1),
            code("sum", "print(1 + 2)  # a comment; with a semicolon;", 2, [printed]),
            code("picture", "show()", 3, [picture("three bars, the second is the tallest")]),
        ],
    }


def problems_of(root, notebook):
    path = root / "drafts" / "00_first.ipynb"
    path.write_text(json.dumps(notebook), encoding="utf-8")
    return find_problems(path, root)


def test_a_good_notebook_has_no_problems(root):
    assert problems_of(root, good_notebook()) == []


def spoil(change):
    """The good notebook after `change(notebook, cells by id)`."""
    notebook = copy.deepcopy(good_notebook())
    change(notebook, {cell["id"]: cell for cell in notebook["cells"]})
    return notebook


OFFENCES = {
    "another kernel": (lambda n, c: n["metadata"]["kernelspec"].update(name="my-env"), "kernelspec"),
    "widget state": (lambda n, c: n["metadata"].update(widgets={}), "metadata.widgets"),
    "timestamps": (lambda n, c: c["sum"]["metadata"].update(execution={"iopub": "now"}), "metadata.execution"),
    "no id": (lambda n, c: c["sum"].pop("id"), "no valid id"),
    "an id twice": (lambda n, c: c["sum"].update(id="title"), "two cells have the id title"),
    "a cell not run": (lambda n, c: c["sum"].update(execution_count=None), "execution counts"),
    "run out of order": (lambda n, c: c["sum"].update(execution_count=7), "execution counts"),
    "an error": (lambda n, c: c["sum"]["outputs"].append({"output_type": "error"}), "cell sum ends in an error"),
    "stderr": (lambda n, c: c["sum"]["outputs"][0].update(name="stderr"), "cell sum writes to stderr"),
    "no alt text": (lambda n, c: c["picture"].update(outputs=[picture(" ")]), "image/png without alt text"),
    "clear_output": (lambda n, c: c["sum"].update(source="clear_output()"), "clear_output"),
    "a long line": (lambda n, c: c["sum"].update(source="x = '" + "a" * 100 + "'"), "106 columns"),
    "a hidden value": (lambda n, c: c["sum"].update(source="x = 3\nx;"), "ends a line in ';'"),
    "hidden before a comment": (lambda n, c: c["sum"].update(source="plot(); # quiet\nx"), "ends a line in ';'"),
    "not Python": (lambda n, c: c["sum"].update(source="x = ("), "not Python"),
    "a skipped cell": (lambda n, c: c["sum"].update(source="# NBVAL_SKIP\nx"), "only nbval-ignore-output"),
    "an allowed failure": (lambda n, c: c["sum"]["metadata"].update(tags=["raises-exception"]), "may fail"),
    "mostly ignored": (
        lambda n, c: (
            c["sum"].update(source="#NBVAL_IGNORE_OUTPUT\nx"),
            c["picture"]["metadata"].update(tags=["nbval-ignore-output"]),
        ),
        "2 of 3 cells have ignored output",
    ),
    "too many words": (lambda n, c: c["title"].update(source="word " * 1_651), "words of prose"),
    "a text picture without alt": (lambda n, c: c["title"].update(source="![](../README.md)"), "no alt text"),
    "an html picture without alt": (lambda n, c: c["title"].update(source='<img src="../README.md">'), "no alt text"),
    "an emoji": (lambda n, c: c["title"].update(source="Well done \U0001f389"), "emoji"),
    "a class that is gone": (lambda n, c: c["title"].update(source="`BlockPool.alocate`"), "which minillm does not"),
    "a dead link": (lambda n, c: c["title"].update(source="[x](../GONE.txt#a)"), "links to ../GONE.txt"),
    "a dead picture": (lambda n, c: c["title"].update(source='<img alt="a" src="no.png">'), "links to no.png"),
    "no badge": (lambda n, c: n["cells"].pop(0), "not the Colab badge"),
    "a badge of another file": (
        lambda n, c: c["badge"].update(source=addresses.badge_cell(REPO, "main", "drafts/01_second.ipynb")),
        "not the Colab badge",
    ),
    "a badge of another tag": (
        lambda n, c: c["badge"].update(source=addresses.badge_cell(REPO, "v1", "drafts/00_first.ipynb")),
        "not the Colab badge",
    ),
    "no set-up cell": (lambda n, c: n["cells"].remove(c["setup"]), "not the set-up cell"),
    "an edited set-up cell": (lambda n, c: c["setup"].update(source="# setup:\nx"), "not the set-up cell"),
    "too large": (lambda n, c: c["sum"]["outputs"][0].update(text="a" * 1_000_000), "bytes, allowed are 1,000,000"),
}


@pytest.mark.parametrize("offence", OFFENCES)
def test_each_rule_catches_its_offence(root, offence):
    change, message = OFFENCES[offence]
    problems = problems_of(root, spoil(change))
    assert any(message in problem for problem in problems), problems


def test_every_rule_has_an_offence_that_it_alone_catches():
    rules = structure.EXECUTED + structure.COMMON
    spoilt = [spoil(change) for change, _ in OFFENCES.values()]
    assert {rule for rule in rules if any(list(rule(notebook)) for notebook in spoilt)} == set(rules)


def test_ipython_lines_do_not_count_as_hidden_values():
    assert not structure.ends_in_semicolon("!ls;\n%timeit f();\nx = 'a;'\nf(';')\na = 1; b = 2")


# make notebooks


def write_lesson(root, *sources, name="00_first"):
    cells = [nbformat.v4.new_markdown_cell("# A lesson")] + [nbformat.v4.new_code_cell(s) for s in sources]
    path = root / "drafts" / f"{name}.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata={"widgets": {}}), path)
    return path


def test_a_rebuilt_notebook_is_good_and_rebuilding_it_again_changes_no_byte(root):
    path = write_lesson(root, "print('a')\nprint('b')", "import os\nos.path.basename(os.getcwd())")
    assert rebuild(path, REPO, "main", root=root) == []
    first = path.read_bytes()
    assert rebuild(path, REPO, "main", root=root) == []
    assert path.read_bytes() == first
    assert first.endswith(b"}\n")
    cells = json.loads(first)["cells"]
    assert [c["execution_count"] for c in cells if c["cell_type"] == "code"] == [1, 2, 3]
    assert "".join(cells[3]["outputs"][0]["text"]) == "a\nb\n"
    assert cells[4]["outputs"][0]["data"]["text/plain"] == ["'drafts'"], "it runs in the notebook's own folder"


@pytest.mark.parametrize("source, why", [("1 / 0", "ZeroDivisionError"), ("import sys\nsys.stderr.write('oh')", "oh")])
def test_a_cell_that_fails_or_writes_to_stderr_leaves_the_file_alone(root, source, why):
    path = write_lesson(root, source)
    before = path.read_bytes()
    with pytest.raises(NotebookError, match=why):
        rebuild(path, REPO, "main", root=root)
    assert path.read_bytes() == before


def test_a_new_address_reaches_pyproject_readme_badge_and_clone_line(root):
    path = write_lesson(root, "3")
    link = f"https://colab.research.google.com/github/{REPO}/blob/main/drafts/00_first.ipynb"
    (root / "README.md").write_text(f"[go]({link}) [home](https://github.com/{REPO})", encoding="utf-8")
    rebuild(path, REPO, "main", run=False, root=root)
    addresses.write_address(root, "eve/fork", "v2")
    rebuild(path, addresses.read_repo(root), "v2", run=False, root=root)
    texts = [file.read_text(encoding="utf-8") for file in (root / "pyproject.toml", root / "README.md", path)]
    assert not any(REPO in text for text in texts)
    assert all("eve/fork" in text for text in texts)
    assert "eve/fork/blob/v2/drafts/00_first.ipynb" in texts[1] and "eve/fork/blob/v2/drafts" in texts[2]
    assert 'REPO, REF = \\"eve/fork\\", \\"v2\\"' in texts[2]
    assert len(json.loads(texts[2])["cells"]) == 4, "the opening cells are replaced, not added again"


def test_cleaning_drops_what_differs_between_machines_and_keeps_the_rest(root):
    path = write_lesson(root, "3")
    notebook = nbformat.read(path, as_version=4)
    notebook.metadata.update(language_info={"name": "python", "version": "3.99"}, accelerator="GPU", vscode={"a": 1})
    notebook.cells[1].metadata.update(execution={"iopub.execute_input": "2020"}, tags=["hide"], scrolled=True)
    ids = [cell.id for cell in notebook.cells]
    nbformat.write(notebook, path)
    rebuild(path, REPO, "main", run=False, root=root)
    cleaned = json.loads(path.read_text(encoding="utf-8"))
    assert sorted(cleaned["metadata"]) == ["accelerator", "kernelspec", "language_info"]
    assert "version" not in cleaned["metadata"]["language_info"]
    assert cleaned["cells"][3]["metadata"] == {"tags": ["hide"]}
    assert [cell["id"] for cell in cleaned["cells"]] == ["badge", ids[0], "setup", ids[1]]


# The set-up cell


def test_the_set_up_cell_is_silent_and_may_run_twice():
    cell = addresses.setup_cell(REPO, "main", "drafts/00_first.ipynb")
    done = subprocess.run([sys.executable, "-c", f"{cell}\n{cell}"], capture_output=True, cwd=addresses.ROOT)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_the_set_up_cell_says_what_to_do_when_minillm_is_missing(tmp_path):
    cell = addresses.setup_cell(REPO, "main", "drafts/00_first.ipynb")
    done = subprocess.run([sys.executable, "-S", "-c", cell], capture_output=True, cwd=tmp_path, encoding="utf-8")
    assert done.returncode == 1 and "make lab" in done.stderr


# nbval, made strict


def report(name, outcome="passed", when="call", seconds=1.0, **extra):
    attributes = {"nodeid": f"notebooks/{name}::Cell 0", "outcome": outcome, "when": when, "duration": seconds}
    return SimpleNamespace(**attributes, skipped=outcome == "skipped", **extra)


def test_two_passed_cells_of_two_are_no_problem():
    tally = nbval_run.Tally()
    for _ in range(2):
        tally.pytest_runtest_logreport(report("a.ipynb"))
    assert tally.problems({"a.ipynb": (2, 1)}) == []


@pytest.mark.parametrize(
    "last, cells, message",
    [
        (report("a.ipynb", "skipped", wasxfail="timed out"), (2, 2), "1 of 2 code cells passed"),
        (report("a.ipynb", "skipped", when="setup"), (2, 2), "1 of 2 code cells passed"),
        (report("a.ipynb", "failed"), (2, 2), "1 of 2 code cells passed"),
        (report("b.ipynb"), (2, 2), "1 of 2 code cells passed"),
        (report("a.ipynb"), (2, 0), "no output was compared"),
        (report("a.ipynb", seconds=90.0), (2, 2), "took 91 s"),
    ],
    ids=["xfail", "skip", "fail", "missing", "nothing compared", "slow"],
)
def test_what_nbval_lets_pass_is_refused(last, cells, message):
    tally = nbval_run.Tally()
    tally.pytest_runtest_logreport(report("a.ipynb"))
    tally.pytest_runtest_logreport(last)
    assert any(message in problem for problem in tally.problems({"a.ipynb": cells}))


def run_nbval(root):
    options = nbval_run.nbval_options(1)
    command = [sys.executable, "-m", "pytest", *options, str(root / "drafts")]
    return subprocess.run(command, capture_output=True, encoding="utf-8", cwd=addresses.ROOT)


def test_nbval_compares_prints_but_neither_measured_lines_nor_stderr(root):
    path = write_lesson(root, "import time\nprint('~ now', time.perf_counter_ns())\nprint(object())\nprint(5)")
    text = path.read_text(encoding="utf-8")
    rebuild(path, REPO, "main", root=root)
    good = path.read_text(encoding="utf-8")
    assert text != good
    path.write_text(good.replace("print(5)", "import sys; sys.stderr.write('a warning'); print(5)"), encoding="utf-8")
    (path.parent / "01_changed.ipynb").write_text(good.replace("print(5)", "print(6)"), encoding="utf-8")
    done = run_nbval(root)
    assert done.returncode == 1 and "1 failed, 3 passed" in done.stdout, "times, addresses and warnings are left out"
    assert "01_changed.ipynb::" in done.stdout and "00_first.ipynb::" not in done.stdout.split("short test summary")[1]


def test_counts_tell_compared_cells_from_ignored_and_unrun_ones(root):
    notebook = good_notebook()
    notebook["cells"][3]["source"] = ["# NBVAL_IGNORE_OUTPUT\n", "x"]
    notebook["cells"][4]["execution_count"] = None
    path = root / "drafts" / "00_first.ipynb"
    path.write_text(json.dumps(notebook), encoding="utf-8")
    assert nbval_run.count_cells(path) == (3, 1)


def test_folders_without_a_notebook_fail(capsys):
    assert nbval_run.main(["no_such_folder"]) == 1
    assert "no notebook in no_such_folder" in capsys.readouterr().err


def test_the_sanitiser_is_ascii_since_nbval_reads_it_in_the_locale_of_the_machine():
    assert NBVAL_CFG.read_text(encoding="utf-8").isascii()
