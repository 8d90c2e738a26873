"""Lesson 07 says what is true: keys by hand, hits, margins; its prefix table serves the engine and is never wrong."""

import contextlib
import io
import random
import re

import nbformat
import pytest
import torch

from minillm import LLM, SamplingParams
from minillm.course import plug
from minillm.course.build.addresses import ROOT
from minillm.course.engine_so_far import STAGES, boot
from minillm.course.gauges import requests_that_fit
from minillm.errors import GradeError
from minillm.request import Request

MARGIN = 0.5  # logits between the chosen token and the next best one
LESSON = nbformat.read(ROOT / "notebooks" / "07_prefix_cache.ipynb", as_version=4)
CELLS = {cell.id: cell for cell in LESSON.cells}
PROSE = " ".join(" ".join(cell.source.split()) for cell in LESSON.cells if cell.cell_type == "markdown")
ONE = SamplingParams(temperature=0, max_tokens=1)


def said(cell):
    return "".join(o.get("text", "") for o in CELLS[cell].outputs if o.output_type == "stream")


def names_of(*cells):
    names = {"random": random}
    with contextlib.redirect_stdout(io.StringIO()):
        for cell in cells:
            exec(compile(CELLS[cell].source, cell, "exec"), names)
    return names


PrefixTable = names_of("table")["PrefixTable"]


@pytest.fixture(scope="module")
def small():
    with LLM("smollm2-135m-instruct", dtype="float32", num_kv_blocks=32) as llm:
        yield llm


@pytest.fixture(scope="module")
def tiny():
    with LLM("random:tiny", dtype="float32", num_kv_blocks=64) as llm:
        yield llm


# ---- the table -----------------------------------------------------------------------------------


def test_the_new_part_has_at_most_forty_lines():
    source = CELLS["table"].source
    assert len([line for line in source[source.index("class") :].splitlines() if line.strip()]) <= 40


def test_the_keys_on_paper_are_those_of_the_code():
    by_hand = names_of("by-hand")["by_hand"]
    assert [by_hand(0, (7, 1, 4, 2)), by_hand(14, (5, 5, 3, 1)), by_hand(57, (8, 6, 6, 1))] == [14, 57, 9]
    assert [by_hand(0, (3, 3, 1, 1)), by_hand(8, (5, 5, 3, 1))] == [8, 94]
    for words in ("**14**", "140 + 14 = 154, which is **57**", "570 + 21 = 591, which is **9**", "80 + 14 = **94**"):
        assert words in PROSE
    assert said("by-hand") == "A [14, 57]\nB [14, 57, 9]\nC [8, 94]\nD [14, 57]\n"


