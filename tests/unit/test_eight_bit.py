"""K and V kept in eight bits: rows, pages, attention bodies, and the ladder of the engine over such a cache.

Against exact K and V only a tolerance is promised. Against itself the ladder holds: however a prompt is computed,
every token reads the same codes.
"""

from dataclasses import replace

import pytest
import torch

from minillm import LLM, SamplingParams
from minillm.attention import CPUAttention, PerRequest, flash, naive, sdpa
from minillm.attention.per_request import request_keys
from minillm.checkpoint import load
from minillm.checkpoint.random_weights import CONFIGS
from minillm.config import EngineConfig
from minillm.cpu_rows import RowWriter
from minillm.doctor import report
from minillm.eight_bit import LARGEST, fp8_values, quantize_rows, restore_rows
from minillm.errors import ConfigError, ShapeError
from minillm.kv_cache import ContiguousKV, KVCache, KVLayer, copy_rows_and_padding, kv_bytes_per_block
from minillm.model import Transformer
from minillm.resources import choose_kv_dtype, choose_num_blocks
from tests.tolerances import KV_EIGHT_BIT, KV_SAME_CODES
from tests.unit.attention_cases import NAN, check, deep, random_sequence, rising
from tests.unit.eight_bit_cases import (
    EIGHT_BIT,
    EightBitRagged,
    assert_rows_close,
    assert_tokens_follow,
    moved,
    read_back,
)
from tests.unit.engines import (
    B,
    chunked_logits,
    make_engine,
    note_preemptions,
    poison,
    random_prompts,
    run,
    whole,
)
from tests.unit.test_sparse import SPARSE
from tests.unit.test_sparse import check as check_sparse
from tests.unit.two_ranks import OPTIONS, tokens

INT8, FP8 = EIGHT_BIT
FAMILIES = ["random:tiny", "random:tiny-mistral", "random:tiny-qwen2", "random:tiny-qwen3"]
BODIES = ["naive", "flash", "sdpa", "cpu", "sliding_window(128)", "dynamic_blocks(mass=1, block=16)"]


@pytest.fixture(params=EIGHT_BIT, ids=["int8", "fp8"])
def kv_dtype(request):
    return request.param


# -- rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_size", [1, 8, 64, 256])
def test_a_row_comes_back_within_half_a_step(kv_dtype, dtype, head_size):
    x = torch.randn(50, 3, head_size) * torch.logspace(-4, 4, 50)[:, None, None]
    x = x.to(dtype)
    codes, scale = quantize_rows(x, kv_dtype)
    assert codes.dtype == kv_dtype and codes.shape == x.shape
    assert scale.dtype == torch.float32 and scale.shape == x.shape[:-1]
    assert_rows_close(read_back(codes, scale), x.double(), kv_dtype)
    torch.testing.assert_close(restore_rows(codes, scale, torch.float64), read_back(codes, scale), rtol=1e-6, atol=0)


def test_the_largest_value_of_a_row_takes_the_largest_code(kv_dtype):
    x = torch.tensor([[-3.0, 1.0, 2.0], [0.5, 0.25, -0.125]])
    codes, scale = quantize_rows(x, kv_dtype)
    assert codes.float()[0, 0] == -LARGEST[kv_dtype] and codes.float()[1, 0] == LARGEST[kv_dtype]
    torch.testing.assert_close(scale, torch.tensor([3.0, 0.5]) / LARGEST[kv_dtype])


@pytest.mark.parametrize("largest", [1e-44, 1e-38, 1e-30, 1.0, 1e30, 3.4e38])
def test_no_size_of_values_overflows_or_becomes_nan(kv_dtype, largest):
    x = torch.randn(7, 32).clamp(-1, 1)
    x[:, 5] = 1
    x = x * largest
    codes, scale = quantize_rows(x, kv_dtype)
    back = restore_rows(codes, scale, torch.float32)
    assert back.isfinite().all() and scale.isfinite().all()
    assert (back.abs() <= x.abs().amax(-1, keepdim=True).double() * (1 + 1e-6) + 1e-37).all()
    if largest > 1e-35:
        assert_rows_close(back, x.double(), kv_dtype)


def test_a_row_of_zeros_gives_zeros_back_and_divides_by_nothing(kv_dtype):
    x = torch.zeros(2, 3, 16)
    x[1] = 1
    codes, scale = quantize_rows(x, kv_dtype)
    assert scale.isfinite().all() and (scale > 0).all()
    assert torch.equal(restore_rows(codes, scale, torch.float32)[0], x[0])


