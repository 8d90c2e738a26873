"""The padded path of step graphs, with recording replaced by a plain call: what a GPU replays runs here each time."""

import dataclasses

import pytest
import torch

from minillm.attention.choose import choose_attention
from minillm.attention.triton import TritonAttention
from minillm.checkpoint import load
from minillm.config import EngineConfig
from minillm.embedding import HostEmbedding
from minillm.errors import ShapeError
from minillm.model import Transformer
from minillm.step_graphs import PROMPT_SIZES, Shape, StepGraphs, launch_bound_tokens, why_eager
from tests.unit.engines import GREEDY, MAX_LEN, make_engine, poison, random_prompts, run

SEATS = 33
SHORT = dataclasses.replace(GREEDY, max_tokens=4)


@pytest.fixture(scope="module")
def tiny():
    checkpoint = load("random:tiny")
    return checkpoint, Transformer(checkpoint.config, checkpoint.weights)


def with_graphs(parts, budget=64, prompts=0, **options):
    """An engine whose steps go through graphs, those with up to `prompts` rows of prompts too, and what ran: the number
    of logits of each replay."""
    options = {"max_num_seqs": SEATS, "max_num_batched_tokens": budget, **options}
    engine, ran = make_engine(parts, "triton", num_blocks=80, **options), []

    def capture(run):
        def replay():
            logits = run()
            ran.append(len(logits))
            return logits

        return replay

    engine.step_graphs = StepGraphs(engine.model, engine.kv_cache, engine.attend, SEATS, MAX_LEN, prompts, capture)
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
    engine.model = engine.step_graphs.model = network
    network.embed = HostEmbedding(network.embedding, AtOnce())
    assert run(engine, prompts, SHORT) == expected
    graph = engine.step_graphs.graphs[Shape(4, 4)]
    assert ran and graph.embedded.shape == (4, network.config.hidden_size)
    network.embed = None  # whatever replays now has nothing but its own buffers
    with torch.inference_mode():
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


def shapes(engine):
    return set(engine.step_graphs.graphs)


@pytest.mark.parametrize("lengths", [[17], [64], [65], [90], [40, 23], [17, 30, 19, 41], [100, 1, 1]], ids=str)
def test_prompts_in_graphs_give_the_tokens_of_eager_steps(tiny, session_seed, lengths):
    prompts = random_prompts(tiny, lengths, session_seed)
    engine, ran = with_graphs(tiny, budget=128, prompts=128)
    assert run(engine, prompts, SHORT) == run(make_engine(tiny, "naive"), prompts, SHORT)
    rows = 64 if sum(lengths) <= 64 else 128
    assert Shape(rows, 1 if len(lengths) == 1 else 8) in shapes(engine)
    assert len(ran) == 4, "the step of the prompts and three of decodes"


def test_chunks_beside_decodes_in_one_graph(tiny, session_seed):
    """A chunk that ends no prompt, and one that does, with two requests that decode meanwhile."""
    short, other, long = random_prompts(tiny, [20, 18, 100], session_seed)
    engine, ran = with_graphs(tiny, budget=64, prompts=64)
    params = dataclasses.replace(GREEDY, max_tokens=8)
    requests = [engine.make_request(prompt, params) for prompt in (short, other, long)]
    for request in requests[:2]:
        engine.add(request)
    engine.step()
    engine.add(requests[2])
    steps = 1
    while engine.has_work:
        engine.step()
        steps += 1
    expected = run(make_engine(tiny, "naive"), [short, other, long], params)
    assert [request.output_token_ids for request in requests] == expected
    assert len(ran) == steps, "no step ran eagerly"


def test_split_decodes_beside_a_chunk(tiny, session_seed):
    """What is launched for a graph must do for the longest context: decodes are split whatever their length."""
    short, long = random_prompts(tiny, [20, 60], session_seed)
    engine, _ = with_graphs(tiny, budget=64, prompts=64)
    engine.attend = engine.step_graphs.attend = TritonAttention(torch.float32, "cpu", num_splits=4)
    first, second = (engine.make_request(prompt, GREEDY) for prompt in (short, long))
    engine.add(first)
    engine.step()
    engine.add(second)
    while engine.has_work:
        engine.step()
    found = [request.output_token_ids for request in (first, second)]
    assert found == run(make_engine(tiny, "naive"), [short, long])
    assert Shape(64, 8) in shapes(engine)


def test_requests_of_a_few_tokens_and_steps_of_many_run_eagerly(tiny, session_seed):
    """2 to 16 tokens: which tiles serve them depends on the model. 65 rows: more than there are graphs for."""
    for lengths, budget in (([16], 64), ([30, 2], 64), ([65], 128)):
        prompts = random_prompts(tiny, lengths, session_seed)
        engine, _ = with_graphs(tiny, budget=budget, prompts=64)
        assert run(engine, prompts, SHORT) == run(make_engine(tiny, "naive"), prompts, SHORT)
        assert all(shape.num_tokens == shape.num_requests for shape in shapes(engine)), lengths


