"""What the grader takes from a notebook's cells, and what `check` saves of them."""

import json
import textwrap

import pytest

from minillm.course.grader.cells import definitions, exercise_of, make_cell, read_cells, same_code, source_of
from minillm.errors import GradeError
from tests.grader.examples import write_notebook


def test_ipython_lines_are_empty_and_task_marks_are_found(tmp_path):
    path = write_notebook(tmp_path / "a.ipynb", "%matplotlib inline\n!ls\nx = 1", "# task: ex05.2\ndef f(): pass")
    plain, task = read_cells(path)
    assert (plain.number, plain.source, plain.task) == (1, "\n\nx = 1", None)
    assert (task.number, task.task) == (2, "ex05.2")
    assert make_cell(1, "x = '# task: ex05.2'").task is None


def test_sources_may_be_lists_of_lines(tmp_path):
    path = tmp_path / "a.ipynb"
    path.write_text(json.dumps({"cells": [{"cell_type": "code", "source": ["x = 1\n", "y = 2"]}]}), encoding="utf-8")
    assert read_cells(path)[0].source == "x = 1\ny = 2"


@pytest.mark.parametrize("text", ["", "{", "[]", '{"cells": 3}', '{"cells": [{"cell_type": "code"}]}', '{"a": 1}'])
def test_a_file_that_is_no_notebook_is_refused(tmp_path, text):
    path = tmp_path / "a.ipynb"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(GradeError, match="a.ipynb is not a notebook"):
        read_cells(path)


def test_a_missing_or_binary_file_is_refused(tmp_path):
    with pytest.raises(GradeError, match="cannot be read"):
        read_cells(tmp_path / "none.ipynb")
    (tmp_path / "b.ipynb").write_bytes(b"\xff\xfe\0")
    with pytest.raises(GradeError, match="not a notebook"):
        read_cells(tmp_path / "b.ipynb")


def test_the_exercise_is_that_of_the_first_task_else_that_of_the_name(tmp_path):
    assert exercise_of([make_cell(1, "# task: ex05.2")], tmp_path / "ex07_x.ipynb") == "ex05"
    assert exercise_of([make_cell(1, "x = 1")], tmp_path / "my ex07_x.ipynb") == "ex07"
    with pytest.raises(GradeError, match="# task: exNN.k"):
        exercise_of([make_cell(1, "x = 1")], tmp_path / "homework.ipynb")


def test_definitions_leave_out_checks_plots_and_prints_and_keep_line_numbers():
    source = textwrap.dedent("""\
        import math
        print("hello")
        x = [
            1,
        ]
        check("ex05.2", f)
        @decorated
        def f(a):
            plot(a)
        for y in x:
            total += y
        x""")
    kept = definitions(source).rstrip()
    assert kept.splitlines()[0] == "import math" and kept.splitlines()[6] == "@decorated"
    assert "print" not in kept and "check" not in kept and kept.splitlines()[-1].strip() == "total += y"
    assert "plot(a)" in kept, "inside a function it belongs to the function"
    assert definitions("f(1)\n'text'\npass\nassert f(2) == 3") == ""
    assert "assert x" in definitions("def f(x):\n    assert x"), "inside a function it belongs to the function"
    with pytest.raises(SyntaxError):
        definitions("def f(:")


def test_same_code_looks_past_comments_and_space():
    assert same_code("def f():\n    return 1", "# task: ex05.1\ndef f():\n\n    return 1  # one\nf()")
    assert not same_code("def f():\n    return 1", "def f():\n    return 2")
    assert not same_code("def f(:", "def f(:")


CELLS = [
    "import math\nimport torch as t\nSIZE, UNUSED = 3, 4",
    "def helper(x):\n    return math.sqrt(x)",
    "def other():\n    return 0",
    "%time\ndef f(x):\n    return helper(x) + SIZE\nf(3)",
    "def helper(x):\n    # the second form\n    return math.log(x)",
    "def f(:",
]


def test_what_is_saved_is_the_last_definition_below_what_it_needs():
    saved = source_of("f", CELLS)
    names = {}
    exec(saved, names)
    assert names["f"](1.0) == 3.0, "helper in its last form: log(1) + 3"
    assert "second form" in saved and "other" not in saved and "torch" not in saved
    assert source_of("missing", CELLS) == ""


def test_a_redefined_function_is_saved_in_its_last_form():
    names = {}
    exec(source_of("f", ["def f(): return 1", "def g(): return f()", "def f(): return 2"]), names)
    assert names["f"]() == 2 and "g" not in names


def test_a_class_with_decorators_and_a_base_is_saved_whole():
    cells = ["from dataclasses import dataclass", "class A:\n    x = 1", "@dataclass\nclass B(A):\n    y: int = 2"]
    names = {}
    exec(source_of("B", cells), names)
    assert (names["B"]().x, names["B"]().y) == (1, 2)
