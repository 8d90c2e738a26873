"""The embedding table in CPU memory: the same rows, buffers that are not overwritten on their way, and what it saves.

There is no GPU here. Its part is played by a device whose copies happen late, as those of a GPU may, and by PyTorch's
"meta" device, which has shapes and no memory; what a real one does is measured by benchmarks/gpu_check.
"""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from minillm import LLM, model
from minillm.batch import Batch
from minillm.checkpoint import load
from minillm.checkpoint.random_weights import CONFIGS
from minillm.config import EngineConfig
from minillm.embedding import NUM_BUFFERS, Embedding, HostEmbedding
from minillm.errors import ConfigError
from minillm.model import Transformer
from minillm.parallel.model import ParallelTransformer
from minillm.parallel.plan import lengths_of, pack, unpack
from minillm.resources import why_embedding
from tests.unit.engines import make_engine, run, sure_prompts

V, E = 50, 8


class LateLink:
    """Copies are made when somebody waits for them, the last moment at which a device may make them."""

    def __init__(self):
        self.sent = 0

    def make_buffer(self, num_rows, table):
        return torch.full((num_rows, table.shape[1]), float("nan"), dtype=table.dtype)

    def send(self, rows):
        x, done = torch.full_like(rows, float("nan")), []
        self.sent += 1

        def wait():
            if not done:
                done.append(x.copy_(rows))

        return x, wait


class PromptLink(LateLink):
    """Copies are made at once, for a model on the CPU that reads them at once."""

    def send(self, rows):
        self.sent += 1
        return rows.clone(), lambda: None


