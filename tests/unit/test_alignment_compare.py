"""`minillm bench --compare alignment`: staircases that are made up are found, and the words follow the figures."""

import json
import random

import pytest

from minillm import LLM
from minillm.compare import Comparison
from minillm.compare_alignment import (
    COLUMNS,
    DECODING,
    LEDGER,
    NEW_TOKENS,
    PROMPTS,
    TILE,
    Served,
    compare,
    engine_note,
    engine_row,
    fit_note,
    jump_note,
    prompt_len,
    published_note,
    serve,
)
from minillm.errors import ConfigError
from minillm.staircase import EDGES, LENGTHS, PUBLISHED_MS, filled, jumps, layer_products, unexplained
from tests.unit.command import minillm


def stairs(tile, start=1.0, per_row=0.01, noise=0.0):
    """{length: seconds} on a staircase, tile 1 a slope."""
    return {n: start + per_row * filled(n, tile) + noise * random.uniform(-1, 1) for n in LENGTHS}


# ---- what shows ------------------------------------------------------------------------------------


def test_a_tile_that_is_begun_is_filled():
    assert [filled(n, 128) for n in (1, 128, 129, 256, 257)] == [128, 128, 256, 256, 384]
    assert filled(257, 1) == 257


@pytest.mark.parametrize("tile", [1, 16, 32, 64, 128])
def test_the_tile_of_a_noisy_staircase_is_found(tile):
    left = unexplained(stairs(tile, noise=0.02))
    assert min(left, key=left.get) == tile or tile == 1
    others = "no staircase shows" if tile == 1 else f"tiles of {tile} rows show"
    assert fit_note(left).startswith(others)


def test_without_noise_nothing_is_left_unexplained():
    left = unexplained(stairs(64))
    assert left[64] == pytest.approx(0, abs=1e-12) and left[1] > 0.01 and left[128] > 0.01


def test_the_lengths_stand_on_every_edge_and_on_both_of_its_sides():
    assert {96, 97, 104, 127 + 1, 129, 256, 257, 288} <= set(LENGTHS)
    assert set(PUBLISHED_MS) <= set(LENGTHS)
    assert all(edge + 1 in LENGTHS for edge in EDGES[:-1])


def test_one_row_more_costs_a_tile_at_its_edge_and_nothing_elsewhere():
    times = stairs(128, start=0.0)
    found = jumps(lambda n, m: times[n] / times[m])
    assert found[128] == pytest.approx(1.75)  # 2.0 behind 128, 1.5 behind 256
    assert found[64] == found[32] == found[16] == 1.0
    times = stairs(32, start=0.0)
    found = jumps(lambda n, m: times[n] / times[m])
    assert found[16] == 1.0 and min(found[32], found[64], found[128]) > 1.1


# ---- words -----------------------------------------------------------------------------------------


def test_the_published_figure_stands_beside_ours():
    layer = {128: [1.0, 2.0], 256: [3.0, 6.0], 257: [3.0, 9.0]}
    words = published_note(layer, {128: [1.0], 256: [1.5]})
    assert "55.0, 69.8 and 92.3 ms" in words and "x1.27 for twice the tokens, x1.32 for one more" in words
    assert words.endswith("here a layer x3.00 and x1.25")  # a step that did not reach 257 is left out


def test_jumps_are_told_by_tile():
    words = jump_note({n: [seconds] for n, seconds in stairs(128, start=0.0).items()})
    assert "x1.75 behind multiples of 128, x1.00 behind multiples of 64" in words


def test_the_engines_are_compared_round_by_round():
    planned = [Served(94, 0.2, 0.10, 100.0), Served(94, 0.4, 0.10, 100.0)]
    aligned = [Served(82, 0.1, 0.05, 150.0), Served(82, 0.3, 0.20, 110.0)]
    words = engine_note({"as planned": planned, "multiples": aligned})
    assert "82 tiles instead of 94" in words
    assert "TTFT x0.62 (0.50 to 0.75), longest gap x1.25 (0.50 to 2.00), throughput x1.30 (1.10 to 1.50)" in words
    row = engine_row("multiples", aligned, planned)
    assert row["tiles"] == 82 and row["predicted x"] == pytest.approx(82 / 94)
    assert row["TTFT ms"] == pytest.approx(200) and row["tok/s"] == 130.0 and row["layer ms"] is None


