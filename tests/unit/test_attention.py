"""Every attention body against the float64 oracle, through the one contract of minillm.attention."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from minillm.attention import CPUAttention, PerRequest, choose_attention, cpu_prefill, flash, naive, sdpa
from minillm.attention.mask import visible_keys
from minillm.attention.merge import merge
from minillm.batch import Batch
from minillm.errors import ConfigError, ShapeError
from minillm.kv_cache import KVLayer
from minillm.option_words import ATTENTION_BODIES
from tests.unit.attention_cases import (
    NAN,
    Ragged,
    assert_close,
    check,
    deep,
    equal,
    inside_nan,
    oracle,
    random_sequence,
    rising,
    transposed,
)

B = 16  # block size
FUNCTIONS = {"naive": naive.attention, "flash": flash.attention, "sdpa": sdpa.attention}
BODIES = [*FUNCTIONS, "cpu", "cpu without numba"]
HALF = [torch.bfloat16, torch.float16]


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """These problems are too small to share out; tests/unit/test_attention_cpu.py has the threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def bodies():
    made = {name: PerRequest(function) for name, function in FUNCTIONS.items()}
    made["sdpa"] = PerRequest(sdpa.attention, sdpa.output)
    return made | {"cpu": CPUAttention(torch.float32), "cpu without numba": CPUAttention(use_numba=False)}


@pytest.fixture(params=BODIES)
def body(request, bodies):
    return bodies[request.param]


@pytest.fixture(params=FUNCTIONS)
def function(request):
    return FUNCTIONS[request.param]


# -- lengths and shapes


@pytest.mark.parametrize("context", [1, 7, 8, 15, 16, 17, 63, 65, 127, 129])
def test_every_number_of_queries_at_the_end_of_a_context(body, context):
    for n in range(1, min(context, B + 1) + 1):
        check(body, Ragged([random_sequence(n, context)]))


@pytest.mark.parametrize("n", [1, 7, 8, 15, 16, 17, 63, 65, 127, 129])
def test_a_fresh_prompt_and_the_same_prompt_behind_others(body, n):
    check(body, Ragged([random_sequence(n, n)]))
    check(body, Ragged([random_sequence(n, n + 33)]))


@pytest.mark.parametrize("n, context", [(300, 300), (300, 431), (20, 700)])
def test_lengths_over_several_tiles(body, n, context):
    check(body, Ragged([random_sequence(n, context)]))


@pytest.mark.parametrize("head_size", [8, 16, 32, 64, 80, 96, 128, 192, 256])
def test_head_sizes(body, head_size):
    check(body, Ragged([random_sequence(n, 37, head_size=head_size) for n in (1, 3, 37)]))


@pytest.mark.parametrize("group", [1, 2, 3, 5, 6, 7, 8])
def test_groups_of_query_heads_with_distinct_kv_heads(body, group):
    check(body, Ragged([random_sequence(n, 40, heads=3 * group, kv_heads=3) for n in (1, 2, 9, 40)]))


@pytest.mark.parametrize("block_size", [1, 8, 16, 64, 1000])
def test_block_sizes(body, block_size):
    check(body, Ragged([random_sequence(n, 70) for n in (1, 9, 70)], block_size=block_size))


# -- values


@pytest.mark.parametrize("kind", [rising, deep, equal])
@pytest.mark.parametrize("n, context", [(1, 129), (3, 100), (17, 150), (129, 129), (300, 300)])
def test_hard_values(body, kind, n, context):
    q, k, v = kind(*random_sequence(n, context, heads=6, head_size=32))
    if kind is not equal:
        scores = torch.einsum("d,sd->s", q[-1, 0].double(), k[:, 0].double()) / 32**0.5
        assert scores.max() < -190 if kind is deep else scores[-1] - scores[0] > 50
    check(body, Ragged([(q, k, v)]))


def test_equal_keys_give_the_mean_of_the_visible_values(body):
    q, k, v = equal(*random_sequence(5, 5, heads=2, kv_heads=2))
    out = body(*Ragged([(q, k, v)]).inputs)
    torch.testing.assert_close(out, v.cumsum(0) / torch.arange(1, 6)[:, None, None])


