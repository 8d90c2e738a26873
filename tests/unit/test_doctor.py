"""What `minillm doctor` warns of."""

import pytest

from minillm import LLM
from minillm.doctor import interpreter_warning, report


@pytest.mark.parametrize(
    "triton, numpy, interpreted, warns",
    [
        ("3.6.0", "2.4.0", True, True),
        ("3.6.0", "2.10.1", True, True),
        ("3.5.1+git", "3.0.0rc1", True, True),
        ("3.6.0", "2.3.5", True, False),
        ("3.7.1", "2.4.6", True, False),
        ("3.10.0", "2.4.6", True, False),
        ("3.6.0", "2.4.0", False, False),
        ("not installed", "2.4.0", True, False),
    ],
)
def test_an_old_interpreter_beside_a_new_numpy_is_warned_of(triton, numpy, interpreted, warns):
    warning = interpreter_warning(triton, numpy, interpreted)
    assert (warning is not None) == warns
    if warns:
        assert triton in warning and numpy in warning and "pip install" in warning


def test_the_report_holds_warnings_and_the_steps_of_a_layer():
    with LLM("random:tiny", kv_cache_memory_bytes=1 << 20) as llm:
        rows = report(llm)
    assert rows["warnings"] == [] and rows["layer_steps"].startswith("plain")
