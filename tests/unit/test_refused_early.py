"""Options that cannot work are refused before a model is loaded, and none is left unheard."""

from dataclasses import replace

import pytest

from minillm import LLM
from minillm.checkpoint import load
from minillm.cli import main
from minillm.config import EngineConfig
from minillm.errors import ConfigError

TINY = ["--model", "random:tiny"]


@pytest.fixture
def no_weights(monkeypatch):
    """Whoever makes a model here has come too far."""

    def transformer(*args, **kwargs):
        pytest.fail("a model's weights were read")

    monkeypatch.setattr("minillm.open_engine.Transformer", transformer)


@pytest.fixture
def no_engine(monkeypatch):
    def open_engine(config):
        pytest.fail("an engine was opened")

    monkeypatch.setattr("minillm.llm.open_engine", open_engine)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"scheduling_policy": "static", "max_num_batched_tokens": 64}, "'static' needs max_num_batched_tokens=64"),
        ({"scheduling_policy": "iteration", "max_num_batched_tokens": 2047}, "=2047 to be at least max_model_len=2048"),
        ({"scheduling_policy": "similar_length", "max_num_batched_tokens": 1}, "or allow chunks"),
        ({"enable_chunked_prefill": False, "max_num_batched_tokens": 9, "max_model_len": 10}, "prefill=False needs"),
        ({"early_exit_layer": 3}, "early_exit_layer=3 is not one of this model's layers, 1 to 2"),
        ({"kv_cache_memory_bytes": 1}, "may use 1 bytes"),
        (
            {"num_kv_blocks": 10**12},
            "num_kv_blocks=1000000000000 takes 4,096,000,000,000,000 bytes and this cpu device has",
        ),
        ({"num_kv_blocks": 10**30}, "in all; lower it"),
        ({"kv_cache_memory_bytes": 10**15}, "takes 1,000,000,000,000,000 bytes"),
        ({"block_size": 10**9}, "one block of 1000000000 tokens"),
        ({"max_model_len": 2049}, "max_model_len=2049 is more than the 2048"),
        ({"attention": "sliding_window(sinks=2)"}, "this model has none"),
    ],
)
def test_what_a_model_of_this_shape_rules_out_is_refused_before_its_weights_are_read(no_weights, options, match):
    with pytest.raises(ConfigError, match=match):
        LLM("random:tiny", **options)


def test_rows_that_no_group_of_four_bits_divides_are_refused_before_they_are_read(no_weights, monkeypatch):
    tiny = load("random:tiny")
    odd = replace(tiny, config=replace(tiny.config, intermediate_size=120))
    monkeypatch.setattr("minillm.open_engine.load", lambda model, seed: odd)
    with pytest.raises(ConfigError, match="rows of 120; use quantization='int8'"):
        LLM("random:odd", quantization="int4")


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["generate", "hi", "--temperature", "-1"], "temperature=-1.0"),
        (["generate", "hi", "--n", "0"], "n=0 must be"),
        (["generate", "hi", "--n", "6", "--max-num-seqs", "5"], "n=6 completions are more than can run at once, 5"),
        (["generate", "hi", "--stop", ""], "stop=('',)"),
        (["chat", "--top-p", "nan"], "top_p=nan"),
        (["generate", "--stream-prompt", "no such.txt"], "no such.txt cannot be read"),
        (["generate", "--stream-prompt", __file__, "--scheduling-policy", "static"], "computed in chunks"),
        (["generate", "--stream-prompt", __file__, "--no-enable-chunked-prefill"], "computed in chunks"),
        (["serve", "--port", "0", "--shutdown-timeout-s", "-5"], "shutdown_timeout_s=-5.0 is not in [0, 86400]"),
        (["bench", "--compare", "attention", "--tensor-parallel-size", "2"], "on one rank"),
        (["bench", "--compare", "attention", "--attention", "lsh"], "attention='lsh' is sparse"),
        (["bench", "--compare", "alignment", "--pipeline-parallel-size", "2"], "on one rank"),
        (["bench", "--compare", "alignment", "--max-model-len", "257"], "max_model_len=257 leaves no room"),
        (["bench", "--compare", "alignment", "--align-prefill-tokens", "64"], "align_prefill_tokens=64 would be left"),
        (["bench", "--compare", "pipeline", "--early-exit-layer", "1"], "a whole model in one process"),
        (["bench", "--compare", "pipeline", "--scheduling-policy", "iteration"], "computed in chunks"),
        (["bench", "--compare", "precision", "--quantization", "none"], "quantization='none' would be left unheard"),
        (
            ["bench", "--compare", "precision", "--kv-cache-dtype", "int8"],
            "kv_cache_dtype='int8' would be left unheard",
        ),
        (["bench", "--compare", "precision", "--dtype", "float32"], "dtype='float32' would be left unheard"),
        (["bench", "--compare", "precision", "--tensor-parallel-size", "2"], "compared in one process"),
        (["bench", "--compare", "precision", "--early-exit-layer", "1"], "early_exit_layer=1 is another model"),
    ],
)
def test_a_command_refuses_wrong_options_before_an_engine_is_opened(no_engine, capsys, args, says):
    assert main([*args, *TINY]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (
            ["--device", "here", "--scheduling-policy", "static", "--max-num-batched-tokens", "64", *TINY],
            "'static' needs",
        ),
        (["--request-rate", "nan"], "positive numbers, not nan"),
    ],
)
def test_a_simulation_that_cannot_be_is_refused_before_anything_is_measured(no_engine, capsys, args, says):
    assert main(["simulate", *args]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("flag", [["--device", "H100"], ["--quantization", "int4"], ["--block-size", "16"]])
def test_a_ranking_of_all_gpus_leaves_no_option_unheard(capsys, flag):
    assert main(["estimate", "--rank-devices", *flag]) == 2
    assert capsys.readouterr().err.endswith(f"drop {flag[0]}\n")


def test_a_model_too_short_for_the_staircase_is_refused_in_words(monkeypatch):
    from minillm.compare_alignment import compare

    with LLM("random:tiny", max_model_len=200, num_kv_blocks=16) as llm:
        with pytest.raises(ConfigError, match="max_model_len=200 leaves no room for steps of 257"):
            compare(llm)


@pytest.mark.parametrize("options", [{}, {"dtype": "bfloat16"}, {"num_kv_blocks": 9}, {"scheduling_policy": "static"}])
def test_a_table_of_precisions_takes_what_it_keeps(options):
    from minillm.compare import check

    check("precision", EngineConfig(**options))