def test_two_queries_at_the_end_of_five_keys_by_hand(body):
    """The last query sees all five keys (bottom-right); top-left alignment would show it two."""
    q, k = torch.zeros(2, 1, 8), torch.zeros(5, 1, 8)  # all scores are 0: the output is a mean
    v = torch.arange(5.0)[:, None, None].expand(5, 1, 8).contiguous()
    out, lse = body.attend_with_lse(*Ragged([(q, k, v)]).inputs)
    torch.testing.assert_close(out[:, 0, 0], torch.tensor([1.5, 2.0]))
    torch.testing.assert_close(lse[:, 0], torch.tensor([4.0, 5.0]).log())


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("name", BODIES)
def test_half_types_within_their_tolerance(name, dtype, bodies):
    body = CPUAttention(dtype) if name == "cpu" else bodies[name]
    sequences = [
        random_sequence(n, context, heads=6, head_size=64, dtype=dtype)
        for n, context in [(1, 1), (1, 300), (3, 40), (40, 100), (65, 65)]
    ]
    for window in (None, 20):
        check(body, Ragged(sequences, window), dtype)


def test_float64_is_computed_in_float64(body):
    sequences = [random_sequence(n, 50, dtype=torch.float64) for n in (1, 9, 50)]
    check(body, Ragged(sequences, window=30), torch.float64)


# -- windows


@pytest.mark.parametrize("window", [1, 2, 5, 15, 16, 17, 64, 65, 200, 10_000])
def test_a_window_over_decodes_chunks_and_fresh_prompts(body, window):
    sequences = [random_sequence(n, context) for n, context in [(1, 129), (3, 40), (17, 129), (70, 150), (100, 100)]]
    check(body, Ragged(sequences, window))


@pytest.mark.parametrize("window", [3, 100, 300])
def test_a_window_over_several_tiles(body, window):
    check(body, Ragged([random_sequence(300, 600), random_sequence(300, 300)], window))


def test_a_window_of_one_returns_the_value_of_the_token_itself(body):
    problem = Ragged([random_sequence(n, 33, heads=2, kv_heads=2) for n in (1, 33, 7)], window=1)
    torch.testing.assert_close(body(*problem.inputs), problem.v)


# -- batches


def mixed_sequences(**shape):
    lengths = [(1, 1), (1, 16), (1, 130), (1, 17), (2, 2), (3, 35), (4, 20), (5, 21), (16, 16), (17, 90), (40, 40)]
    order = torch.randperm(len(lengths)).tolist()
    return [random_sequence(*lengths[i], **shape) for i in order]


@pytest.mark.parametrize("window", [None, 9])
def test_a_shuffled_ragged_batch_equals_each_request_alone(body, window):
    sequences = mixed_sequences()
    together = body.attend_with_lse(*Ragged(sequences, window).inputs)
    alone = [body.attend_with_lse(*Ragged([sequence], window).inputs) for sequence in sequences]
    for i in range(2):
        assert_close(together[i], torch.cat([result[i] for result in alone]).double(), torch.float32)


@pytest.mark.parametrize("window", [None, 9])
def test_a_shuffled_ragged_batch_equals_the_oracle(body, window):
    check(body, Ragged(mixed_sequences(), window))


def test_where_the_blocks_lie_does_not_matter(body):
    sequences = mixed_sequences()
    first, second = Ragged(sequences), Ragged(sequences)
    assert first.tables != second.tables
    torch.testing.assert_close(body(*first.inputs), body(*second.inputs), rtol=0, atol=0)


def test_prefill_in_chunks_equals_prefill_in_one(body):
    q, k, v = random_sequence(50, 50)
    whole = body(*Ragged([(q, k, v)]).inputs)
    for chunk in (1, 3, B - 1, B, B + 1):
        parts = [
            body(*Ragged([(q[start : start + chunk], k[: start + chunk], v[: start + chunk])]).inputs)
            for start in range(0, 50, chunk)
        ]
        assert_close(torch.cat(parts), whole.double(), torch.float32)


def test_a_broken_request_does_not_touch_its_neighbours(body):
    healthy = mixed_sequences()
    q, k, v = random_sequence(1, 30)
    broken = Ragged([(q, k * NAN, v * NAN), *healthy, (q, k * torch.inf, v * torch.inf)])
    out = body(*broken.inputs)
    expected = torch.cat([oracle(*sequence)[0] for sequence in healthy])
    assert_close(out[1:-1], expected, torch.float32)
    assert out[0].isnan().all()