@pytest.mark.parametrize("broken", [NAN, torch.inf, -torch.inf])
def test_a_broken_row_gives_back_no_finite_value_and_touches_no_other(kv_dtype, broken):
    x = torch.randn(4, 3, 16)
    exact = x.clone()
    x[2, 1, 7] = broken
    back = restore_rows(*quantize_rows(x, kv_dtype), torch.float32)
    assert not back[2, 1].isfinite().any()
    back[2, 1], exact[2, 1] = 0, 0
    assert_rows_close(back, exact.double(), kv_dtype)


def test_each_row_is_quantised_as_if_it_were_alone(kv_dtype):
    x = torch.randn(20, 3, 16) * 10 ** torch.randn(20, 3, 1)
    codes, scale = quantize_rows(x, kv_dtype)
    for i in range(20):
        one, its = quantize_rows(x[i : i + 1, 1:2], kv_dtype)
        assert torch.equal(one.view(torch.int8), codes[i : i + 1, 1:2].contiguous().view(torch.int8))
        assert torch.equal(its, scale[i : i + 1, 1:2])


def test_fp8_codes_are_read_as_pytorch_reads_them():
    codes = torch.arange(256, dtype=torch.uint8).view(FP8)
    exact = codes.float()
    numbers = ~exact.isnan()
    assert numbers.sum() == 254
    assert torch.equal(fp8_values(codes)[numbers], exact[numbers])


# -- pages


def layer_of(kv_dtype, blocks=3, block_size=4, kv_heads=2, head_size=16, dtype=torch.float32):
    codes = torch.zeros(2, blocks, block_size, kv_heads, head_size, dtype=torch.int8).view(kv_dtype)
    return KVLayer(*codes, None, *torch.full(codes.shape[:-1], NAN), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_written_is_read_in_the_order_of_the_blocks(kv_dtype, dtype):
    layer = layer_of(kv_dtype, dtype=dtype)
    k, v = (torch.randn(6, 2, 16).to(dtype) for _ in range(2))
    layer.write(k, v, torch.tensor([8, 9, 10, 11, 0, 1]))
    for rows, exact in zip(layer.gather(torch.tensor([2, 0, 1]), 6), (k, v), strict=True):
        assert rows.dtype == layer.dtype == dtype
        assert_rows_close(rows, exact.double(), kv_dtype, 1e-2 if dtype == torch.bfloat16 else 1e-6)
    for rows, exact in zip(layer.read_rows(torch.tensor([[9], [1]])), (k, v), strict=True):
        assert rows.shape == (2, 1, 2, 16)
        assert_rows_close(rows[:, 0], exact[[1, 5]].double(), kv_dtype, 1e-2)
    assert layer.k_scale.flatten(0, 1)[2:8].isnan().all()


@pytest.mark.parametrize("write", ["cpu", "gpu"])
def test_padding_rows_are_not_written(kv_dtype, write, monkeypatch):
    layer = layer_of(kv_dtype)
    rows, slots = torch.randn(5, 2, 16), torch.tensor([7, 2, 5, -1, -1])
    if write == "gpu":  # the form that never looks at the slots
        codes, scale = quantize_rows(rows, kv_dtype)
        copy_rows_and_padding(layer.k, codes, slots)
        copy_rows_and_padding(layer.k_scale, scale, slots)
    else:
        layer.write(rows, rows, slots)
    written = layer.k_scale.flatten(0, 1).isfinite().all(-1)
    assert written.nonzero().flatten().tolist() == [2, 5, 7]
    back, _ = layer.read_rows(slots[:3])
    assert_rows_close(back, rows[:3].double(), kv_dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 2, 33])
