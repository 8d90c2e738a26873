"""What the compiler says about the kernels, for GPUs that are not here. The whole table: test_triton_versions.py."""

import json
from pathlib import Path

import pytest

from minillm.devices import shared_memory_limit
from minillm.errors import ConfigError
from minillm.kernels.compile import CAPABILITIES, KERNELS, compile_row, expected_instruction, table
from minillm.kernels.launch import find_row
from minillm.kernels.report import lines, problems, select
from tests.kernels.compile_checks import (
    ATTENTION,
    HALF,
    ROOT,
    all_broken_promises,
    broken_promises,
    compile_report,
    narrow_products,
)

JSON_KEYS = """kernel compute_capability head_size dtype phase block_m block_n num_warps num_stages registers
spill_bytes shared_bytes shared_limit mma wgmma tcgen05 async_copies""".split()
SUBSET = ["dtype=bfloat16", "head_size=0", "head_size=128"] + [
    f"compute_capability={x}" for x in ("8.0", "9.0", "10.0")
]


@pytest.fixture(scope="module")
def dump(tmp_path_factory):
    return tmp_path_factory.mktemp("ir")


@pytest.fixture(scope="module")
def report(dump):
    """Head size 128 and the kernels without heads, in bfloat16 on three generations of GPUs."""
    return compile_report(*SUBSET, dump=dump)


# ---- what was compiled -----------------------------------------------------------------------


def test_rows_fit_do_not_spill_and_use_the_stated_matrix_instruction(report):
    assert all_broken_promises(report) == []
    instructions = {row["expected"] for row in report["rows"]}
    assert instructions == {"none", "mma", "wgmma", "tcgen05"}


def test_the_json_has_the_promised_keys(report):
    assert set(report) == {"versions", "rows"} and set(report["versions"]) == {"triton", "ptxas", "ptxas_blackwell"}
    for row in report["rows"]:
        assert set(JSON_KEYS) | {"expected"} == set(row)
        assert 0 < row["registers"] <= 255 and row["num_warps"] * 32 * row["registers"] <= 65536
    assert {row["kernel"] for row in report["rows"]} == set(KERNELS)


def test_prefill_copies_ahead_of_the_products_where_the_gpu_can(report):
    """cp.async on 8.x and later: without it each tile of keys is waited for."""
    for row in report["rows"]:
        if row["phase"] == "prefill":
            assert row["async_copies"] > 0, row


def test_addresses_are_computed_in_64_bits(report, dump):
    """A slot or a row times a stride passes 2^31 in a long context's cache."""
    texts = {path.name: path.read_text(encoding="utf-8") for path in dump.glob("*.ttir")}
    assert len(texts) == len({tuple(row[key] for key in JSON_KEYS[:5]) for row in report["rows"]})
    for name, ttir in texts.items():
        assert narrow_products(ttir) == [], name
        assert any(kind in ttir for kind in ("xi64>", ": i64")), name


@pytest.mark.parametrize(
    "product, narrow",
    [
        ("%1 = arith.muli %0, %k_row_stride : i32", True),
        ("%c = tt.splat %k_row_stride : i32 -> tensor<8xi32>\n%1 = arith.muli %0, %c : tensor<8xi32>", True),
        ("%w = arith.extsi %k_row_stride : i32 to i64\n%1 = arith.muli %0, %w : i64", False),
        ("%c64_i32 = arith.constant 64 : i32\n%1 = arith.muli %c64_i32, %k_row_stride : i32", False),
        ("%1 = arith.muli %0, %num_keys : i32", False),
    ],
)
def test_the_search_for_narrow_products_finds_them(product, narrow):
    ttir = f"tt.func public @kernel(%k_ptr: !tt.ptr<f16>, %k_row_stride: i32, %num_keys: i32) {{\n{product}\n}}"
    assert bool(narrow_products(ttir)) == narrow


# ---- which rows there are --------------------------------------------------------------------


def test_every_kernel_has_rows_for_every_gpu_of_the_report():
    rows = table()
    assert len(rows) == len(set(rows))
    for capability in CAPABILITIES[1:]:
        for name in ATTENTION:
            sizes = {row.head_size for row in rows if (row.kernel, row.compute_capability) == (name, capability)}
            assert {64, 128, 256} <= sizes
    phases = {row.phase for row in rows if row.kernel == "paged_attention"}
    assert {"prefill", "decode"} <= phases


