"""What lesson 04 says in words is what its sums give, and its exercise can be done with what it teaches."""

import ast
import re

import nbformat
import pytest

from minillm import costs, memory, roofline
from minillm.course.build.addresses import ROOT
from minillm.course.checks.ex04 import TASKS
from minillm.course.fake_device import FakeDevice
from minillm.course.grader.feedback import try_here
from minillm.devices import find_device
from minillm.estimate import rank_devices, shape_of

NOTEBOOK = nbformat.read(ROOT / "notebooks" / "04_counting.ipynb", as_version=4)
CELLS = {cell.id: cell for cell in NOTEBOOK.cells}


def output(cell):
    return "".join(piece.text for piece in CELLS[cell].outputs if piece.output_type == "stream")


def functions_of(cell):
    """The functions that a cell defines, without running the rest of it."""
    names = {"FakeDevice": FakeDevice}
    exec("import statistics", names)
    tree = ast.parse(CELLS[cell].source)
    tree.body = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    exec(compile(tree, cell, "exec"), names)
    return names


def test_the_layer_on_paper_is_the_layer_in_the_loops_and_in_costs():
    shape = dict(E=4, F=3, H=2, Hkv=1, D=2, n=3)
    assert functions_of("loop")["count_by_loop"](**shape) == (504, 96) == functions_of("formula")["count"](**shape)
    for number in ("84 weights", "**504**", "**96**", "6 pairs"):
        assert number in CELLS["hand"].source
    assert output("loop").strip() == "(504, 96)"


def test_the_formula_of_the_lesson_is_the_engines(session_seed):
    config = shape_of("135m")
    n = 1 + session_seed % 5000
    linear, attention = functions_of("formula")["count"](576, 1536, 9, 3, 64, n)
    assert 30 * linear == costs.linear_flops(config, n)
    assert 30 * attention == costs.attention_flops(config, [(n, n)])


def test_the_crossovers_stand_in_the_lesson():
    assert "half at 6,144" in output("shares") and "half at 49,408" in output("shares")
    assert costs.quadratic_crossover(shape_of("7b")) == 49_408


def test_prefill_uses_a_byte_1600_times_and_decode_once():
    small = shape_of("135m")
    assert costs.intensity(small, [(2048, 2048)]) == pytest.approx(1600, rel=0.01)
    assert costs.intensity(small, [(1, 32)]) == pytest.approx(1, rel=0.01)
    kv, matrices = 64 * 2049 * costs.kv_bytes_per_token(small), 2 * 134_479_872
    assert kv > 10 * matrices, "the caches are the larger part of the last line"
    assert costs.step_bytes(small, [(1, 2048)] * 64) == kv + matrices


def test_a_gpu_with_a_ridge_near_200_serves_64_requests_in_the_time_of_one():
    small = shape_of("135m")
    one, many = (roofline.step_seconds(small, [(1, 11)] * b, find_device("H200")) for b in (1, 64))
    assert many / one == pytest.approx(1, abs=0.15)


def test_the_l4_beats_the_rtx_3090_in_prefill_and_loses_by_three_in_decode():
    rows = rank_devices(shape_of("8b"), 2048, 8)
    prefill, decode = ({row["device"]: row["s"] for row in rows[phase]} for phase in ("prefill", "decode"))
    assert prefill["L4"] < prefill["RTX3090"]
    assert decode["L4"] / decode["RTX3090"] == pytest.approx(3, abs=0.2)


def test_the_sizes_of_the_memory_wall_are_those_of_memory():
    config, h100 = shape_of("8b"), find_device("H100").memory
    pages, whole = (memory.largest_batch(config, h100, 500, reserved=r) for r in (None, 8192))
    assert f"{whole} requests with 8,192 reserved, {pages} in pages of 16" in output("memory")
    ratio = config.hidden_size / (config.num_key_value_heads * config.head_dim)
    assert ratio == 4 and "here a quarter" in output("memory")


def test_only_the_careful_clock_is_right():
    truth = float(re.search(r"device\.kernel\(([\d.]+)\)", CELLS["clock"].source).group(1))
    lines = {line[:18].strip(): line[18:] for line in output("clock").splitlines()}
    centres = {name: float(text.split("ms")[0]) / 1e3 for name, text in lines.items()}
    assert "true" not in lines and len(centres) == 6
    for name, centre in centres.items():
        right = abs(centre - truth) < 0.05 * truth
        assert right == (name in ("with care", "no warm-up")), name
    assert float(lines["no warm-up"].split("slowest")[1]) > 400  # ms: the compilation is one of the samples


def test_no_measured_number_is_compared():
    for cell in ("peaks", "measure", "guess", "ttft"):
        for line in output(cell).splitlines():
            assert line.startswith("~ ") or not re.search(r"\d\s?(ms|s|us|GFLOP/s|GB/s)\b", line), line


# ---- the exercise --------------------------------------------------------------------------------


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.id)
@pytest.mark.parametrize("answer", [None, 3, {}, {"linear": "many"}, [1.0, 2.0], (1.0, float("nan"), [1.0]), "1, 2"])
def test_an_answer_of_the_wrong_form_is_a_diagnosis(task, answer, session_seed):
    result = try_here(task, lambda *args, **kwargs: answer, session_seed)
    assert set(result.lost) == set(task.items)
    assert all("judge" not in sentence for sentence in result.lost.values())