@pytest.mark.parametrize("n", [1, 3, 9, 30])
def test_nan_that_a_query_sees_is_not_hidden(body, n):
    """A broken model must show: NaN in one visible key or value reaches every output that it should."""
    for broken in (1, 2):  # k, v
        sequence = list(random_sequence(n, 30))
        sequence[broken][0, 1, 3] = NAN
        out = body(*Ragged([tuple(sequence)]).inputs)
        heads = out[:, 2:] if broken == 1 else out[:, 2:, 3]  # those of K/V head 1
        assert heads.isnan().all()
        assert not out[:, :2].isnan().any()


def test_an_empty_batch_is_legal(body):
    layer = KVLayer(torch.full((2, B, 2, 16), NAN), torch.full((2, B, 2, 16), NAN))
    batch = Batch.build([], [], [], B)
    out, lse = body.attend_with_lse(torch.empty(0, 4, 16), torch.empty(0, 2, 16), torch.empty(0, 2, 16), layer, batch)
    assert out.shape == (0, 4, 16) and lse.shape == (0, 4)


# -- memory layouts


@pytest.mark.parametrize("layout", [inside_nan, transposed])
@pytest.mark.parametrize("pages_too", [False, True])
def test_strided_inputs_and_pages(body, layout, pages_too):
    problem = Ragged(mixed_sequences())
    problem.q, problem.k, problem.v = (layout(x) for x in (problem.q, problem.k, problem.v))
    if pages_too and layout is inside_nan:
        problem.kv_layer.k, problem.kv_layer.v = (inside_nan(x) for x in (problem.kv_layer.k, problem.kv_layer.v))
    check(body, problem)


def test_slices_of_a_fused_projection(body):
    problem = Ragged(mixed_sequences())
    fused = torch.cat([problem.q, problem.k, problem.v], dim=1)  # [T, H + 2 Hkv, D]
    problem.q, problem.k, problem.v = fused.split([4, 2, 2], dim=1)
    assert not problem.q.is_contiguous()
    check(body, problem)


def test_one_row_with_odd_strides(body):
    """A size-1 axis may carry any stride; kernels that believe it read elsewhere."""
    problem = Ragged([random_sequence(1, 20, heads=1, kv_heads=1)])
    problem.q = torch.full((100,), NAN)[:16].copy_(problem.q.flatten()).as_strided((1, 1, 16), (77, 55, 1))
    check(body, problem)


def test_keys_expanded_from_one_head(function):
    q, k, v = random_sequence(9, 30, heads=4, kv_heads=1)
    k, v = k.expand(30, 4, 16), v.expand(30, 4, 16)  # stride 0 over the heads
    out, _ = function(q, k, v)
    assert_close(out, oracle(q, k, v)[0], torch.float32)


def test_inputs_are_only_read(body):
    problem = Ragged(mixed_sequences(), window=20)
    tensors = [problem.q, problem.k, problem.v, problem.kv_layer.k, problem.kv_layer.v, problem.batch.block_tables]
    before = [tensor.clone() for tensor in tensors]
    body(*problem.inputs)
    for tensor, copy in zip(tensors, before, strict=True):
        torch.testing.assert_close(tensor, copy, rtol=0, atol=0, equal_nan=True)


# -- rows without keys, and merging


@pytest.mark.parametrize("num_keys", [0, 1, 5])
@pytest.mark.parametrize("window", [None, 2])
def test_a_row_before_the_first_key_gives_zero_and_minus_infinity(function, num_keys, window):
    q, k, v = random_sequence(8, num_keys)
    out, lse = function(q, k, v, window)
    blind = 8 - num_keys
    assert (out[:blind] == 0).all() and (lse[:blind] == -torch.inf).all()
    expected, expected_lse = oracle(q, k, v, window)
    assert_close(out, expected, torch.float32)
    assert_close(lse, expected_lse, torch.float32)


