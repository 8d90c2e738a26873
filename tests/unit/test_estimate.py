"""`minillm estimate`: the same sums as the functions, in a table and in JSON, for devices that are not here."""

import json

import pytest

from minillm import costs, estimate, memory, roofline
from minillm.devices import DEVICES, Device, find_device
from minillm.errors import ConfigError
from tests.unit.command import minillm

EIGHT_B = estimate.shape_of("8b")


def test_the_json_holds_what_the_functions_say():
    done = minillm("estimate", "--model", "8b", "--device", "h100", "--context", "3000", "--batch", "7", "--json")
    assert done.returncode == 0, done.stderr
    result, h100 = json.loads(done.stdout), find_device("H100")
    steps = {"prefill": [(3000, 3000)], "decode": [(1, 3000)] * 7}
    for phase, sequences in steps.items():
        assert result[phase]["flops"] == costs.step_flops(EIGHT_B, sequences)
        assert result[phase]["s"] == pytest.approx(roofline.step_seconds(EIGHT_B, sequences, h100))
        assert sum(row["s"] for row in result[phase]["operations"]) == pytest.approx(result[phase]["s"])
    assert (result["prefill"]["bound"], result["decode"]["bound"]) == ("compute", "memory")
    held = memory.estimate(EIGHT_B, [3000] * 7)
    assert result["memory"]["total"] == held.total and result["memory"]["fragmentation"] == held.fragmentation > 0
    assert result["fits"]["batch"] == memory.largest_batch(EIGHT_B, h100.memory, 3000)
    assert result["fits"]["context_naive_attention"] < result["fits"]["context"]


def test_the_embedding_table_in_cpu_memory_saves_its_bytes_and_no_time():
    """A18: 2048 x 4096 x 2 bytes = 16.8 MB over PCIe, 0.26 GB saved for the 7B and 1.05 GB for the 8B."""
    seven, eight = (estimate.estimate(estimate.shape_of(name), find_device("A100-80GB"), 2048) for name in ("7b", "8b"))
    assert seven["embedding"]["table"] == 32_000 * 4096 * 2 and eight["embedding"]["table"] == 128_256 * 4096 * 2
    assert seven["embedding"]["rows"] == eight["embedding"]["rows"] == 16_777_216
    assert 500e-6 < seven["embedding"]["pcie_s"] < 0.01 * seven["prefill"]["s"]
    assert "1.05 GB, which embedding_device=cpu keeps off" in estimate.table(eight)
    small = estimate.estimate(estimate.shape_of("1b"), find_device("T4"), 2048)
    assert "is the LM head as well" in estimate.table(small)


def test_weights_in_fewer_bits_take_their_bytes_and_the_time_to_read_them():
    """8B: 6,979,321,856 weights in layers, 128,256 x 4,096 in the head and as many in the embedding."""
    h100, layers, head = find_device("H100"), 6_979_321_856, 128_256 * 4096
    results = {x: estimate.estimate(EIGHT_B, h100, 2048, quantization=x) for x in ("none", "int8", "int4", "fp8")}
    rows = 32 * (6144 + 2 * 4096 + 28672)  # outputs of all matrices of all layers
    saved = {
        "int8": layers + head - 4 * (rows + 128_256),
        "int4": layers * (2 - 0.5 - 4 / 128) + head - 4 * 128_256,
        "fp8": layers - 4 * rows,
    }
    plain = results["none"]
    for precision, fewer in saved.items():
        r = results[precision]
        assert plain["memory"]["parameters"] - r["memory"]["parameters"] == pytest.approx(fewer)
        assert plain["decode"]["bytes"] - r["decode"]["bytes"] == pytest.approx(fewer)
        assert plain["decode"]["s"] - r["decode"]["s"] == pytest.approx(fewer / h100.bandwidth)
        assert f"parameters in float16, weights in {precision}, on H100" in estimate.table(r)
        assert r["fits"]["batch"] > plain["fits"]["batch"] and r["prefill"]["mfu_at_most"] <= 1
    assert results["int4"]["prefill"]["s"] == pytest.approx(plain["prefill"]["s"], rel=0.01)  # the arithmetic stays
    assert results["fp8"]["prefill"]["s"] < 0.6 * plain["prefill"]["s"]
    assert "weights in" not in estimate.table(plain)


def test_a_tied_head_in_fewer_bits_is_a_copy_beside_the_embedding():
    config = estimate.shape_of("1b")
    results = {q: estimate.estimate(config, find_device("H100"), 100, quantization=q) for q in ("none", "int8", "fp8")}
    sizes = {precision: result["memory"]["parameters"] for precision, result in results.items()}
    layers, table = costs.layer_parameters(config) * 16, 128_256 * 2048
    rows = 16 * (3072 + 2 * 2048 + 16384)
    assert sizes["none"] == 2 * config.num_parameters
    assert sizes["int8"] == pytest.approx(sizes["none"] - layers + table + 4 * (rows + 128_256))
    assert sizes["fp8"] == pytest.approx(sizes["none"] - layers + 4 * rows)


