"""Kernel tasks: interpreted, compiled for GPUs that are not here, and launched by code that computes nothing.

A notebook takes two processes and each launch some seconds of compiling, so few notebooks show all of it.
"""

from dataclasses import replace

import pytest

from minillm.course.grader import feedback, kernel_task
from minillm.course.grader.exercises import load_tasks
from minillm.course.grader.grade import Options, grade
from minillm.course.grader.kernel_task import judge_compiled
from tests.grader.examples import PACKAGE, PRODUCT, SOFTMAX, TRITON, write_notebook

BY_HAND = PRODUCT.replace(  # the `where` keeps Triton from making a tl.dot of it
    "tl.dot(a, b)",
    "tl.sum(tl.where(m[:, None, None] >= 0, a[:, :, None].to(tl.float32) * b[None, :, :].to(tl.float32), 0.0), 1)",
)


@pytest.fixture
def marks(tmp_path):
    def run(*sources):
        path = write_notebook(tmp_path / "ex91_mine.ipynb", TRITON, *sources)
        return [result.lost for result in grade(path, Options(package=PACKAGE)).results]

    return run


@pytest.fixture(autouse=True)
def needs_triton():
    pytest.importorskip("triton")


def test_right_kernels_pass_interpreted_and_compiled(marks):
    assert marks(SOFTMAX, PRODUCT) == [{}, {}]


def test_a_wrong_value_and_a_missing_matrix_instruction_each_cost_their_item(marks):
    softmax, product = marks(SOFTMAX.replace('other=-float("inf")', "other=0.0"), BY_HAND)
    assert softmax.keys() == {"tail"} and "off by" in softmax["tail"]
    assert product.keys() == {"compiles"}
    assert product["compiles"].startswith("product_kernel for compute capability 8.0 holds no matrix instruction")


def test_what_only_the_interpreter_accepts_and_a_launcher_that_computes_are_found(marks):
    rejected = SOFTMAX.replace("e = tl.exp", "sizes = [1, 2]\n    e = sizes[0] * tl.exp").replace(
        "tl.max(x, 0)", "tl.max(x, 0) * (lambda z: z)(1)"
    )
    softmax, product = marks(
        rejected, "# task: ex91.2\ndef multiply(a, b):\n    return (a[:, :, None] * b[None]).sum(1)"
    )
    assert softmax.keys() == {"compiles"}
    assert "softmax_kernel for compute capability 8.0 does not compile" in softmax["compiles"]
    assert all("the launcher computes with PyTorch (aten.mul.Tensor)" in why for why in product.values())
    assert product.keys() == {"product", "compiles"}


def test_a_launcher_that_reads_values_or_launches_nothing_has_no_marks(marks):
    softmax, product = marks(
        "# task: ex91.1\ndef softmax(x):\n    return torch.empty(x.shape)",
        "# task: ex91.2\ndef multiply(a, b):\n    return torch.from_numpy(a.numpy() @ b.numpy())",
    )
    assert softmax.keys() == {"full rows", "tail", "strided rows", "compiles"}
    assert softmax["tail"] == "launches no kernel" and softmax["compiles"] == "the launcher launches no kernel"
    assert all("reads values of a tensor (numpy)" in why for why in product.values())


def test_check_in_a_notebook_tries_a_kernel_in_processes_of_its_own(monkeypatch, capsys):
    monkeypatch.setattr(feedback, "_executed_cells", lambda: [TRITON, PRODUCT.replace("tl.dot(a, b)", "tl.dot(a, c)")])
    feedback.check("ex91.2", None, PACKAGE)
    assert capsys.readouterr().out.startswith("ex91.2 tile product: 0 of 2 items\n  product: raises ")


def test_without_triton_a_kernel_is_not_gradable_which_is_not_zero(tmp_path, monkeypatch):
    monkeypatch.setattr(kernel_task, "find_spec", lambda name: None)
    report = grade(write_notebook(tmp_path / "ex91.ipynb", TRITON, SOFTMAX, PRODUCT), Options(package=PACKAGE))
    assert report.max_score == 0
    assert [task["gradable"] for task in report.to_dict()["tasks"]] == [False, False]
    assert all("Triton is not installed" in result.message for result in report.results)


GOOD = {
    "name": "k",
    "capability": "8.0",
    "error": "",
    "shared_bytes": 9,
    "shared_limit": 9,
    "spill_bytes": 0,
    "matrix_instructions": 1,
}


@pytest.mark.parametrize(
    "kernel, matrix, words",
    [
        ({}, True, ""),
        ({"matrix_instructions": 0}, False, ""),
        ({"matrix_instructions": 0}, True, "k for compute capability 8.0 holds no matrix instruction"),
        ({"shared_bytes": 10_000}, True, "needs 10,000 bytes of shared memory, allowed are 9"),
        ({"spill_bytes": 4}, True, "spills 4 bytes"),
        ({"error": "no"}, True, "does not compile: no"),
    ],
)
def test_each_figure_of_a_compiled_kernel_is_judged(kernel, matrix, words):
    record = {"kernels": [GOOD, {**GOOD, **kernel}]}
    sentence = judge_compiled({"items": ["compiles"], "matrix": matrix}, record)["compiles"]
    assert (words in sentence) if words else sentence == ""


def test_a_task_that_is_no_kernel_is_gradable_everywhere(monkeypatch):
    monkeypatch.setattr(kernel_task, "find_spec", lambda name: None)
    plain, kernel = load_tasks("ex90", PACKAGE)[0], load_tasks("ex91", PACKAGE)[0]
    assert kernel_task.is_gradable(plain) and not kernel_task.is_gradable(replace(kernel, points=1))