def test_the_compiled_writer_leaves_what_pytorch_does(kv_dtype, dtype, tokens):
    """Every size of values, rows of zeros, broken rows; k and v are slices of one tensor, as in the model."""
    writer = RowWriter(dtype, kv_dtype)
    heads = torch.randn(tokens, 3 + 2 * 2, 24) * 10 ** (8 * torch.randn(tokens, 7, 1)).clamp(-44, 37)
    heads[torch.rand(tokens, 7) < 0.1] = 0
    heads[torch.rand(tokens, 7, 24) < 0.005] = NAN
    heads = heads.to(dtype)
    layers = [layer_of(kv_dtype, 9, 4, 2, 24, dtype) for _ in range(2)]
    layers[1].write_rows = writer
    slots = torch.randperm(36)[:tokens]
    for layer in layers:
        layer.write(heads[:, 3:5], heads[:, 5:], slots)
    for name in ("k", "v"):
        (codes, scale), (found, its) = ((getattr(x, name), getattr(x, f"{name}_scale")) for x in layers)
        torch.testing.assert_close(its, scale, rtol=1e-6, atol=0, equal_nan=True)
        sane = scale.isfinite()
        others = (codes.view(torch.int8) != found.view(torch.int8))[sane].sum()
        assert others <= 1 + codes.numel() // 1000  # values at the border between two codes
        torch.testing.assert_close(found.float()[sane], codes.float()[sane], rtol=1 / 7, atol=1.001)


def test_the_compiled_writer_is_taken_on_a_processor_and_refuses_slots_of_nobody(tiny, kv_dtype):
    config = tiny[0].config
    layer = KVCache(config, 2, 4, kv_dtype=kv_dtype).layers[0]
    rows = torch.randn(1, config.num_key_value_heads, config.head_dim)
    assert isinstance(layer.write_rows, RowWriter)
    for slot in (8, -2):
        with pytest.raises(IndexError):
            layer.write_rows(rows, rows, layer, torch.tensor([slot]))
    assert KVCache(config, 2, 4).layers[0].write_rows is None
    assert KVCache(config, 2, 4, torch.float16, kv_dtype=kv_dtype).layers[0].write_rows is None


def test_copied_blocks_take_their_scales_along(tiny, kv_dtype):
    checkpoint, _ = tiny
    cache = KVCache(checkpoint.config, 5, B, kv_dtype=kv_dtype)
    poison(cache)
    config = checkpoint.config
    rows = torch.randn(2, 2 * B, config.num_key_value_heads, config.head_dim)
    for layer in cache.layers:
        layer.write(*rows, torch.arange(2 * B))
    cache.copy_blocks([(0, 4), (1, 2)])
    for layer in cache.layers:
        for copied, original in zip(
            layer.read_blocks(torch.tensor([4, 2])), layer.read_blocks(torch.tensor([0, 1])), strict=True
        ):
            assert torch.equal(copied, original) and copied.isfinite().all()
        assert layer.k_scale[3].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cache_counts_its_scales(kv_dtype, dtype):
    config = CONFIGS["tiny"]
    rows = 2 * config.num_hidden_layers * config.num_key_value_heads  # of K and V, per token
    cache = KVCache(config, 7, B, dtype, kv_dtype=kv_dtype)
    assert cache.num_bytes == 7 * B * rows * (config.head_dim + 4)
    assert kv_bytes_per_block(config, B, kv_dtype) == B * rows * (config.head_dim + 4)
    dense = ContiguousKV(config, 3, 50, dtype, kv_dtype=kv_dtype)
    assert dense.num_bytes == 3 * 50 * rows * (config.head_dim + 4)
    assert dense.wasted_bytes([10, 20, 50]) == 70 * rows * (config.head_dim + 4)
    assert KVCache(config, 7, B, dtype).scales == []


@pytest.mark.parametrize("name, ratio", [("1b", 128 / 68), ("8b", 256 / 132)])
def test_nearly_twice_as_many_blocks_fit(kv_dtype, name, ratio):
    """2 D bytes in bfloat16, D + 4 in eight bits: 1.88 for heads of 64, 1.94 for heads of 128."""
    config, options = CONFIGS[name], EngineConfig(kv_cache_memory_bytes=2**33)
    cpu = torch.device("cpu")
    before, _ = choose_num_blocks(options, config, torch.bfloat16, cpu)
    after, why = choose_num_blocks(options, config, torch.bfloat16, cpu, kv_dtype)
    assert after / before == pytest.approx(ratio, rel=1e-3)
    assert f"{kv_bytes_per_block(config, 16, kv_dtype)} bytes" in why


# -- attention bodies


@pytest.fixture(scope="module")
def bodies():
    made = {"naive": PerRequest(naive.attention), "flash": PerRequest(flash.attention)}
    made["sdpa"] = PerRequest(sdpa.attention, sdpa.output)
    made["cpu without numba"] = CPUAttention(use_numba=False)
    return made | {f"cpu {x}": CPUAttention(torch.float32, kv_dtype=x) for x in EIGHT_BIT}


