"""Starters made from solutions: what is replaced, what is refused, and what counts as a leak."""

import json

import nbformat
import pytest

from minillm.course.build import addresses, exercises
from minillm.course.build.exercises import ExerciseError, exercise_text, run_unsolved
from minillm.course.build.notebooks import NotebookError
from minillm.course.build.starters import StarterError, leaks, make_starter
from tests.grader.examples import PACKAGE

SOLUTION = '''\
# task: ex90.1
def causal_mask(queries, keys):
    """Bool [queries, keys]."""
    ### BEGIN SOLUTION
    rows, columns = torch.arange(queries)[:, None], torch.arange(keys)[None, :]
    return columns <= rows + keys - queries
    ### END SOLUTION'''
STARTER = '''\
# task: ex90.1
def causal_mask(queries, keys):
    """Bool [queries, keys]."""
    raise NotImplementedError("ex90.1: causal_mask is not written yet")'''


def test_a_region_becomes_not_implemented_and_the_rest_stays():
    starter, (region,) = make_starter(SOLUTION, "ex90.1")
    assert starter == STARTER
    assert region.solution[1].strip() == "return columns <= rows + keys - queries"


def test_a_starter_block_takes_the_place_of_the_region_before_it():
    bug = "    # return columns <= rows\n    #\n    #     # look here"
    source = f"{SOLUTION}\n    ### BEGIN STARTER\n{bug}\n    ### END STARTER\n\nx = 1"
    assert make_starter(source, "ex90.1")[0].endswith("    return columns <= rows\n\n        # look here\n\nx = 1")


def test_several_regions_in_methods_each_get_their_own():
    method = "    def {}(self):\n        ### BEGIN SOLUTION\n        self.x = 1\n        ### END SOLUTION\n"
    starter, regions = make_starter("class A:\n" + method.format("a") + method.format("b"), "ex90.2")
    assert len(regions) == 2 and "self.x" not in starter
    assert 'raise NotImplementedError("ex90.2: b is not written yet")' in starter


