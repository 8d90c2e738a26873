"""Layers on several ranks, chunks flowing through: the logits of one process, whatever the chunks, and a common end.

Where logits are compared, ranks are threads with real transfers; where engines start, fail and end, they are processes.
"""

import os
import signal
from dataclasses import replace
from functools import partial

import pytest
import torch

from minillm import LLM, SamplingParams
from minillm.batch import Batch
from minillm.cli import main
from minillm.config import EngineConfig
from minillm.doctor import report
from minillm.errors import CheckpointError, ConfigError
from minillm.model import Transformer
from minillm.pipeline.stages import StageTransformer, cut, layers_of_stage, weights_of_stage
from tests.tolerances import LOGITS_FP32
from tests.unit.engines import B, attention, sure_prompts
from tests.unit.test_parallel_model import BASE, batches, logits_of, on_ranks, poisoned_cache, random_weights
from tests.unit.two_ranks import GREEDY, OPTIONS, tokens

DEEP = replace(BASE, num_hidden_layers=5)
FAMILIES = {
    "tied": DEEP,
    "untied": replace(DEEP, tie_word_embeddings=False),
    "qwen2": replace(DEEP, architecture="qwen2", qkv_bias=True),
    "qwen3": replace(DEEP, architecture="qwen3", qk_norm=True),
    "windows": replace(DEEP, architecture="mistral", sliding_window=9, sliding_layers=(0, 3)),
}


# ---- the same logits -------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_all_stages_together_are_those_of_one_process(family, size):
    config = FAMILIES[family]
    weights, steps, attend = random_weights(config), batches(config), attention("naive")
    with torch.inference_mode():
        expected = logits_of(Transformer(config, weights), steps, attend)
    for chunk in (1, 7, 1000):
        stages = partial(StageTransformer, config, weights, chunk_rows=chunk)
        found = on_ranks(size, lambda ranks, stages=stages: logits_of(stages(ranks), steps, attend))[0]
        for a, b in zip(found, expected, strict=True):
            assert a.shape == b.shape and a.dtype == torch.float32
            assert (a - b).abs().max() <= LOGITS_FP32 * b.abs().max()


@pytest.mark.parametrize("chunk, count", [(64, 4), (125, 2), (249, 2), (250, 1), (256, 1), (3, 84)])
def test_250_rows_come_back_as_250_rows_whatever_the_last_chunk(chunk, count):
    weights, attend = random_weights(DEEP), attention("cpu")
    ids = torch.randint(DEEP.vocab_size, (250,)).tolist()
    batch = Batch.build([ids], [250], [list(torch.randperm(16).tolist())], B)
    assert [piece.num_tokens for piece in cut(batch, chunk)] == [chunk] * (count - 1) + [250 - chunk * (count - 1)]

    def rows_of(model):
        cache = poisoned_cache(model.config, num_blocks=16)
        return model.hidden(batch, cache, attend)

    with torch.inference_mode():
        expected = rows_of(Transformer(DEEP, weights))
    found = on_ranks(2, lambda ranks: rows_of(StageTransformer(DEEP, weights, ranks, chunk)))[0]
    assert found.shape == (250, DEEP.hidden_size)
    torch.testing.assert_close(found, expected, rtol=0, atol=LOGITS_FP32 * float(expected.abs().max()))


def test_lookups_made_before_and_logits_of_handed_rows_are_those_of_one_process():
    weights, attend, batch = random_weights(DEEP), attention("naive"), batches(DEEP)[0]
    rows = torch.randn(6, DEEP.hidden_size)
    embedded = torch.randn(batch.num_tokens, DEEP.hidden_size)
    one = Transformer(DEEP, weights)
    with torch.inference_mode():
        expected = one.forward(batch, poisoned_cache(DEEP), attend, embedded=embedded), one.lm_head(rows)

    def work(ranks):
        model = StageTransformer(DEEP, weights, ranks, 4)
        return model.forward(batch, poisoned_cache(model.config), attend, embedded=embedded), model.lm_head(rows)

    for a, b in zip(on_ranks(3, work)[0], expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=LOGITS_FP32 * float(b.abs().max()))


def test_chunks_are_the_batch_that_a_scheduler_would_have_built_of_those_rows():
    tables = [[3, 1], [0, 2], [5, 4], [6, 7]]
    tokens = [torch.randint(99, (n,)).tolist() for n in (1, 20, 3, 11)]
    contexts = [17, 25, 3, 11]
    whole = Batch.build(tokens, contexts, tables, B, padding=[2])
    for rows in (1, 2, 5, 9, 40):
        start = 0
        for piece in cut(whole, rows):
            expected, before = [], 0
            for ids, context, table in zip([*tokens, [0, 0]], [*contexts, 2], [*tables, [0]], strict=True):
                first, last = max(start - before, 0), min(start + rows - before, len(ids))
                if first < last:
                    expected.append((ids[first:last], context - len(ids) + last, table))
                before += len(ids)
            ids, lengths, blocks = zip(*expected, strict=True)
            built = Batch.build(list(ids), list(lengths), list(blocks), B)
            for name in ("token_ids", "positions", "query_start_loc", "seq_lens", "host_token_ids"):
                assert torch.equal(getattr(piece, name), getattr(built, name)), name
            assert (piece.query_lens, piece.context_lens) == (built.query_lens, built.context_lens)
            width = built.block_tables.shape[1]
            assert torch.equal(piece.block_tables[:, :width], built.block_tables)
            assert torch.equal(piece.slot_mapping, whole.slot_mapping[start : start + rows])
            start += piece.num_tokens
        assert start == whole.num_tokens