@pytest.fixture(params=["naive", "flash", "sdpa", "cpu without numba", "cpu"])
def body(request, bodies, kv_dtype):
    return bodies[f"cpu {kv_dtype}" if request.param == "cpu" else request.param]


LENGTHS = [(1, 1), (1, 16), (1, 130), (1, 17), (2, 2), (3, 35), (5, 21), (16, 16), (17, 90), (40, 40)]


def mixed_sequences(**shape):
    order = torch.randperm(len(LENGTHS)).tolist()
    return [random_sequence(*LENGTHS[i], **shape) for i in order]


@pytest.mark.parametrize("window", [None, 9])
def test_every_body_reads_codes_and_scales(body, kv_dtype, window):
    """Never the step's own k and v, which are NaN here: a fresh prompt sees what later steps will see of it."""
    check(body, EightBitRagged(mixed_sequences(), kv_dtype, window))


@pytest.mark.parametrize("head_size", [8, 24, 64, 80, 256])
@pytest.mark.parametrize("block_size", [1, 16])
def test_head_sizes_and_block_sizes(body, kv_dtype, head_size, block_size):
    sequences = [random_sequence(n, 37, heads=6, kv_heads=3, head_size=head_size) for n in (1, 3, 37)]
    check(body, EightBitRagged(sequences, kv_dtype, block_size=block_size))


@pytest.mark.parametrize("kind", [rising, deep])
def test_hard_values(body, kv_dtype, kind):
    sequences = [kind(*random_sequence(n, 100, heads=6, head_size=32)) for n in (1, 17)]
    check(body, EightBitRagged(sequences, kv_dtype))


@pytest.mark.parametrize("size", [1e-30, 1e-6, 1e6, 1e25])
def test_scales_far_from_one_neither_vanish_nor_overflow(body, kv_dtype, size):
    """Where fp8 is read by a factor of 2^120, that and a scale must not be multiplied with each other first."""
    q, k, v = random_sequence(1, 40)
    check(body, EightBitRagged([(q / size, k * size, v)], kv_dtype))


def test_bfloat16_queries_over_eight_bits(kv_dtype):
    attend = CPUAttention(torch.bfloat16, kv_dtype=kv_dtype)
    assert "compiled by numba" in attend.reason
    sequences = mixed_sequences(heads=6, head_size=64, dtype=torch.bfloat16)
    check(attend, EightBitRagged(sequences, kv_dtype), torch.bfloat16)


def test_a_broken_row_shows_and_spares_its_neighbours(body, kv_dtype):
    healthy = mixed_sequences()
    q, k, v = random_sequence(1, 30)
    k[3, 1, 2] = NAN
    problem = EightBitRagged([*healthy, (q, k, v)], kv_dtype)
    out = body(*problem.inputs)
    assert out[-1, 2:].isnan().all() and out[-1, :2].isfinite().all()
    assert out[:-1].isfinite().all()


def test_queries_of_another_type_than_rows_are_read_in_are_refused(kv_dtype):
    problem = EightBitRagged([random_sequence(2, 9)], kv_dtype)
    problem.q, problem.k, problem.v = (x.bfloat16() for x in (problem.q, problem.k, problem.v))
    with pytest.raises(ShapeError, match="queries are torch.bfloat16, but the pages hold torch.float32"):
        PerRequest(naive.attention)(*problem.inputs)


@pytest.mark.parametrize("text", SPARSE)
def test_sparse_methods_choose_and_read_what_was_kept(kv_dtype, text):
    check_sparse(text, EightBitRagged(mixed_sequences(), kv_dtype))


# -- the engine's ladder


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    checkpoint = load(request.param)
    return checkpoint, Transformer(checkpoint.config, checkpoint.weights)


PROMPTS = [1, B - 1, B, B + 1, 2 * B + 1, 53]


def test_logits_stay_near_those_of_an_exact_cache(family, session_seed, kv_dtype):
    (tokens,) = random_prompts(family, [61], session_seed)
    exact = whole(family, tokens)
    off = (whole(family, tokens, kv_dtype=kv_dtype) - exact).norm() / exact.norm()
    assert 1e-4 < off < KV_EIGHT_BIT[kv_dtype]


@pytest.fixture(scope="module")
def in_one_go(tiny, session_seed):
    """Three prompts, and their logits over a cache of each format (None: exact)."""
    prompts = random_prompts(tiny, [61] * 3, session_seed + 1)
    return prompts, {x: [whole(tiny, prompt, kv_dtype=x) for prompt in prompts] for x in (None, *EIGHT_BIT)}