def test_a_cache_in_eight_bits_takes_its_bytes_and_the_time_to_read_them():
    """8 K/V heads of 128 in 32 layers: a token takes 132 bytes per head for K, as many for V."""
    h100 = find_device("H100")
    results = {x: estimate.estimate(EIGHT_B, h100, 3000, 7, kv_cache_dtype=x) for x in ("auto", "int8", "fp8")}
    eight, exact = results["int8"], results["auto"]
    assert results["fp8"] == eight | {"kv_cache_dtype": "fp8"}
    assert eight["memory"]["kv"] == 7 * 3000 * 2 * 32 * 8 * 132 == pytest.approx(exact["memory"]["kv"] * 132 / 256)
    assert exact["memory"]["total"] - eight["memory"]["total"] > 7 * 3000 * 2 * 32 * 8 * 124 * 0.999
    assert eight["fits"]["batch"] == memory.largest_batch(EIGHT_B, h100.memory, 3000, kv_bytes_per_value=132 / 128)
    saved = exact["decode"]["bytes"] - eight["decode"]["bytes"]
    assert saved == pytest.approx(7 * 3001 * 2 * 32 * 8 * 124)
    assert exact["decode"]["s"] - eight["decode"]["s"] == pytest.approx(saved / h100.bandwidth)
    assert "parameters in float16, K and V in int8, on H100" in estimate.table(eight)
    assert "K and V in" not in estimate.table(exact)


def test_the_table_shows_each_operation_of_both_phases():
    done = minillm("estimate", "--model", "70b", "--device", "A100-80GB", "--dtype", "bfloat16")
    assert done.returncode == 0, done.stderr
    for name in ("qkv", "attention", "output", "gate and up", "down", "LM head"):
        assert sum(line.strip().startswith(name) for line in done.stdout.splitlines()) >= 2
    assert "69B parameters in bfloat16 on A100-80GB (NVIDIA A100 datasheet (SXM))" in done.stdout
    assert "fits: 0 requests of 2,048 tokens, because the parameters alone are more" in done.stdout


def test_devices_are_ranked_for_prefill_by_arithmetic_and_for_decode_by_bandwidth():
    done = minillm("estimate", "--model", "8b", "--context", "2048", "--rank-devices", "--json")
    assert done.returncode == 0, done.stderr
    ranked = json.loads(done.stdout)
    by_peak = sorted(DEVICES.values(), key=lambda device: -device.peak())
    by_bandwidth = sorted(DEVICES, key=lambda name: -DEVICES[name].bandwidth)
    prefill = [row["device"] for row in ranked["prefill"]]
    assert [DEVICES[name].peak() for name in prefill] == [device.peak() for device in by_peak]  # two pairs are equal
    assert [row["device"] for row in ranked["decode"]] == by_bandwidth
    assert {row["device"] for row in ranked["prefill"] if not row["fits"]} == {"T4"}


def test_a_device_without_the_type_is_left_out_and_one_too_small_is_marked():
    ranked = estimate.rank_devices(EIGHT_B, 2048, dtype="float8")
    assert {row["device"] for row in ranked["decode"]} == {"L4", "RTX4090", "H100", "H200", "B200"}
    tables = estimate.rank_table(estimate.rank_devices(EIGHT_B, 2048))
    assert tables.count("T4 *") == 2 and "do not fit" in tables
    assert "do not fit" not in estimate.rank_table(ranked)


def test_the_embedded_model_and_this_machine_can_be_estimated(monkeypatch):
    slow = Device("slow", (0, 0), {"float32": 1e9, "bfloat16": 1e9}, 1e8, 1e10, 2, 0, "measured here")
    monkeypatch.setattr("minillm.machine.this_device", lambda dtype: slow)
    device, dtype = estimate.device_and_dtype("here")
    assert device is slow and dtype in ("float32", "bfloat16", "float16")
    config = estimate.shape_of("smollm2-135m-instruct")
    result = estimate.estimate(config, slow, 100, dtype="float32")
    assert result["parameters"] == 134_515_008 and result["ridge_flop_per_byte"] == 10
    assert "measured here" in estimate.table(result)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--device", "T5"], "unknown device 'T5'; known: T4"),
        (["--device", "T4", "--dtype", "bfloat16"], "T4 has no native bfloat16"),
        (["--quantization", "int3"], "quantization='int3' is not one of auto, none, int8"),
        (["--device", "A100-80GB", "--quantization", "fp8"], "A100-80GB has no native float8"),
        (["--kv-cache-dtype", "int3"], "kv_cache_dtype='int3' is not one of auto, int8"),
        (["--context", "0"], "context=0; give 1 or more"),
        (["--batch", "-3"], "batch=-3; give 1 or more"),
        (["--dtype", "int3"], "no size known for 'int3'"),
        (["--context", "0", "--rank-devices"], "context=0; give 1 or more"),
    ],
)
def test_wrong_options_are_one_line_and_status_2(args, words):
    done = minillm("estimate", *args)
    assert done.returncode == 2 and words in done.stderr and "Traceback" not in done.stderr


def test_a_block_of_no_tokens_is_refused():
    with pytest.raises(ConfigError, match="block_size=0"):
        estimate.estimate(EIGHT_B, find_device("H100"), 10, block_size=0)
