"""Every stage gives minillm's tokens, with the reference and with a learner's functions, and says whose parts run."""

import math

import pytest
import torch
import torch.nn.functional as F

from minillm import LLM
from minillm.course import mine
from minillm.course.engine_so_far import STAGES, boot, stages_until
from minillm.course.engine_so_far.textbook import TextbookModel
from minillm.errors import GradeError, StepError
from tests.unit.engines import make_engine, run, sure_prompts
from tests.unit.test_plug import causal, first_come, join, masked, slots

KEYS = [stage.key for stage in STAGES]
NEW = 6


def rms_norm(x, weight, eps):
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def rotate(x, positions, theta):
    """As complex numbers: the pair (d, d + D/2) times e^(i angle)."""
    a, b = x.chunk(2, dim=-1)
    angles = positions[:, None] * theta ** (-torch.arange(a.shape[-1]) / a.shape[-1])
    turned = torch.complex(a, b) * torch.polar(torch.ones_like(angles), angles)[:, None]
    return torch.cat([turned.real, turned.imag], -1)


def block(x, w, head_dim, norm, turn, attend):
    n, heads = x.shape[0], w["o"].shape[1] // head_dim
    y = norm(x, w["input_norm"]) @ w["qkv"].T
    q, rest = y[:, : heads * head_dim], y[:, heads * head_dim :]
    k, v = rest.chunk(2, dim=1)
    q, k, v = (part.reshape(n, -1, head_dim) for part in (q, k, v))
    x = x + attend(turn(q), turn(k), v).reshape(n, -1) @ w["o"].T
    gate, up = (norm(x, w["post_norm"]) @ w["gate_up"].T).chunk(2, dim=1)
    return x + (F.silu(gate) * up) @ w["down"].T


def dense(q, k, v):
    return masked(q, k, v, causal(q.shape[0], k.shape[0]))


class PrefixTable:
    """Beginnings as text, without a hash of its own; the one that it is given is called and not needed."""

    def __init__(self, size, hash_block):
        self.size, self.hash_block, self.blocks = size, hash_block, {}

    def find(self, ids):
        found, parent = [], 0
        for end in range(self.size, len(ids), self.size):
            parent = self.hash_block(parent, tuple(ids[end - self.size : end]))
            if tuple(ids[:end]) not in self.blocks:
                break
            found.append(self.blocks[tuple(ids[:end])])
        return found

    def add(self, ids, blocks):
        for end, block in zip(range(self.size, len(ids) + 1, self.size), blocks, strict=True):
            self.blocks.setdefault(tuple(ids[:end]), block)

    def forget(self, block):
        self.blocks = {text: other for text, other in self.blocks.items() if other != block}


OWN = {
    "causal_mask": causal,
    "grouped_attention": masked,
    "rms_norm": rms_norm,
    "rotate": rotate,
    "block": block,
    "slot_mapping": slots,
    "hash_block": lambda parent, tokens: hash((parent, tokens)),
    "prefix_table": PrefixTable,
    "flash_attention": dense,
    "merge": join,
    "schedule": first_come,
}


@pytest.fixture(scope="module")
def llm():
    with LLM("random:tiny", dtype="float32") as llm:
        yield llm


@pytest.fixture(scope="module")
def prompts(tiny, session_seed):
    return sure_prompts(tiny, [1, 15, 16, 17, 40], session_seed, NEW)[0]


@pytest.fixture(scope="module")
def expected(tiny, prompts):
    return [tokens[:NEW] for tokens in run(make_engine(tiny), prompts)]


@pytest.mark.parametrize("own", [{}, OWN], ids=["reference", "own"])
@pytest.mark.parametrize("stage", KEYS)
def test_every_stage_gives_the_tokens_of_the_engine(llm, prompts, expected, stage, own):
    so_far = boot(llm, stage, own)
    assert [so_far.generate(ids, NEW) for ids in prompts] == expected
    for name, part in so_far.parts.items():
        assert (part is not None) == bool(own)
        assert part is None or part.calls > 0, f"{name} never ran"


@pytest.mark.parametrize("stage", KEYS)
def test_several_requests_at_once_get_the_same_tokens(llm, prompts, expected, stage):
    machine = boot(llm, stage, OWN).machine
    names = [machine.add(ids, NEW) for ids in prompts]
    found = {name: [] for name in names}
    while machine.has_work:
        for name, token in machine.step():
            found[name].append(token)
    assert [found[name] for name in names] == expected


def test_only_from_v7_on_requests_share_a_forward_pass(llm, prompts):
    for stage in KEYS:
        machine = boot(llm, stage, {}).machine
        for ids in prompts[:3]:
            machine.add(ids, NEW)
        sizes = []
        while machine.has_work:
            sizes.append(len(machine.step()))
        assert max(sizes) == (3 if stage in ("v7", "v8") else 1)