def chunks_move(tiny, in_one_go, body, chunk, kv_dtype):
    """How far chunks move the logits of the row that moves most, in the median of the prompts."""
    prompts, logits = in_one_go
    found = [chunked_logits(tiny, prompt, body, chunk, kv_dtype) for prompt in prompts]
    return torch.stack(list(map(moved, found, logits[kv_dtype], logits[None]))).median(0).values.max()


@pytest.mark.parametrize("chunk", [1, 3, B - 1, B, B + 1, 61])
@pytest.mark.parametrize("body", BODIES)
def test_chunked_logits_equal_one_shot_logits(tiny, in_one_go, kv_dtype, body, chunk):
    """A first chunk has its K and V at hand; read from the cache they are what later chunks see of them."""
    assert chunks_move(tiny, in_one_go, body, chunk, kv_dtype) < KV_SAME_CODES


@pytest.mark.parametrize("chunk", [B - 1, 61])
def test_a_mutant_that_reads_its_own_rows_unrounded_is_noticed(tiny, in_one_go, kv_dtype, monkeypatch, chunk):
    """The step that would make chunks matter: a fresh prompt, or its first chunk, that skips the cache."""

    def fresh_rows_as_they_are(k, v, layer, blocks, context):
        return (k, v) if len(k) == context else request_keys(k, v, layer, blocks, context)

    monkeypatch.setattr("minillm.attention.cpu.request_keys", fresh_rows_as_they_are)
    assert chunks_move(tiny, in_one_go, "cpu", chunk, kv_dtype) > 4 * KV_SAME_CODES


def follow(parts, prompts, kv_dtype, passes=1, **options):
    engine = make_engine(parts, kv_dtype=kv_dtype, **options)
    for _ in range(passes):
        assert_tokens_follow(parts, prompts, run(engine, prompts), kv_dtype)
    return engine


def test_cached_batched_and_found_in_the_prefix_cache(family, session_seed, kv_dtype):
    prompts = random_prompts(family, PROMPTS, session_seed + 2)
    follow(family, prompts, kv_dtype, passes=2)
    for prompt in prompts:
        follow(family, [prompt], kv_dtype)


@pytest.mark.parametrize("chunk", [1, B - 1, B + 1])
def test_prefill_in_chunks(family, session_seed, kv_dtype, chunk):
    follow(family, random_prompts(family, PROMPTS, session_seed + 3), kv_dtype, prefill_chunk_size=chunk)


def test_a_mutant_whose_chunks_read_their_own_rows_only_is_noticed(tiny, session_seed, kv_dtype, monkeypatch):
    prompts = random_prompts(tiny, PROMPTS, session_seed + 3)
    monkeypatch.setattr("minillm.attention.cpu.request_keys", lambda k, v, *_: (k, v))
    replies = run(make_engine(tiny, kv_dtype=kv_dtype, prefill_chunk_size=B - 1), prompts)
    with pytest.raises(AssertionError):
        assert_tokens_follow(tiny, prompts, replies, kv_dtype)


def test_contiguous_rows(family, session_seed, kv_dtype):
    prompts = random_prompts(family, PROMPTS, session_seed + 4)
    follow(family, prompts, kv_dtype, num_blocks=8, contiguous=True, max_num_seqs=8)


@pytest.mark.parametrize("num_blocks", [5, 7])
def test_preemptions(family, session_seed, kv_dtype, num_blocks):
    prompts = random_prompts(family, PROMPTS, session_seed + 5)
    engine = make_engine(family, num_blocks=num_blocks, kv_dtype=kv_dtype)
    preempted = note_preemptions(engine)
    assert_tokens_follow(family, prompts, run(engine, prompts), kv_dtype)
    assert preempted, "the pool was meant to be too small"


def test_completions_that_share_a_prompt_and_part_by_copy_on_write(tiny, session_seed, kv_dtype):
    (prompt,) = random_prompts(tiny, [B + 3], session_seed + 6)
    engine = make_engine(tiny, kv_dtype=kv_dtype)
    params = SamplingParams(seed=7, n=4, temperature=1.0, max_tokens=12, ignore_eos=True)
    request = engine.make_request(prompt, params)
    engine.add(request)
    copies, copy_blocks = [], engine.kv_cache.copy_blocks
    engine.kv_cache.copy_blocks = lambda pairs: (copies.extend(pairs), copy_blocks(pairs))
    output = None
    while engine.has_work:
        for chunk in engine.step():
            output = chunk.output or output
    assert copies, "the last block of the prompt is shared and then written"
    replies = [completion.token_ids for completion in output.outputs]
    assert len(set(map(tuple, replies))) > 1
    alone = [run(make_engine(tiny, kv_dtype=kv_dtype), [prompt], replace(params, n=1, seed=7 + i))[0] for i in range(4)]
    same = sum(a == b for a, b in zip(replies, alone, strict=True))
    assert same >= 3  # one may part ways where a value lies at the border between two codes


