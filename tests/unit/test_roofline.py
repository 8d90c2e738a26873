"""Times by the roofline: the article's sums on real GPUs, and the sums that a step is made of."""

import random

import pytest

from minillm import costs, roofline
from minillm.checkpoint.random_weights import CONFIGS
from minillm.devices import DEVICES, Device, by_gpu_name, find_device
from minillm.errors import ConfigError
from minillm.model_config import ModelConfig

LLAMA_7B = ModelConfig(32000, 4096, 11008, 32, 32, 32, 128)
A100 = find_device("A100-80GB")
SLOW = Device("slow", (8, 0), {"float16": 1000.0}, 10.0, 1e9, 4, 0, "made up: ridge at 100 FLOPs per byte")


def test_decode_at_batch_1_on_an_a100_can_use_0_65_percent_of_its_flops():
    assert A100.bandwidth / A100.peak() == pytest.approx(0.0065, abs=0.0001)
    assert roofline.roofline(LLAMA_7B, [(1, 512)], A100).bound == "memory"
    assert roofline.roofline(LLAMA_7B, [(2048, 2048)], A100).bound == "compute"
    step = [(1, 1)]
    seconds = roofline.roofline(LLAMA_7B, step, A100).seconds
    assert roofline.mfu(costs.step_flops(LLAMA_7B, step), seconds, A100) == pytest.approx(0.0065, rel=0.01)
    assert roofline.mbu(costs.step_bytes(LLAMA_7B, step), seconds, A100) == pytest.approx(1)


def test_30_percent_of_an_a100_needs_a_batch_of_about_46():
    assert 0.30 / (A100.bandwidth / A100.peak()) == pytest.approx(46, abs=1)
    step = [(1, 1)] * 46
    seconds = roofline.roofline(LLAMA_7B, step, A100).seconds
    assert roofline.mfu(costs.step_flops(LLAMA_7B, step), seconds, A100) == pytest.approx(0.30, abs=0.01)


@pytest.mark.parametrize(("n", "speedup"), [(512, 1.07), (2048, 1.27), (4096, 1.5), (8192, 2.0), (16384, 2.7)])
def test_flash_attention_end_to_end_in_a_7b_model_on_an_a100(n, speedup):
    """Each pass over the scores runs at 92% of the bandwidth, about what a plain elementwise kernel reaches."""
    flash = roofline.predict_ttft(LLAMA_7B, n, A100, memory_efficiency=0.92)
    naive = roofline.predict_ttft(LLAMA_7B, n, A100, memory_efficiency=0.92, naive=True)
    assert naive / flash == pytest.approx(speedup, rel=0.03)


def test_moving_an_embedded_prompt_over_pcie_takes_less_than_a_hundredth_of_its_prefill():
    """2,048 x 4,096 values of 2 bytes at 25 GB/s, against 136 ms: a 7B at two thirds of an A100's peak."""
    moved = 2048 * 4096 * 2
    assert moved == pytest.approx(16.8e6, rel=0.01)
    prefill_s = roofline.predict_ttft(LLAMA_7B, 2048, A100, compute_efficiency=2 / 3)
    assert prefill_s == pytest.approx(0.136, rel=0.03)
    assert moved / 25e9 < prefill_s / 100


@pytest.mark.parametrize(
    ("name", "ridge"),
    [("T4", 203), ("L4", 403), ("A100-40GB", 201), ("A100-80GB", 153), ("RTX3090", 76)]
    + [("RTX4090", 164), ("H100", 295), ("H200", 206), ("B200", 281)],
)
def test_ridge_points(name, ridge):
    assert DEVICES[name].ridge() == pytest.approx(ridge, abs=1)
    assert roofline.ridge_batch(DEVICES[name]) == pytest.approx(ridge, abs=1)


@pytest.mark.parametrize("device", DEVICES.values(), ids=lambda device: device.name)
def test_at_the_ridge_batch_a_matrix_takes_as_long_to_multiply_with_as_to_read(device):
    values = random.randrange(10**6, 10**9)
    for batch, bound in ((roofline.ridge_batch(device), "compute"), (roofline.ridge_batch(device) - 1, "memory")):
        matrix = costs.Operation("matrix", 2 * values * batch, weights=2 * values)
        assert roofline.operation_time(matrix, device).bound == bound