def test_every_exchanged_part_of_the_model_counts_its_calls(llm):
    so_far = boot(llm, "v1", {"rotate": rotate})
    so_far.generate([1, 2, 3], 2)
    assert so_far.parts["rotate"].calls == 2 * 2 * 2  # q and k, layers, tokens
    assert so_far.parts["rms_norm"] is None and isinstance(so_far.machine.model, TextbookModel)


def test_a_wrong_part_changes_the_tokens_so_it_really_runs(llm, prompts, expected):
    def untouched(x, positions, theta):
        return x

    assert [boot(llm, "v3", {"rotate": untouched}).generate(ids, NEW) for ids in prompts] != expected


def test_the_saved_functions_are_found_and_a_missing_one_is_the_reference(llm, tmp_path, monkeypatch):
    monkeypatch.setenv(mine.VARIABLE, str(tmp_path))
    assert boot(llm, "v1").stamp == "reference"
    assert boot(llm, "v1").describe().startswith("v1 no cache: yours nothing yet; reference causal_mask, ")
    source = "def rms_norm(x, weight, eps):\n    return x / (x * x).mean(-1, keepdim=True).add(eps).sqrt() * weight\n"
    mine.save("ex03.1", "rms_norm", source)
    so_far = boot(llm, "v2")
    assert so_far.stamp == "yours" and "yours rms_norm; reference causal_mask" in so_far.describe()
    assert so_far.generate([5, 6, 7], NEW) == boot(llm, "v2", {}).generate([5, 6, 7], NEW)
    assert so_far.parts["rms_norm"].calls == NEW * 5  # two layers of two norms, and the last one


def test_attention_of_an_earlier_stage_goes_out_of_use():
    names = {stage.key: [name for each in stages_until(stage.key) for name in each.parts] for stage in STAGES}
    assert names["v8"] == list(OWN)
    with pytest.raises(ValueError, match="no stage 'v9'; there are v1, v2"):
        stages_until("v9")


def test_a_later_attention_replaces_the_earlier_one_in_the_list_of_parts(llm):
    assert "grouped_attention" in boot(llm, "v4", OWN).parts
    assert set(boot(llm, "v5", OWN).parts) & {"grouped_attention", "causal_mask", "merge"} == set()
    assert set(boot(llm, "v8", OWN).parts) & {"grouped_attention", "flash_attention"} == set()


def test_a_mask_alone_is_left_out_and_says_why(llm):
    so_far = boot(llm, "v1", {"causal_mask": causal})
    assert so_far.stamp == "reference"
    assert so_far.describe().endswith("the reference's attention brings its own mask")


@pytest.mark.parametrize("name", ["random:tiny-qwen2", "random:tiny-qwen3"])
def test_a_model_that_the_three_functions_do_not_describe_runs_the_reference_and_says_why(name):
    with LLM(name, dtype="float32") as llm:
        so_far = boot(llm, "v2", {"rotate": rotate, "grouped_attention": masked})
        assert so_far.parts["rotate"] is None
        assert "not used: rotate, because qwen" in so_far.describe()
        assert so_far.generate([3, 4, 5], NEW) == boot(llm, "v1", {}).generate([3, 4, 5], NEW)
        with pytest.raises(GradeError, match="qwen"):
            TextbookModel(llm.engine.model, {})


def test_a_window_is_kept_by_the_learners_mask(session_seed):
    with LLM("random:tiny-mistral", dtype="float32") as llm:
        ids = torch.randint(0, 256, (40,), generator=torch.Generator().manual_seed(session_seed)).tolist()
        wanted = boot(llm, "v1", {}).generate(ids, NEW)
        assert boot(llm, "v3", {"causal_mask": causal, "grouped_attention": masked}).generate(ids, NEW) == wanted


def test_a_part_of_the_wrong_shape_is_named_and_the_engine_stays_usable(llm):
    so_far = boot(llm, "v2", {"rms_norm": lambda x, weight, eps: x.mean(-1)})
    with pytest.raises(GradeError, match=r"<lambda> returned shape \[3\]"):
        so_far.generate([1, 2, 3], NEW)
    broken = boot(llm, "v2", {"rms_norm": lambda x, weight, eps: x / math.nan.real.no_such_name})
    with pytest.raises(StepError, match="no_such_name"):
        broken.generate([1, 2, 3], NEW)
    assert not so_far.machine.has_work and not broken.machine.has_work


def test_every_stage_has_room_for_what_it_promises(llm):
    for stage in STAGES[1:]:
        pool = boot(llm, stage.key, {}, max_model_len=64).machine.engine.scheduler.block_pool
        assert pool.num_blocks * pool.block_size == 4 * 64
        assert pool.block_size == (64 if stage.kv == "contiguous" else 16)


@pytest.mark.slow
def test_every_stage_gives_the_tokens_of_the_embedded_model():
    with LLM("smollm2-135m-instruct", dtype="float32", num_kv_blocks=32) as llm:
        ids = llm.tokenizer.encode("The capital of France is")
        wanted = boot(llm, "v8", {}).generate(ids, 12)
        for stage in KEYS[:-1]:
            assert boot(llm, stage, OWN).generate(ids, 12) == wanted
