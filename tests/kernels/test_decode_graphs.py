"""The padded path of decode graphs, with recording replaced by a plain call: what a GPU replays runs here each time."""

import dataclasses

import pytest
import torch

from minillm.attention.choose import choose_attention
from minillm.checkpoint import load
from minillm.config import EngineConfig
from minillm.decode_graphs import DecodeGraphs, why_eager
from minillm.embedding import HostEmbedding
from minillm.model import Transformer
from tests.unit.engines import GREEDY, MAX_LEN, make_engine, random_prompts, run

SEATS = 33
SHORT = dataclasses.replace(GREEDY, max_tokens=4)


@pytest.fixture(scope="module")
def tiny():
    checkpoint = load("random:tiny")
    return checkpoint, Transformer(checkpoint.config, checkpoint.weights)


def with_graphs(parts, budget=64):
    """An engine whose decodes go through graphs, and the list of sizes that ran."""
    engine, ran = make_engine(parts, "triton", num_blocks=80, max_num_seqs=SEATS, max_num_batched_tokens=budget), []

    def capture(run):
        def replay():
            logits = run()
            ran.append(len(logits))
            return logits

        return replay

    engine.decode_graphs = DecodeGraphs(engine.model, engine.kv_cache, engine.attend, SEATS, MAX_LEN, capture)
    return engine, ran


@pytest.mark.parametrize("num, size", [(1, 1), (3, 4), (20, 24), (33, 33)])
def test_decodes_in_graphs_give_the_tokens_of_eager_steps(tiny, session_seed, num, size):
    lengths = [2 + (7 * i + session_seed) % 9 for i in range(num)]  # a prompt of one token would go through a graph
    prompts = random_prompts(tiny, lengths, session_seed)
    engine, ran = with_graphs(tiny, budget=sum(lengths))  # so that all decode together
    assert run(engine, prompts, SHORT) == run(make_engine(tiny, "naive", max_num_seqs=SEATS), prompts, SHORT)
    assert ran == [size] * 3


def test_padding_writes_nothing_and_reads_nothing(tiny, session_seed):
    """Pages that nobody owns stay NaN, and none of them reaches a token."""
    engine, ran = with_graphs(tiny)
    run(engine, random_prompts(tiny, [5, 17, 3], session_seed), SHORT)
    assert 4 in ran
    untouched = torch.stack([tensor.isnan().all(dim=(0, 2, 3, 4)) for tensor in engine.kv_cache.tensors]).all(dim=0)
    assert untouched.sum() == 80 - (1 + 2 + 1), "three requests of one, two and one block"


def test_rows_of_a_table_in_cpu_memory_are_looked_up_outside_of_the_graph(tiny, session_seed):
    prompts = random_prompts(tiny, [5, 17, 3], session_seed)
    expected = run(make_engine(tiny, "naive"), prompts, SHORT)
    engine, ran = with_graphs(tiny)
    network = Transformer(tiny[0].config, tiny[0].weights)
    engine.model = engine.decode_graphs.model = network
    network.embed = HostEmbedding(network.embedding, AtOnce())
    assert run(engine, prompts, SHORT) == expected
    graph = engine.decode_graphs.graphs[4]
    assert ran and graph.embedded.shape == (4, network.config.hidden_size)
    network.embed = None  # whatever replays now has nothing but its own buffers
    graph.replay()


class AtOnce:
    """A link to the memory where everything is already."""

    def make_buffer(self, num_rows, table):
        return torch.empty(num_rows, table.shape[1])

    def send(self, rows):
        return rows.clone(), lambda: None


def test_a_shrinking_batch_leaves_nothing_of_the_requests_before(tiny, session_seed):
    """Rows that were requests in one step are padding in the next."""
    engine, ran = with_graphs(tiny)
    prompts = random_prompts(tiny, [9, 4, 6, 2], session_seed)
    params = [dataclasses.replace(GREEDY, max_tokens=n) for n in (6, 2, 4, 3)]
    requests = [engine.make_request(p, s) for p, s in zip(prompts, params, strict=True)]
    for request in requests:
        engine.add(request)
    while engine.has_work:
        engine.step()
    for prompt, some, request in zip(prompts, params, requests, strict=True):
        assert [request.output_token_ids] == run(make_engine(tiny, "naive"), [prompt], some)
    assert set(ran) == {1, 2, 4}


def test_steps_with_a_prompt_in_them_run_eagerly(tiny, session_seed):
    engine, ran = with_graphs(tiny)
    long, short = random_prompts(tiny, [100, 3], session_seed)  # the budget of a step is 64
    assert run(engine, [long, short], SHORT) == run(make_engine(tiny, "naive"), [long, short], SHORT)
    assert len(ran) <= 3


def test_profiled_steps_run_eagerly(tiny, session_seed):
    engine, ran = with_graphs(tiny)
    engine.profile = True
    run(engine, random_prompts(tiny, [5], session_seed), SHORT)
    assert ran == []


def test_graphs_are_for_gpus_with_triton_attention():
    cuda = torch.device("cuda")
    triton, naive = (choose_attention(torch.device("cpu"), torch.float32, name)[0] for name in ("triton", "naive"))
    assert why_eager(EngineConfig(), cuda, triton) == ""
    assert "enforce_eager" in why_eager(EngineConfig(enforce_eager=True), cuda, triton)
    assert "host" in why_eager(EngineConfig(), cuda, naive)
    assert "cpu" in why_eager(EngineConfig(), torch.device("cpu"), triton)