def test_parts_over_any_cut_of_the_keys_merge_to_the_whole():
    q, k, v = random_sequence(1, 40)
    cuts = sorted(torch.randint(0, 41, (5,)).tolist())
    parts = [naive.attention(q, k[a:b], v[a:b]) for a, b in zip([0, *cuts], [*cuts, 40], strict=True)]
    outs, lses = (torch.cat(column) for column in zip(*parts, strict=True))
    shuffled = torch.randperm(len(parts))
    out, lse = merge(outs[shuffled], lses[shuffled], torch.ones(len(parts), dtype=torch.int64), num_rows=3)
    expected, expected_lse = oracle(q, k, v)
    assert_close(out[1:2], expected, torch.float32)
    assert_close(lse[1:2], expected_lse, torch.float32)
    assert (out[[0, 2]] == 0).all() and (lse[[0, 2]] == -torch.inf).all()  # rows that own no part


def test_the_lse_of_a_second_pass_equals_the_library_s():
    q, k = torch.randn(2, 3, 20, 16), torch.randn(2, 3, 20, 16)
    mask = visible_keys(20, 20, window=4)
    for arguments in ({"causal": True}, {"mask": mask}, {}):
        _, expected = sdpa.library_call(q, k, k, **arguments)
        bias = torch.zeros(20, 20).masked_fill(~mask, -math.inf) if "mask" in arguments else None
        lse = sdpa.log_sum_exp(q, k, bias, arguments.get("causal", False))
        torch.testing.assert_close(lse, expected)


# -- what is read and what is stored


@pytest.mark.parametrize("first_of", ["keys", "window"])
def test_flash_never_reads_tiles_that_no_query_sees(first_of):
    """NaN in tiles wholly above the diagonal, or wholly before the window, does not reach the output."""
    q, k, v = random_sequence(64, 64)
    window = None if first_of == "keys" else 10
    expected, _ = oracle(q, k, v, window)
    if first_of == "keys":
        k[16:], v[16:] = NAN, NAN
        rows = slice(0, 16)
    else:
        k[:32], v[:32] = NAN, NAN
        rows = slice(48, 64)
    out, _ = flash.attention(q, k, v, window, query_tile=16, key_tile=16)
    assert_close(out[rows], expected[rows], torch.float32)


@pytest.mark.parametrize("query_tile, key_tile", [(1, 1), (16, 64), (64, 16), (7, 5), (1000, 1000)])
def test_flash_with_any_tile_sizes(query_tile, key_tile):
    for window in (None, 3, 20):
        q, k, v = rising(*random_sequence(33, 50))
        out, lse = flash.attention(q, k, v, window, query_tile, key_tile)
        expected, expected_lse = oracle(q, k, v, window)
        assert_close(out, expected, torch.float32)
        assert_close(lse, expected_lse, torch.float32)


class LargestTensor(TorchDispatchMode):
    """Remembers the most values of any tensor that an operation returned."""

    values = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.values = max(self.values, result.numel())
        return result


def test_flash_never_stores_the_whole_matrix_and_naive_does():
    q, k, v = random_sequence(256, 256, heads=2, kv_heads=1)
    with LargestTensor() as of_flash:
        flash.attention(q, k, v, query_tile=32, key_tile=32)
    with LargestTensor() as of_naive:
        naive.attention(q, k, v)
    assert of_flash.values == q.numel()
    assert of_naive.values == 2 * 256 * 256


def test_a_prefill_tile_reads_no_key_after_its_last_query(monkeypatch):
    monkeypatch.setattr(cpu_prefill, "LIBRARY_TILE", 16)
    q, k, v = random_sequence(40, 60)
    expected, _ = oracle(q, k, v)
    k[36:], v[36:] = NAN, NAN  # queries 0..15 stand at positions 20..35
    out, _ = cpu_prefill.by_library(q, k, v)
    assert_close(out[:16], expected[:16], torch.float32)
    assert out[16:].isnan().all()


# -- probabilities


def test_probabilities_are_those_that_mix_the_values():
    q, k, v = random_sequence(6, 10, heads=4, kv_heads=2)
    p = naive.probabilities(q, k, window=4)
    assert p.shape == (4, 6, 10)
    mixed = torch.einsum("hns,shd->nhd", p, v.repeat_interleave(2, dim=1))
    assert_close(mixed, oracle(q, k, v, window=4)[0], torch.float32)