def test_7_5_has_float16_rows_up_to_a_head_size_of_128():
    rows = [row for row in table() if row.compute_capability == (7, 5)]
    assert {row.dtype for row in rows} == {"float16"}
    for name in ATTENTION:
        launches = {(row.head_size, row.phase) for row in rows if row.kernel == name}
        assert {(64, "prefill"), (128, "prefill")} <= launches
        assert max(head_size for head_size, _ in launches) == 128
    assert len(table()) <= 160


def test_fp8_keys_need_compute_capability_8_9():
    assert all(row.compute_capability >= (8, 9) for row in table() if row.dtype.startswith("float8"))
    for capability in ((7, 5), (8, 0), (8, 6)):
        with pytest.raises(ConfigError, match="float8_e4m3fn"):
            find_row("paged_attention", capability, 128, "float8_e4m3fn", "decode")
    assert find_row("paged_attention", (8, 9), 128, "float8_e4m3fn", "decode").dtype == "float8_e4m3fn"


def test_the_expected_instruction_grows_with_the_gpu():
    stated = {
        row.compute_capability: expected_instruction(row)
        for row in table()
        if row.kernel == "flash" and row.head_size == 128 and row.dtype in HALF
    }
    assert {(8, 0): "mma", (8, 9): "mma", (9, 0): "wgmma", (10, 0): "tcgen05"}.items() <= stated.items()
    decodes = [row for row in table() if row.phase == "decode" and row.compute_capability >= (8, 0)]
    assert {expected_instruction(row) for row in decodes if row.dtype != "float32"} == {"mma"}
    assert {expected_instruction(row) for row in table() if row.phase == "pointwise"} == {"none"}


def test_shared_memory_limits_are_the_smallest_of_each_compute_capability():
    limits = {(7, 5): 65_536, (8, 0): 166_912, (8, 9): 101_376, (9, 0): 232_448, (10, 0): 232_448}
    assert {capability: shared_memory_limit(capability) for capability in CAPABILITIES} == limits


def test_the_committed_report_is_that_of_the_table():
    """Otherwise: python -m minillm kernels --json > benchmarks/results/compile_report.json"""
    committed = json.loads(Path(ROOT, "benchmarks/results/compile_report.json").read_text(encoding="utf-8"))
    fields = JSON_KEYS[: JSON_KEYS.index("registers")]
    expected = [tuple(str(value) for value in launch(row)) for row in table()]
    assert [tuple(str(row[field]) for field in fields) for row in committed["rows"]] == expected
    assert all_broken_promises(committed) == []


def launch(row):
    """The fields of a row as the report has them."""
    major, minor = row.compute_capability
    return (
        row.kernel,
        f"{major}.{minor}",
        *(getattr(row, field) for field in JSON_KEYS[2 : JSON_KEYS.index("registers")]),
    )


# ---- the command -----------------------------------------------------------------------------


def test_rows_are_selected_by_field_and_value():
    rows = table()
    some = select(rows, ["kernel=flash", "head_size=64", "head_size=128", "compute_capability=9.0"])
    assert some == [
        row for row in rows if row.kernel == "flash" and row.head_size in (64, 128) and row.compute_capability == (9, 0)
    ]
    assert select(rows, []) == rows


@pytest.mark.parametrize("condition", ["size=3", "head_size", "reason=x", "head_size=63", "kernel=sort"])
def test_a_condition_that_no_row_can_meet_is_refused(condition):
    with pytest.raises(ConfigError, match="head_size|kernel"):
        select(table(), [condition])


def test_an_interpreted_kernel_is_not_compiled():
    with pytest.raises(ConfigError, match="TRITON_INTERPRET"):
        compile_row(table()[-1])


def test_the_printed_table_names_what_is_wrong(report):
    text = list(lines(report))
    assert len(text) == 2 + len(report["rows"])
    assert not any("NO " in line or "DOES NOT FIT" in line for line in text[2:])
    row = next(row for row in report["rows"] if row["expected"] == "wgmma")
    bad = row | {"wgmma": 0, "mma": 4, "shared_bytes": row["shared_limit"] + 1}
    assert problems(bad) == ["DOES NOT FIT", "NO wgmma"]
    assert len(broken_promises(bad)) == 3


@pytest.mark.parametrize(
    "change, sentence",
    [({"spill_bytes": 4}, "spills"), ({"block_n": 32}, "64x64"), ({"shared_bytes": 10**6}, "shared memory")],
)
def test_the_checks_of_this_file_can_fail(report, change, sentence):
    row = next(row for row in report["rows"] if row["kernel"] == "flash")
    assert broken_promises(row) == []
    assert sentence in " ".join(broken_promises(row | change))