def test_the_padding_of_prompts_writes_nothing_and_leaves_nothing_of_the_step_before(tiny, session_seed):
    """Pages that nobody owns stay NaN; a long prompt before a short one in the same buffers changes no token of it."""
    engine, _ = with_graphs(tiny, budget=64, prompts=64, enable_prefix_caching=False)
    long, short = random_prompts(tiny, [64, 17], session_seed)
    run(engine, [long], SHORT)
    poison(engine.kv_cache)
    assert run(engine, [short], SHORT) == run(make_engine(tiny, "naive"), [short], SHORT)
    assert shapes(engine) == {Shape(64, 1), Shape(1, 1)}
    untouched = torch.stack([tensor.isnan().all(dim=(0, 2, 3, 4)) for tensor in engine.kv_cache.tensors]).all(dim=0)
    assert untouched.sum() == 80 - 2


def test_every_step_of_a_shape_fits_its_graph():
    """Rows and requests of any step that is given a shape are at most the shape's, and the graph's chunk has a tile."""
    graphs = StepGraphs(None, None, None, 100, 128, 4096, lambda run: run)
    for num_requests in (1, 2, 8, 9, 33, 100):
        for chunk in (17, 63, 64, 400, 513, 1100, 3990):
            lens = [chunk] + [1] * (num_requests - 1)
            shape = graphs.shape_of(StandIn(lens))
            assert sum(lens) <= shape.num_tokens <= 2 * max(sum(lens), 128)
            assert num_requests <= shape.num_requests and shape.num_tokens - shape.num_requests >= 16
    assert graphs.shape_of(StandIn([4097])) is None
    assert graphs.shape_of(StandIn([1] * 101)) is None


@pytest.mark.parametrize("after", [0, 2])
def test_where_a_recording_fails_every_step_runs_eagerly_from_then_on(tiny, session_seed, caplog, after):
    """Memory may end at any graph; no request is lost, and what the graphs held is given back."""
    prompts = random_prompts(tiny, [30, 5, 17, 3], session_seed)
    engine, ran = with_graphs(tiny, budget=64, prompts=64)
    record, tried = engine.step_graphs._capture, []

    def capture(run):
        tried.append(run)
        if len(tried) > after:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return record(run)

    engine.step_graphs._capture = capture
    found = [run(engine, some, SHORT) for some in (prompts[:1], prompts)]
    assert found == [run(make_engine(tiny, "naive"), some, SHORT) for some in (prompts[:1], prompts)]
    assert len(tried) == after + 1 and len(ran) == (4 if after else 0), (
        "a prompt and three decodes, if two are recorded"
    )
    assert shapes(engine) == set()
    (record,) = caplog.records
    assert record.levelname == "WARNING" and "out of memory" in record.message


def test_a_mistake_of_the_caller_is_no_reason_to_run_eagerly(tiny, session_seed):
    engine, _ = with_graphs(tiny)

    def capture(run):
        raise ShapeError("pages of another model")

    engine.step_graphs._capture = capture
    with pytest.raises(ShapeError):
        run(engine, random_prompts(tiny, [5], session_seed), SHORT)


def test_all_graphs_leave_their_logits_in_one_memory(tiny, session_seed):
    """Each with its own, a hundred graphs would hold gigabytes."""
    engine, _ = with_graphs(tiny, budget=64, prompts=64)
    run(engine, random_prompts(tiny, [30, 17, 3], session_seed), SHORT)
    run(engine, random_prompts(tiny, [40], session_seed), SHORT)
    assert len(shapes(engine)) >= 3
    with torch.inference_mode():
        logits = [graph.replay() for graph in engine.step_graphs.graphs.values()]
    assert len({rows.data_ptr() for rows in logits}) == 1


def test_one_token_of_a_prompt_is_no_decode_where_prompts_run_eagerly(tiny, session_seed):
    """Where prompt tokens leave the model early, a chunk of one token must not go through all layers."""
    prompts = random_prompts(tiny, [9], session_seed)
    engine, ran = with_graphs(tiny, budget=1)
    assert run(engine, prompts, SHORT) == run(make_engine(tiny, "naive"), prompts, SHORT)
    assert len(ran) == SHORT.max_tokens, "the last token of the prompt and three decodes"
    engine, ran = with_graphs(tiny, budget=1, prompts=64)
    run(engine, prompts, SHORT)
    assert len(ran) == 8 + SHORT.max_tokens


class StandIn:
    """What a shape is chosen by."""

    def __init__(self, query_lens):
        self.query_lens, self.num_requests, self.token_ids = query_lens, len(query_lens), range(sum(query_lens))


def test_prompts_are_recorded_up_to_where_a_gpu_computes_longer_than_a_host_launches():
    one, eight = load("random:1b").config, load("random:8b").config
    assert launch_bound_tokens(one, "NVIDIA H200", torch.bfloat16) == int(
        0.7 * 989e12 * 16 * 0.5e-3 / 2 / one.num_parameters
    )
    rows = [launch_bound_tokens(c, "NVIDIA H200", torch.bfloat16) for c in (one, eight)]
    assert 2000 < rows[0] < 2500 and 600 < rows[1] < 800
    assert launch_bound_tokens(one, "NVIDIA L4", torch.bfloat16) < rows[0]
    assert launch_bound_tokens(one, "a GPU of tomorrow", torch.bfloat16) == 512
    assert list(PROMPT_SIZES) == sorted(set(PROMPT_SIZES))


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