def test_probabilities_sum_to_one_over_visible_keys_and_are_zero_elsewhere():
    q, k, _ = random_sequence(8, 5)
    p = naive.probabilities(q, k)
    torch.testing.assert_close(p.sum(-1), torch.tensor([0.0] * 3 + [1.0] * 5).expand(4, 8))
    assert (p.masked_select(~visible_keys(8, 5)) == 0).all()


# -- refusals


def test_heads_that_do_not_divide_are_refused(body):
    problem = Ragged([random_sequence(2, 9, heads=4, kv_heads=2)])
    with pytest.raises(ShapeError, match="5 query heads are not a multiple of 2"):
        body(torch.zeros(2, 5, 16), problem.k, problem.v, problem.kv_layer, problem.batch)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"q": (2, 64)}, r"q \[n, H, D\]"),
        ({"k": (2, 2, 8)}, "of one shape"),
        ({"k": (2, 2, 8), "v": (2, 2, 8)}, "head size 16 and k, v have 8"),
        ({"k": (2, 3, 16), "v": (2, 3, 16)}, "not a multiple of 3"),
        ({"q": (3, 4, 16)}, "q has 3 rows"),
        ({"k": (3, 2, 16), "v": (3, 2, 16)}, "k 3, but"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(body, change, message):
    problem = Ragged([random_sequence(2, 9)])
    for name, shape in change.items():
        setattr(problem, name, torch.zeros(shape))
    with pytest.raises(ShapeError, match=message):
        body(*problem.inputs)


def test_mixed_or_integer_dtypes_are_refused(body):
    problem = Ragged([random_sequence(2, 9)])
    q, k, v, layer, batch = problem.inputs
    with pytest.raises(ShapeError, match="q is torch.float64"):
        body(q.double(), k, v, layer, batch)
    with pytest.raises(ShapeError, match="pages hold torch.float32"):
        body(q.double(), k.double(), v.double(), layer, batch)
    with pytest.raises(ShapeError, match="floating-point"):
        body(q.int(), k.int(), v.int(), layer, batch)


def test_pages_of_another_shape_are_refused(body):
    q, k, v, layer, batch = Ragged([random_sequence(2, 9)]).inputs
    for pages in (torch.zeros(4, B, 3, 16), torch.zeros(4, B, 2, 8)):
        with pytest.raises(ShapeError, match="do not fit pages"):
            body(q, k, v, KVLayer(pages, pages), batch)
    with pytest.raises(ShapeError, match="do not fit pages"):
        body(q, k, v, KVLayer(layer.k, layer.v[:, :, :, :8]), batch)


def test_a_context_longer_than_its_block_table_is_refused(body):
    q, k, v, layer, batch = Ragged([random_sequence(2, 9)]).inputs
    batch.context_lens = [2 * B + 1]
    with pytest.raises(ShapeError, match="33 tokens does not fit a block table of 1 blocks of 16"):
        body(q, k, v, layer, batch)


@pytest.mark.parametrize("window", [0, -1])
def test_a_window_without_room_for_the_query_itself_is_refused(body, window):
    problem = Ragged([random_sequence(2, 9)])
    problem.kv_layer.window = window
    with pytest.raises(ShapeError, match=f"window={window} must be at least 1"):
        body(*problem.inputs)


# -- the choice of a body


@pytest.mark.parametrize("name", [name for name in ATTENTION_BODIES if name != "triton"])  # see tests/kernels
def test_every_body_can_be_chosen_by_name_on_a_cpu(name):
    attend, reason = choose_attention(torch.device("cpu"), torch.float32, name)
    check(attend, Ragged(mixed_sequences()))
    assert reason.startswith("cpu" if name == "auto" else name)


def test_a_gpu_gets_sdpa_and_refuses_the_cpu_body():
    _, reason = choose_attention("cuda", torch.bfloat16)
    assert reason.startswith("sdpa")
    with pytest.raises(ConfigError, match="runs on CPU tensors only"):
        choose_attention("cuda:0", torch.bfloat16, "cpu")


@pytest.mark.parametrize("device, message", [("mps", "use device='cpu'"), ("xpu", "'xpu' has no attention body")])
def test_other_devices_are_refused_with_a_way_out(device, message):
    with pytest.raises(ConfigError, match=message):
        choose_attention(torch.device(device), torch.float32)


def test_an_unknown_body_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match="'fast' is not one of auto, naive"):
        choose_attention("cpu", torch.float32, "fast")