KERNEL = "@triton.jit\ndef k(p):\n    ### BEGIN SOLUTION\n    tl.store(p, 1)\n    ### END SOLUTION"
REFUSED = {
    "no region": ("def f(): pass", "no SOLUTION region"),
    "outside a function": ("### BEGIN SOLUTION\nx = 1\n### END SOLUTION", "not inside the body of one function"),
    "a whole function": ("### BEGIN SOLUTION\ndef f():\n    return 1\n### END SOLUTION", "not inside the body"),
    "in a class, outside its methods": (
        "class A:\n    ### BEGIN SOLUTION\n    x = 1\n    ### END SOLUTION",
        "not inside the body",
    ),
    "over the end of a function": (
        "def f():\n    a = 1\n    ### BEGIN SOLUTION\n    return a\n\nb = f()\n    ### END SOLUTION",
        "not inside the body",
    ),
    "nothing in it": ("def f():\n    x = 1\n    ### BEGIN SOLUTION\n    ### END SOLUTION", "not inside the body"),
    "never ends": ("def f():\n    ### BEGIN SOLUTION\n    return 1", "does not pair up"),
    "a lone starter": ("def f():\n    ### BEGIN STARTER\n    # return 1\n    ### END STARTER", "does not pair up"),
    "a starter further down": (
        SOLUTION + "\n\n    ### BEGIN STARTER\n    # return 1\n    ### END STARTER",
        "does not pair up",
    ),
    "a misspelt mark": ("def f():\n    ## BEGIN SOLUTION ###\n    return 1", "looks like a mark"),
    "code in a starter": (
        SOLUTION + "\n    ### BEGIN STARTER\n    return 1\n    ### END STARTER",
        "a line of a STARTER is a comment",
    ),
    "a starter that is not Python": (
        SOLUTION + "\n    ### BEGIN STARTER\n    # return (\n    ### END STARTER",
        "the starter is not Python",
    ),
    "a starter that leaves the function": (
        SOLUTION + "\n    ### BEGIN STARTER\n    # pass\n# x = 2\n    ### END STARTER",
        "outside of function bodies",
    ),
    "a Triton kernel": (KERNEL, "a Triton kernel cannot raise"),
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_makes_no_starter_is_refused(why):
    source, message = REFUSED[why]
    with pytest.raises(StarterError, match=message):
        make_starter(source, "ex90.1")


def test_a_kernel_with_a_starter_block_is_accepted():
    starter, _ = make_starter(f"{KERNEL}\n    ### BEGIN STARTER\n    # pass\n    ### END STARTER", "ex90.1")
    assert starter == "@triton.jit\ndef k(p):\n    pass"


def test_a_long_solution_line_elsewhere_is_a_leak_and_a_short_or_given_one_is_not():
    _, regions = make_starter(SOLUTION, "ex90.1")
    line = "return columns <= rows + keys - queries"
    assert list(leaks(regions, f"Try `{line}`.")) == [line]
    assert list(leaks(regions, "Try `return columns <= rows`.")) == []
    given = f"{SOLUTION}\n    ### BEGIN STARTER\n    # {line}\n    ### END STARTER"
    starter, regions = make_starter(given, "ex90.1")
    assert list(leaks(regions, starter)) == []


# Whole notebooks


@pytest.fixture
def root(tmp_path):
    for folder in ("solutions", "exercises"):
        (tmp_path / folder).mkdir()
    (tmp_path / "pyproject.toml").write_text('[tool.minillm]\nREPO = "ada/course"\n', encoding="utf-8")
    return tmp_path


def write_solution(root, *sources):
    opening = addresses.setup_cell("ada/course", "v3", "solutions/ex90_example.ipynb")
    cells = [nbformat.v4.new_markdown_cell("badge", id="badge"), nbformat.v4.new_code_cell(opening, id="setup")]
    for number, source in enumerate(sources):
        cells.append(nbformat.v4.new_code_cell(source, id=f"cell-{number}", execution_count=1))
        cells[-1].outputs = [nbformat.v4.new_output("stream", text="1\n")]
    path = root / "solutions" / "ex90_example.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    return path


def make(path, root):
    return exercise_text(path, root, PACKAGE)


def test_an_exercise_keeps_ids_loses_outputs_and_names_its_own_file(root):
    path = write_solution(root, "import torch", SOLUTION, 'check("ex90.1", causal_mask)')
    text = make(path, root)
    assert text == make(path, root), "the same bytes for the same source"
    cells = json.loads(text)["cells"]
    assert [cell["id"] for cell in cells] == ["badge", "setup", "cell-0", "cell-1", "cell-2"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells[1:])
    assert "".join(cells[3]["source"]) == STARTER
    opening = "".join(cells[0]["source"]) + "".join(cells[1]["source"])
    assert "ada/course/blob/v3/exercises/ex90_example.ipynb" in opening
    assert 'REF = "ada/course", "v3"' in opening and "/exercises" in opening and "solutions" not in opening


@pytest.mark.parametrize(
    "sources, message",
    [
        (["# task: ex90.1\ndef causal_mask(q, k): return 1"], "would come solved"),
        ([SOLUTION.replace("ex90.1", "ex90.9")], "no task 'ex90.9'"),
        ([SOLUTION.replace("ex90.1", "ex12.1")], "no exercise 'ex12'"),
        ([SOLUTION.replace("causal_mask", "mask")], "does not define causal_mask"),
        ([SOLUTION.replace("# task: ex90.1", "# a helper")], "outside of a task"),
        ([SOLUTION, "# return columns <= rows + keys - queries"], "stands elsewhere in the exercise"),
        ([SOLUTION.replace("keys):", "keys:")], "the solution is not Python"),
    ],
    ids=["solved", "no such task", "no such exercise", "another name", "no task", "leak", "not Python"],
)
def test_a_solution_that_makes_no_exercise_is_refused_with_its_cell(root, sources, message):
    with pytest.raises(ExerciseError, match=message):
        make(write_solution(root, *sources), root)


def test_a_solution_without_a_set_up_cell_is_refused(root):
    path = write_solution(root, SOLUTION)
    notebook = nbformat.read(path, as_version=4)
    del notebook.cells[1]
    nbformat.write(notebook, path)
    with pytest.raises(ExerciseError, match="no set-up cell"):
        make(path, root)


def test_an_exercise_that_raises_while_unsolved_is_not_written(root, monkeypatch):
    path = write_solution(root, "import torch", SOLUTION, "causal_mask(2, 3)")
    with pytest.raises(NotebookError, match="NotImplementedError"):
        exercises.write_exercise(path, root=root, package=PACKAGE)
    assert not (root / "exercises" / path.name).exists()


def test_an_unsolved_task_is_reported_by_check_and_runs_on(root):
    check = f'from minillm.course.grader import check\ncheck("ex90.1", causal_mask, "{PACKAGE}")'
    path = write_solution(
        root, "import torch", SOLUTION, f"import sys\nsys.path.append({str(addresses.ROOT)!r})\n{check}"
    )
    run_unsolved(make(path, root), root / "exercises" / path.name)


def test_committed_exercises_are_those_that_their_solutions_make():
    made = {exercises.exercise_path(path): path for path in exercises.solutions()}
    assert sorted(made) == sorted(addresses.ROOT.glob("exercises/*.ipynb"))
    for path, solution in made.items():
        assert path.read_text(encoding="utf-8") == exercise_text(solution), f"{path.name}: run `make exercises`"


@pytest.mark.slow
@pytest.mark.parametrize("solution", exercises.solutions(), ids=lambda path: path.stem)
def test_each_exercise_runs_from_top_to_bottom_with_nothing_solved(solution):
    run_unsolved(exercise_text(solution), exercises.exercise_path(solution))