def batch_of(ids):
    blocks = [list(range(-(-len(ids) // 4)))]
    return Batch.build([ids], [len(ids)], blocks, 4)


# ---- rows ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_steps_that_run_ahead_never_overwrite_rows_on_their_way(dtype):
    table = torch.randn(V, E).to(dtype)
    embed = HostEmbedding(table, LateLink())
    prompts = [torch.randint(V, (n,)).tolist() for n in (3, 1, 7, 7, 2, 19, 1, 1, 5)]
    rows = [embed(batch_of(prompt)) for prompt in prompts]
    for buffer in embed.buffers:
        buffer.wait_until_arrived()
    for prompt, row in zip(prompts, rows, strict=True):
        assert torch.equal(row, table[prompt])
    assert len(embed.buffers) == NUM_BUFFERS == 2


def test_one_step_is_left_on_its_way_while_the_next_is_gathered():
    embed = HostEmbedding(torch.randn(V, E), LateLink())
    first, second, third = (embed(batch_of([i, i + 1])) for i in range(3))
    assert not first.isnan().any()
    assert second.isnan().all() and third.isnan().all()


def test_a_batch_whose_tokens_only_the_device_knows_is_read_back():
    table, ids = torch.randn(V, E), [4, 4, 49, 0]
    batch = dataclasses.replace(batch_of(ids), host_token_ids=None)
    assert torch.equal(HostEmbedding(table, PromptLink())(batch), table[ids])


def test_the_host_knows_the_tokens_of_every_batch_also_on_other_ranks():
    batch = Batch.build([[3, 1], [7]], [2, 5], [[0], [1, 2]], 4, padding=[3])
    assert batch.host_token_ids.tolist() == batch.token_ids.tolist() == [3, 1, 7, 0, 0, 0]
    assert unpack(pack(batch), lengths_of(batch)).host_token_ids.tolist() == [3, 1, 7, 0, 0, 0]


def test_beside_the_layers_it_is_the_plain_lookup():
    table, ids = torch.randn(V, E), [9, 0, 9]
    assert torch.equal(Embedding(table)(batch_of(ids)), F.embedding(torch.tensor(ids), table))


# ---- in an engine ----------------------------------------------------------------------------------


def test_tokens_are_those_of_the_plain_engine_also_in_chunks(session_seed):
    checkpoint = load("random:tiny-mistral")  # untied
    parts = checkpoint, Transformer(checkpoint.config, checkpoint.weights)
    prompts, expected = sure_prompts(parts, [1, 17, 53, 40], session_seed)
    engine, link = make_engine(parts, prefill_chunk_size=16), PromptLink()
    engine.model.embed = HostEmbedding(engine.model.embedding, link)
    steps, schedule = [], engine.scheduler.schedule
    engine.scheduler.schedule = lambda now: steps.append(now) or schedule(now)
    assert run(engine, prompts) == expected
    assert link.sent == len(steps)


# ---- what it saves ---------------------------------------------------------------------------------


@pytest.fixture
def on_a_gpu(monkeypatch):
    """A model whose layers are on a device that is not the CPU."""
    monkeypatch.setattr(model, "PCIe", lambda device: PromptLink())

    def build(name, **options):
        checkpoint = load(f"random:{name}")
        return Transformer(checkpoint.config, checkpoint.weights, torch.bfloat16, "meta", **options)

    return build


def test_an_untied_table_stays_in_cpu_memory_and_nothing_else_does(on_a_gpu):
    plain, offloaded = on_a_gpu("tiny-mistral"), on_a_gpu("tiny-mistral", host_table=True)
    config = CONFIGS["tiny-mistral"]
    table = config.vocab_size * config.hidden_size * 2
    assert offloaded.embedding.device.type == "cpu" and plain.embedding.device.type == "meta"
    assert offloaded.embedding.dtype == torch.bfloat16
    assert {layer.down_proj.weight.device.type for layer in offloaded.layers} == {"meta"}
    assert offloaded.head.weight.device.type == offloaded.norm.weight.device.type == "meta"
    before, after = plain.num_weight_bytes, offloaded.num_weight_bytes
    assert before.pop("embedding") == after.pop("embedding in CPU memory") == offloaded.num_table_bytes == table
    assert before == after


def test_a_tied_table_is_the_head_and_is_refused_with_its_bytes(on_a_gpu):
    with pytest.raises(ConfigError, match=r"LM head of this model is its embedding table \(40,960 bytes\)"):
        on_a_gpu("tiny", host_table=True)


def test_a_tied_head_of_codes_is_another_matrix_and_the_table_may_leave():
    """With rounded weights the head is a copy of its own, so moving the table saves its bytes."""
    head = type("Codes", (), {"num_weight_bytes": {"int8": 1}})()
    network = Transformer.__new__(Transformer)
    network.config, network.head = CONFIGS["tiny"], head
    network._check_that_it_saves_memory()


def test_each_of_two_ranks_keeps_its_half_of_a_tied_head_on_its_gpu(on_a_gpu):
    ranks = SimpleNamespace(rank=1, size=2)
    checkpoint = load("random:tiny")
    options = {"dtype": torch.bfloat16, "device": "meta", "host_table": True}
    network = ParallelTransformer(checkpoint.config, checkpoint.weights, ranks, **options)
    assert network.head.linear.weight.shape == (160, 64) and network.head.linear.weight.device.type == "meta"
    assert network.head.num_weight_bytes.total() == 160 * 64 * 2


def test_on_a_cpu_the_option_changes_nothing_and_says_so(caplog):
    with caplog.at_level("INFO"), LLM("random:tiny", embedding_device="cpu", device="cpu") as llm:
        assert isinstance(llm.engine.model.embed, Embedding)
        assert "changes nothing" in llm.reasons["embedding"]
    assert "changes nothing" in caplog.text
    with LLM("random:tiny", device="cpu") as llm:
        assert llm.reasons["embedding"] == "cpu: the whole model is there"


def test_the_reason_names_the_bytes():
    gpu = torch.device("cuda")
    assert "1,050,673,152 bytes lie in CPU memory" in why_embedding(
        EngineConfig(embedding_device="cpu"), gpu, 1_050_673_152
    )
    assert why_embedding(EngineConfig(), gpu, 40) == "cuda: beside the layers, 40 bytes"


def test_another_place_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match="embedding_device='disk' is not one of auto, cpu"):
        EngineConfig(embedding_device="disk")