# -- options


def test_unknown_formats_are_refused_by_name():
    with pytest.raises(ConfigError, match="kv_cache_dtype='fp4' is not one of auto, int8, fp8, fp8_e4m3"):
        EngineConfig(kv_cache_dtype="fp4")


@pytest.mark.parametrize("name, dtype", [("int8", INT8), ("fp8", FP8), ("fp8_e4m3", FP8), ("auto", torch.bfloat16)])
def test_an_llm_keeps_rows_as_it_was_told_and_says_so(name, dtype):
    with LLM("random:tiny", dtype="bfloat16", kv_cache_dtype=name, kv_cache_memory_bytes=1 << 20) as llm:
        assert llm.engine.kv_cache.tensors[0].dtype == dtype
        assert report(llm)["kv_cache_dtype"].startswith(f"{dtype}:")
        assert 1 << 19 < report(llm)["kv_cache_bytes"] <= 1 << 20
        (output,) = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 3


@pytest.mark.parametrize("capability, refused", [((8, 0), True), ((8, 6), True), ((8, 9), False), ((9, 0), False)])
def test_fp8_needs_a_gpu_that_has_it_and_int8_does_not(monkeypatch, capability, refused):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    cuda = torch.device("cuda")
    assert choose_kv_dtype(EngineConfig(kv_cache_dtype="int8"), torch.bfloat16, cuda)[0] == INT8
    if refused:
        with pytest.raises(ConfigError, match=r"'fp8' needs compute capability 8.9 .* has 8\.\d; use 'int8'"):
            choose_kv_dtype(EngineConfig(kv_cache_dtype="fp8"), torch.bfloat16, cuda)
    else:
        assert choose_kv_dtype(EngineConfig(kv_cache_dtype="fp8"), torch.bfloat16, cuda)[0] == FP8
    assert choose_kv_dtype(EngineConfig(kv_cache_dtype="fp8"), torch.bfloat16, torch.device("cpu"))[0] == FP8


# -- several ranks, and the real model


@pytest.mark.parametrize("name, kv_dtype, cut", [("int8", INT8, "heads"), ("fp8", FP8, "layers")])
def test_two_ranks_keep_their_heads_or_layers_in_eight_bits(tiny, session_seed, name, kv_dtype, cut):
    prompts = random_prompts(tiny, [5, 37], session_seed + 8)
    ranks = {"tensor_parallel_size": 2} if cut == "heads" else {"pipeline_parallel_size": 2}
    with LLM("random:tiny", kv_cache_dtype=name, **ranks, **OPTIONS) as two:
        assert two.engine.kv_cache.tensors[0].dtype == kv_dtype
        replies = [reply for (reply,) in tokens(two, prompts)]
        assert_tokens_follow(tiny, prompts, replies, kv_dtype)
        shared = two.generate(prompts[1:], SamplingParams(n=3, seed=1, max_tokens=8, ignore_eos=True), use_tqdm=False)
        assert len(shared[0].outputs) == 3


@pytest.mark.slow
def test_the_real_model_says_the_same_where_it_is_sure():
    """fp32; every token of the answer leads the next candidate by more than 0.5 nats with an exact cache."""
    messages = [{"role": "user", "content": "Name the capital of France."}]
    params = SamplingParams(temperature=0.0, max_tokens=24, logprobs=2)
    texts = {}
    for name in ("auto", "int8", "fp8"):
        with LLM(dtype="float32", quantization="none", kv_cache_dtype=name, kv_cache_memory_bytes=1 << 26) as llm:
            (output,) = llm.chat(messages, params, use_tqdm=False)
        texts[name] = output.outputs[0].text
        if name == "auto":
            first_two = (sorted(x.logprob for x in step.values())[-2:] for step in output.outputs[0].logprobs)
            assert min(best - second for second, best in first_two) > 0.5
    assert "Paris" in texts["auto"]
    assert texts["int8"] == texts["fp8"] == texts["auto"]