def test_a_step_takes_each_operation_at_its_own_roof_and_never_less_than_the_whole():
    config = CONFIGS["135m"]
    steps = [(64, 64), *[(1, random.randrange(1, 400)) for _ in range(20)]]
    by_hand = 0.003 + sum(max(op.flops / 1000, op.bytes / 10) for op in costs.operations(config, steps))
    assert roofline.step_seconds(config, steps, SLOW, overhead_s=0.003) == pytest.approx(by_hand)
    assert by_hand >= roofline.roofline(config, steps, SLOW).seconds
    halves = {"compute_efficiency": 0.5, "memory_efficiency": 0.5}
    assert roofline.step_seconds(config, steps, SLOW, **halves) == pytest.approx(2 * (by_hand - 0.003))
    assert roofline.step_seconds(config, [], SLOW, overhead_s=1.0) == 0


def test_fp8_halves_the_bytes_and_doubles_the_peak():
    config, h100 = CONFIGS["8b"], find_device("H100")
    for step in ([(1, 100)], [(4096, 4096)]):
        ratio = roofline.step_seconds(config, step, h100, "float8") / roofline.step_seconds(config, step, h100)
        assert ratio == pytest.approx(0.5, rel=0.01)


def test_ttft_in_one_step_in_chunks_and_behind_a_cached_beginning():
    config = CONFIGS["135m"]

    def step(n, context, sampled):
        return roofline.step_seconds(config, [(n, context)], SLOW, overhead_s=1.0, num_sampled=sampled)

    def ttft(**how):
        return roofline.predict_ttft(config, 1000, SLOW, overhead_s=1.0, **how)

    assert ttft() == pytest.approx(step(1000, 1000, 1))
    chunked = step(300, 300, 0) + step(300, 600, 0) + step(300, 900, 0) + step(100, 1000, 1)
    assert ttft(chunk=300) == pytest.approx(chunked)
    assert ttft(chunk=500) == pytest.approx(step(500, 500, 0) + step(500, 1000, 1))
    assert ttft(cached=900, chunk=64) == pytest.approx(step(64, 964, 0) + step(36, 1000, 1))
    for wrong in ({"cached": 1000}, {"cached": -1}, {"chunk": 0}):
        with pytest.raises(ConfigError, match="at least one must be computed"):
            ttft(**wrong)


def test_an_efficiency_is_a_share():
    for share in (0, -0.1, 1.5):
        with pytest.raises(ConfigError, match="not a share"):
            roofline.step_seconds(LLAMA_7B, [(1, 1)], A100, compute_efficiency=share)


def test_tiles_and_waves():
    assert roofline.attention_tiles(32, 2048) == 512
    assert roofline.attention_tiles(32, 2049) == 544
    assert roofline.waves(512, find_device("H100")) == 4
    assert roofline.busy(512, find_device("H100")) == pytest.approx(512 / 528)
    assert roofline.busy(264, find_device("H100")) == 1


# ---- devices -------------------------------------------------------------------------------------


def test_a_device_without_a_type_and_an_unknown_device_are_refused():
    with pytest.raises(ConfigError, match="T4.*bfloat16"):
        find_device("T4").peak("bfloat16")
    with pytest.raises(ConfigError, match="A100.*float8"):
        find_device("A100-80GB").peak("float8")
    with pytest.raises(ConfigError, match="T5.*T4"):
        find_device("T5")
    with pytest.raises(ConfigError, match="int3.*bfloat16"):
        roofline.size_of("int3")


def test_devices_are_found_in_any_case_and_bfloat16_runs_at_the_rate_of_float16():
    assert find_device("h100") is DEVICES["H100"]
    assert find_device("H100").peak("bfloat16") == find_device("H100").peak("float16") == 989e12


@pytest.mark.parametrize(
    ("driver", "row"),
    [("Tesla T4", "T4"), ("NVIDIA L4", "L4"), ("NVIDIA L40S", None), ("NVIDIA A100-SXM4-80GB", "A100-80GB")]
    + [("NVIDIA A100-PCIE-40GB", None), ("NVIDIA H100 80GB HBM3", "H100"), ("NVIDIA H100 PCIe", None)]
    + [("NVIDIA H200", "H200"), ("NVIDIA H200 NVL", None), ("NVIDIA B200", "B200")]
    + [("NVIDIA GeForce RTX 3090", "RTX3090"), ("NVIDIA GeForce RTX 3090 Ti", None)]
    + [("NVIDIA GeForce RTX 4090 Laptop GPU", None)],
)
def test_a_gpu_is_known_by_the_name_of_its_driver_or_not_at_all(driver, row):
    assert by_gpu_name(driver) is (DEVICES[row] if row else None)