@pytest.mark.parametrize("hash_block", [lambda parent, tokens: hash((parent, tokens)), lambda parent, tokens: 7])
def test_the_table_finds_all_that_is_kept_and_nothing_wrong(hash_block):
    """A stream of requests through a small pool; the oracle is a dictionary of whole texts."""
    exact = hash_block(0, (1,)) != hash_block(0, (2,))
    pool = plug.prefix_table(PrefixTable)(12, 2, hash_block)
    block_of, holds = {}, {}  # text up to a block's end -> block, and block -> that text
    hits = 0
    for _ in range(300):
        ids = [random.randrange(2) for _ in range(random.randint(1, 11))]
        kept = [block_of.get(tuple(ids[:end])) for end in range(2, len(ids), 2)]
        expected = kept[: kept.index(None)] if None in kept else kept
        found, _ = pool.lookup(ids)
        assert found == expected if exact else len(found) <= 1
        assert all(holds[block] == ids[: 2 * i + 2] for i, block in enumerate(found))
        pool.take(found)
        own = pool.allocate(pool.blocks_for(len(ids)) - len(found))
        block_of = {text: block for text, block in block_of.items() if block not in own}
        table = found + own
        pool.publish(Request("", ids, ONE, block_table=table, num_computed_tokens=len(ids)))
        pool.free(table)
        for end in range(2, len(ids) + 1, 2):
            block_of.setdefault(tuple(ids[:end]), table[end // 2 - 1])
            holds[table[end // 2 - 1]] = ids[:end]
        hits += len(found)
    assert hits > 10


def test_a_table_that_answers_nonsense_is_refused_by_name():
    def answers(blocks):
        class Table:
            def __init__(self, size, hash_block):
                pass

            def find(self, ids):
                return blocks

        return plug.prefix_table(Table)(4, 2)

    for blocks, reason in (((0,), "list of blocks"), ([4], "0 to 3"), ([0, 1], "at most 1"), ([True, 1], "at most 1")):
        with pytest.raises(GradeError, match=reason):
            answers(blocks).lookup([1, 2, 3, 4])
    with pytest.raises(GradeError, match="different"):
        answers([1, 1]).lookup([1] * 9)


def test_version_4_with_the_table_says_what_the_engine_says_and_finds_what_it_should(tiny, session_seed):
    rng = random.Random(session_seed)
    vocabulary = tiny.engine.model.config.vocab_size
    head = [rng.randrange(vocabulary) for _ in range(48)]
    prompts = [head + [rng.randrange(vocabulary) for _ in range(n)] for n in (1, 16, 17)] + [head, head[:20]]
    v4 = boot(tiny, "v4", also={"prefix_table": PrefixTable})
    table, found = v4.parts["prefix_table"], []
    for ids in prompts:
        before = table.blocks_found
        tiny.reset_prefix_cache()
        (cold,) = tiny.generate(ids, SamplingParams(temperature=0, max_tokens=6, ignore_eos=True), use_tqdm=False)
        assert v4.generate(ids, 6) == cold.outputs[0].token_ids
        found.append(table.blocks_found - before)
    assert found == [0, 3, 3, 2, 1] and "yours prefix_table" in v4.describe()
    v4.machine.engine.scheduler.block_pool.reset_prefix_cache()
    before = table.blocks_found
    v4.generate(head, 1)
    assert table.blocks_found == before


def test_sampling_is_no_part_of_a_key(tiny):
    ids = [random.randrange(90) for _ in range(40)]
    tiny.reset_prefix_cache()
    tiny.generate(ids, ONE, use_tqdm=False)
    warm = SamplingParams(temperature=1.3, top_p=0.8, max_tokens=1)
    assert tiny.generate(ids, warm, use_tqdm=False)[0].num_cached_tokens == 32
    assert "Sampling does not enter" in PROSE


# ---- texts ---------------------------------------------------------------------------------------


def test_no_printed_text_hangs_on_a_close_call(small):
    """Every greedy step of the lesson is far from a tie, also the one with the block from elsewhere."""
    names = names_of("table") | {"torch": torch}
    source = CELLS["model"].source.replace('LLM(dtype="float32")', "given")
    names["given"] = small
    for cell in (source, CELLS["licence"].source):
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(cell, "cell", "exec"), names)
    assert printed.getvalue() == said("licence")
    read, gaps = names["read"], []

    def watched(*inputs):
        logits = read(*inputs)
        best = logits.topk(2).values
        gaps.append(float(best[0] - best[1]))
        return logits

    names["read"] = watched
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(CELLS["foreign"].source, "foreign", "exec"), names)
    assert printed.getvalue() == said("foreign") and min(gaps) > MARGIN and len(gaps) == 6
    assert said("foreign").count("Rome.") == 2 and said("foreign").count("Paris.") == 1

    tokenizer, messages = small.tokenizer, [{"role": "system", "content": "Answer in one sentence."}]
    for question in re.findall(r'"([^"]+\?)"', CELLS["version-4"].source):
        messages.append({"role": "user", "content": question})
        ids = tokenizer.encode(tokenizer.apply_chat_template(messages), add_special_tokens=False)
        logprobs = SamplingParams(temperature=0, max_tokens=8, logprobs=2)
        (answer,) = small.generate(ids, logprobs, use_tqdm=False)[0].outputs
        for entry in answer.logprobs:
            best, second = sorted((e.logprob for e in entry.values()), reverse=True)[:2]
            assert best - second > MARGIN
        assert f"{len(ids)} prompt tokens, " in said("version-4") and f"found: {answer.text!r}" in said("version-4")
        messages.append({"role": "assistant", "content": answer.text})
    assert re.findall(r"(\d+) found", said("version-4")) == ["0", "32"] and "32 tokens were found" in PROSE


# ---- counts --------------------------------------------------------------------------------------


def test_the_counts_of_the_measured_cells_are_whole_blocks_of_what_is_shared(small):
    lengths, found = (list(map(int, re.findall(r"\d+", part))) for part in re.findall(r"\[(.*?)\]", said("chat")))
    assert found[0] == 0 and all(n % 16 == 0 for n in found)
    assert all(n <= before < length for n, before, length in zip(found[1:], lengths, lengths[1:], strict=False))
    counts = re.findall(r"(\d+) of (\d+) found", said("tree"))
    assert counts == [("160", "162"), ("160", "162"), ("144", "161"), ("144", "161")]
    kept = 6 + 4 + 3 + 2  # rules, two sets of examples, the last block of each of the opposites
    full = sum(int(length) // 16 for _, length in counts)
    assert said("tree").startswith(f"prefix_tree: 4 prompts, {full} full blocks of 16 tokens, {kept} kept\n")
    for size, shared in ((1, 200), (16, 192), (64, 192), (256, 0)):
        assert said("claims").count(f"{shared} for {size}") == 2


def test_the_visitors_find_what_a_list_of_the_least_recently_freed_leaves_them():
    """A plain list as the oracle: each visitor's 8 full blocks and a tail, freed from the tail."""

    def share(visitors, rounds=6):
        free, found = [("nobody", i) for i in range(64)], 0
        for number in range(visitors * rounds):
            mine = [(number % visitors, part) for part in range(8)]
            hits = 0
            while hits < 8 and mine[hits] in free:
                hits += 1
            free = [block for block in free if block not in mine[:hits]]
            free = free[9 - hits :] + [("tail", number), *reversed(mine)]
            found += hits * (number >= visitors)
        return found / (8 * visitors * (rounds - 1))

    shares = dict(re.findall(r"^ *(\d+) visitors.*?: (\d+)% found", said("pressure"), re.MULTILINE))
    assert shares == {str(v): f"{100 * share(v):.0f}" for v in (6, 7, 8, 9, 12)}


def test_the_pool_of_six_blocks_went_as_the_text_says():
    lines = said("pool").splitlines()
    assert lines[0] == "A comes, finds nothing, takes [0, 1, 2]  users 1 1 1 0 0 0"
    assert "takes [5, 2, 4]" in lines[4] and "C took what had been free longest: block 5" in PROSE
    assert "finds [0, 1], takes [3]" in lines[5] and "block 3, the third one of B" in PROSE
    assert "finds [0, 1], takes [4, 2]" in lines[7] and "B finds two blocks at the end" in PROSE


def test_equalities_were_printed_as_true_and_gauges_as_counted():
    assert said("equal").count("nothing wrong: True") == 3 and "chained : as much as the loop finds in 300" in said(
        "equal"
    )
    fit = {stage.key: requests_that_fit(stage) for stage in STAGES[2:4]}
    assert re.search(rf"requests that fit +{fit['v3']} -> +{fit['v4']}  better", said("gauges"))
    assert 1.7 < fit["v4"] / fit["v3"] < 2 and "nearly twice as many fit" in PROSE
    for cell in ("chat", "measure", "guess", "gauges", "pressure"):
        for line in said(cell).splitlines():
            assert line.startswith("~ ") or not re.search(r"\d\s?(ms|s|us)\b", line), line