def test_a_chunk_moves_once_between_stages_and_the_logits_move_back():
    weights, batch = random_weights(DEEP), batches(DEEP)[1]  # 23 rows, 2 of them sampled

    def traffic(ranks):
        logits_of(StageTransformer(DEEP, weights, ranks, 10), [batch], attention("naive"))
        return ranks.traffic

    first, middle, last = on_ranks(3, traffic)
    assert first.calls == middle.calls == {"send": 3} and last.calls == {"send": 1}
    assert first.bytes == middle.bytes == {"send": 23 * 64 * 4} and last.bytes == {"send": 2 * DEEP.vocab_size * 4}


def test_the_layers_are_shared_out_and_each_stage_holds_only_its_own():
    for size in (1, 2, 3, 4, 5):
        shares = [layers_of_stage(DEEP, rank, size) for rank in range(size)]
        assert [layer for share in shares for layer in share] == list(range(5))
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
    weights = random_weights(DEEP)
    names = weights_of_stage(DEEP, weights, range(2, 4))
    assert torch.equal(names["model.layers.1.mlp.up_proj.weight"], weights["model.layers.3.mlp.up_proj.weight"])
    assert "model.layers.2.mlp.up_proj.weight" not in names
    del weights["model.layers.0.mlp.up_proj.weight"]
    with pytest.raises(CheckpointError, match=r"model.layers.0.mlp.up_proj"):
        weights_of_stage(DEEP, weights, range(2, 4))

    untied = replace(DEEP, tie_word_embeddings=False)
    weights = random_weights(untied)
    sizes = on_ranks(3, lambda ranks: StageTransformer(untied, weights, ranks).num_weight_bytes)
    table = untied.vocab_size * untied.hidden_size * 4
    assert [size.get("embedding", 0) for size in sizes] == [table, 0, 0]
    whole = Transformer(untied, weights).num_weight_bytes
    assert sum(size["plain float32"] for size in sizes) == whole["plain float32"]


# ---- engines ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module", autouse=True)
def few_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    assert torch.get_num_threads() == 1
    torch.set_num_threads(before)


def open_stages(**options):
    return LLM("random:tiny", pipeline_parallel_size=2, **{**OPTIONS, "pipeline_chunk_size": 5, **options})


@pytest.fixture(scope="module")
def both():
    with LLM("random:tiny", **OPTIONS) as one, open_stages() as two:
        yield one, two


@pytest.fixture
def prompts(tiny):
    return sure_prompts(tiny, [45, 3, 20], int(torch.randint(2**31, ())), 12)[0]


def test_an_engine_of_two_stages_gives_the_tokens_and_scores_of_one_process(both, prompts):
    one, two = both
    assert tokens(two, prompts) == tokens(one, prompts)
    siblings = SamplingParams(n=3, temperature=0.8, seed=7, max_tokens=8, ignore_eos=True)
    assert tokens(two, prompts, siblings) == tokens(one, prompts, siblings)
    assert two.score(prompts[0]) == pytest.approx(one.score(prompts[0]), abs=1e-4)
    (text,) = two.generate(["as text arrives"], GREEDY, use_tqdm=False)
    assert two.generate_from(["as te", "xt arri", "ves"], GREEDY).outputs[0].token_ids == text.outputs[0].token_ids


def test_doctor_says_what_each_process_holds(both):
    one, two = (report(llm) for llm in both)
    assert two["ranks"] == "2 over gloo: processes started here, 1 of the layers here; bytes are rank 0's"
    assert two["kv_cache_bytes"] == one["kv_cache_bytes"] // 2


def test_ctrl_c_waits_for_the_end_of_the_step_and_both_stages_go_on(both, prompts, monkeypatch):
    one, two = both
    attend, calls = two.engine.attend, []

    def interrupted(*args):
        calls.append(os.kill(os.getpid(), signal.SIGINT) if not calls else None)
        return attend(*args)

    monkeypatch.setattr(two.engine, "attend", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tokens(two, prompts)
    assert len(calls) == 4, "all chunks of a step of 16 rows were computed"
    assert tokens(two, prompts) == tokens(one, prompts)


def test_stages_are_chosen_on_the_command_line(capsys):
    base = ["generate", "abcdef", "--model", "random:tiny", "--dtype", "float32", "--temperature", "0"]
    base += ["--num-kv-blocks", "64", "--max-tokens", "5"]
    assert main(base) == 0
    expected = capsys.readouterr().out
    assert main([*base, "--pipeline-parallel-size", "2", "--pipeline-chunk-size", "4"]) == 0
    assert capsys.readouterr().out == expected


@pytest.mark.parametrize(
    "options, says",
    [
        ({"pipeline_parallel_size": 3}, "pipeline_parallel_size=3 is more than the model's 2 layers"),
        ({"pipeline_parallel_size": 0}, "at least 1"),
        ({"pipeline_parallel_size": 2, "pipeline_chunk_size": 0}, "pipeline_chunk_size=0"),
        ({"pipeline_parallel_size": 2, "tensor_parallel_size": 2}, "cut the same model in two ways"),
        ({"pipeline_chunk_size": 8}, "no meaning without stages"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(options, says, monkeypatch):
    monkeypatch.setattr("subprocess.Popen", lambda *args, **kwargs: pytest.fail("a process was started"))
    with pytest.raises(ConfigError, match=says):
        LLM("random:tiny", **options)


def test_the_number_of_processes_is_that_of_either_way():
    assert EngineConfig().num_ranks == 1
    assert EngineConfig(pipeline_parallel_size=3).num_ranks == EngineConfig(tensor_parallel_size=3).num_ranks == 3