# ---- an engine -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llm():
    with LLM("random:tiny", dtype="float32", kv_cache_memory_bytes=2**25) as llm:
        yield llm


def test_products_are_those_of_a_layer(llm):
    rows, layer = [], llm.engine.model.layers[1]
    spied = {name: getattr(layer, name) for name in ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")}

    def spy(product):
        return lambda x: rows.append(tuple(x.shape)) or product(x)

    try:
        for name, product in spied.items():
            setattr(layer, name, spy(product))
        layer_products(llm.engine.model, 17)()
    finally:
        for name, product in spied.items():
            setattr(layer, name, product)
    assert rows == [(17, 64), (17, 64), (17, 64), (17, 128)]


def test_both_engines_compute_the_same_tokens_in_fewer_tiles_and_leave_everything_as_it_was(llm):
    own, computed, make_batch = llm.engine.scheduler, {}, llm.engine.make_batch
    for multiple in (None, TILE):
        rows = []
        llm.engine.make_batch = lambda step, *where, rows=rows: rows.append(step.num_tokens) or make_batch(step, *where)
        try:
            served = serve(llm, multiple)
        finally:
            llm.engine.make_batch = make_batch
        assert served.tiles == sum(-(-n // TILE) for n in rows)
        assert 0 < served.ttft_s and 0 < served.gap_s and 0 < served.tokens_per_s
        computed[multiple] = served.tiles, sum(rows)
    assert computed[TILE][0] <= computed[None][0] - PROMPTS  # each prompt saves a tile at least
    assert computed[TILE][1] == computed[None][1] == DECODING * (16 + NEW_TOKENS - 1) + PROMPTS * prompt_len(llm)
    assert llm.engine.scheduler is own and not llm.engine.has_work
    assert own.block_pool.num_free == own.block_pool.num_blocks


def test_an_error_in_a_run_gives_the_engine_back(llm):
    own, model = llm.engine.scheduler, llm.engine.model
    llm.engine.model = None
    try:
        with pytest.raises(AttributeError):
            serve(llm, None)
    finally:
        llm.engine.model = model
    assert llm.engine.scheduler is own and not llm.engine.has_work
    assert own.block_pool.num_free == own.block_pool.num_blocks


def test_a_model_in_parts_on_several_ranks_is_refused(llm, monkeypatch):
    monkeypatch.setattr(llm.engine, "model", object())
    with pytest.raises(ConfigError, match="on one rank"):
        compare(llm)


def test_the_command_prints_rows_notes_and_the_ledger():
    done = minillm("bench", "--compare", "alignment", "--quick", "--model", "random:tiny", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    names = [row["name"] for row in result["rows"]]
    assert names == ["128 tokens", "256 tokens", "257 tokens", "as planned", f"multiples of {TILE}"]
    assert [row["tiles"] for row in result["rows"][:3]] == [1, 2, 3]
    for row in result["rows"]:
        assert set(row) == {"name", *COLUMNS}
    assert result["rows"][0]["layer x"] == result["rows"][0]["step x"] == 1.0
    assert len(result["notes"]) == 4 and set(result["ledger"]) == {
        "invariant",
        "wins where",
        "loses where",
        "could mislead",
    }


def test_the_table_shows_dashes_where_a_column_has_no_meaning():
    row = engine_row("x", [Served(1, 0.1, 0.1, 1.0)], [Served(1, 0.1, 0.1, 1.0)])
    lines = Comparison("alignment", {}, COLUMNS, [row], [], LEDGER).lines()
    assert any(line.split() == ["x", "1", "1.00", "-", "-", "-", "-", "100", "100", "1"] for line in lines)
