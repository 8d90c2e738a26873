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


def test_the_report_tells_every_option_that_was_given_and_what_follows_from_it():
    options = {"early_exit_layer": 1, "align_prefill_tokens": 24, "prefill_chunk_size": 240, "max_num_seqs": 7}
    options |= {"enable_prefix_caching": False, "max_queued_requests": 3, "seed": 5, "kv_cache_memory_bytes": 1 << 20}
    with LLM("random:tiny", **options) as llm:
        rows = report(llm)
    assert rows["options"] == {"model": "random:tiny", **options}
    assert rows["layers"].startswith("prompt tokens but the last leave after 1 of 2")
    assert rows["layers"].endswith("exact") and rows["prefix_cache"].startswith("off")
    for words in ("chunked: at most 2048 tokens and 7 sequences", "chunks of at most 240", "a multiple of 24 tokens"):
        assert words in rows["schedule"]


def test_the_report_tells_defaults_that_a_policy_sets_itself():
    options = {"kv_cache_memory_bytes": 1 << 20, "max_num_batched_tokens": 400}
    with LLM("random:tiny", scheduling_policy="interleaved", **options) as llm:
        assert "interleaved: at most 400 tokens" in (said := report(llm)["schedule"]) and "at most 100" in said
    with LLM("random:tiny", scheduling_policy="static", max_model_len=400, pad_batches=True, **options) as llm:
        rows = report(llm)
    assert rows["schedule"].endswith("every prompt in one step, filled up to the longest beside it")
    assert rows["layers"] == "all 2 for every token" and "chunks" not in rows["schedule"]
