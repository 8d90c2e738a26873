"""The oracles of exercise 07 agree with the engine and with all orders there are; what its text says is so."""

import itertools
import os
import random
import re
import subprocess
import sys
from types import SimpleNamespace

import nbformat
import pytest
import torch

from minillm import LLM, SamplingParams
from minillm.block_pool import BlockPool
from minillm.course.build.addresses import ROOT
from minillm.course.checks.ex07 import TASKS as CHECKED
from minillm.course.checks.prefix_books import Books
from minillm.course.checks.prompt_order import work
from minillm.course.engine_so_far import waiting_prompts
from minillm.course.engine_so_far.waiting_prompts import BLOCK_SIZE, WaitingPrompts
from minillm.course.grader.feedback import try_here
from tests.grader.answers import define, solution_code
from tests.unit.engines import attention

MARGIN = 0.5  # logits between the chosen token and the next best one
OWN = {task.name: define(solution_code(task), task.name) for task in CHECKED}
EXERCISE = {cell.id: cell for cell in nbformat.read(ROOT / "solutions" / "ex07_prefix_cache.ipynb", 4).cells}
KEY, ORDER, POOL = CHECKED


def tree(r, size, count, vocabulary=500):
    """Prompts that share beginnings, some of them whole blocks, some equal."""
    blocks = [[r.randrange(vocabulary) for _ in range(size)] for _ in range(3)]
    return [
        sum(r.choices(blocks, k=r.randint(1, 3)), []) + blocks[0][: r.choice([0, 0, 1, size - 1])] for _ in range(count)
    ]


@pytest.mark.parametrize(
    "plan_prompts", [OWN["plan_prompts"], waiting_prompts.plan_prompts], ids=["solution", "reference"]
)
def test_no_order_of_all_computes_less_than_the_plan(plan_prompts, session_seed):
    r = random.Random(session_seed)
    for _ in range(60):
        size = r.randint(2, 3)
        *prompts, warm = tree(r, size, 6)
        warm = r.choice([warm, []])
        plan = plan_prompts([list(prompt) for prompt in prompts], list(warm), size)
        every = [
            sum(
                work(prompts[i], before, size)
                for i, before in zip(order, [warm, *(prompts[i] for i in order)], strict=False)
            )
            for order in itertools.permutations(range(len(prompts)))
        ]
        assert sum(computed for _, computed in plan) == min(every), (prompts, warm, size)


@pytest.mark.parametrize("own", [{}, OWN], ids=["reference", "solution"])
def test_plan_and_pool_count_what_the_engine_computes_and_the_order_changes_no_answer(tiny, session_seed, own):
    checkpoint, model = tiny
    r = random.Random(session_seed)
    llm = SimpleNamespace(
        engine=SimpleNamespace(model=model, tokenizer=checkpoint.tokenizer, attend=attention("naive"))
    )
    size = BLOCK_SIZE
    blocks = [[r.randrange(model.config.vocab_size) for _ in range(size)] for _ in range(3)]
    prompts = [sum(r.choices(blocks, k=3), []) + [r.randrange(model.config.vocab_size)] for _ in range(7)]
    queue = WaitingPrompts(llm, prompts, own)
    plan = queue.plan()
    came, planned = list(range(7)), [i for i, _ in plan]
    readings = {name: queue.read(order) for name, order in (("came", came), ("planned", planned))}
    assert [computed for _, computed in plan] == [computed for computed, _ in readings["planned"]]
    for name, order in (("came", came), ("planned", planned)):
        assert queue.by_your_pool(order) == ([computed for computed, _ in readings[name]] if own else None)
    tokens = [
        sorted(zip(order, (t for _, t in readings[name]), strict=True))
        for name, order in (("came", came), ("planned", planned))
    ]
    assert tokens[0] == tokens[1]
    assert queue.describe().startswith("yours hash_block, plan_prompts" if own else "yours nothing yet; reference hash")


class EnginesPool:
    """minillm's BlockPool behind the three calls of the exercise."""

    def __init__(self, num_blocks, size):
        self.pool, self.requests = BlockPool(num_blocks, size), {}

    def start(self, who, ids, room):
        pool = self.pool
        cached, key = pool.lookup(ids)
        num_new = pool.blocks_for(len(ids) + room) - len(cached)
        if num_new + sum(pool.ref_count(block) == 0 for block in cached) > pool.num_free:
            return None
        pool.take(cached)
        table, rows = cached + pool.allocate(num_new), len(cached) * pool.block_size
        given = {"token_ids": ids, "block_table": table, "prefix_key": key, "num_published_blocks": len(cached)}
        self.requests[who] = SimpleNamespace(**given, num_computed_tokens=rows)
        return rows

    def computed(self, who, ids, n):
        self.requests[who].num_computed_tokens = n
        self.pool.publish(self.requests[who])

    def end(self, who):
        self.pool.free(self.requests.pop(who).block_table)


class SolutionsPool:
    """The PrefixPool of the solution, which does not know names."""

    def __init__(self, num_blocks, size):
        self.pool, self.tables = OWN["PrefixPool"](num_blocks, size), {}

    def start(self, who, ids, room):
        answer = self.pool.start(list(ids), room)
        self.tables[who], found = answer or (None, None)
        return found

    def computed(self, who, ids, n):
        self.pool.computed(list(ids), self.tables[who], n)

    def end(self, who):
        self.pool.end(self.tables.pop(who))


def test_oracle_and_solution_find_and_refuse_what_the_engines_pool_does(session_seed):
    r = random.Random(session_seed)
    found = []
    for _ in range(40):
        size, num_blocks = r.randint(2, 4), r.randint(5, 9)
        pools = [kind(num_blocks, size) for kind in (EnginesPool, Books, SolutionsPool)]
        texts, running = tree(r, size, 5), []
        for who in map(str, range(40)):
            if running and r.random() < 0.5:
                over = running.pop(r.randrange(len(running)))
                for pool in pools:
                    pool.end(over)
            ids, room = r.choice(texts), r.randint(0, size)
            answers = [pool.start(who, ids, room) for pool in pools]
            assert answers == answers[:1] * 3, (size, num_blocks, ids)
            found.append(answers[0])
            if answers[0] is not None:
                running.append(who)
                n = r.choice([answers[0], (answers[0] + len(ids)) // 2, len(ids)])
                for pool in pools:
                    pool.computed(who, ids, n)
    assert None in found and 0 in found and max(filter(None, found)) > 0


@pytest.mark.parametrize("task", CHECKED, ids=lambda task: task.id)
@pytest.mark.parametrize(
    "answer",
    [None, 3, {}, "0, 1", (1, 2), [[0, 1.5]], [["a", 1]], ([0, "a"], 0), ([0], None), torch.zeros(2), 2**70, -1.0],
)
def test_an_answer_of_the_wrong_form_is_a_diagnosis(task, answer, session_seed):
    def wrong(*args, **kwargs):
        return answer

    parts = {"__init__": lambda *args: None, "start": wrong, "computed": wrong, "end": wrong}
    result = try_here(task, type("PrefixPool", (), parts) if task is POOL else wrong, session_seed)
    assert set(result.lost) == set(task.items) or (task is POOL and answer is None)
    assert all("judged" not in sentence for sentence in result.lost.values())


@pytest.mark.parametrize(
    "code", ["hash((parent, tokens))", "hash((parent, tuple(tokens)))", "(10 * parent + sum(tokens)) % 97"]
)
def test_the_lessons_one_line_keys_are_no_answer(code, session_seed):
    result = try_here(KEY, define(f"def hash_block(parent, tokens): return {code}", "hash_block"), session_seed)
    assert result.passed < len(KEY.items) and "64 bits" in result.lost


def test_the_watch_on_hash_leaves_a_learners_names_as_they_were(session_seed):
    own = define(
        "def hash(x):\n    return 7\n\n\ndef hash_block(parent, tokens):\n    return hash(tokens)", "hash_block"
    )
    try_here(KEY, own, session_seed)
    assert own.__globals__["hash"](0) == 7
    other = OWN["hash_block"]
    try_here(KEY, other, session_seed)
    assert "hash" not in other.__globals__


def test_the_key_is_the_same_in_another_process(session_seed):
    r = random.Random(session_seed)
    parent, tokens = r.getrandbits(64), tuple(r.choices(range(100_000), k=16))
    code = re.sub(r"^.*?import hashlib", "import hashlib", solution_code(KEY), flags=re.DOTALL)
    code = f"import hashlib\n{code[code.index('def hash_block') :]}\nprint(hash_block({parent}, {tokens}))"
    environment = {**os.environ, "PYTHONHASHSEED": "1"}
    printed = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert int(printed.stdout) == OWN["hash_block"](parent, tokens)


def test_the_header_counts_what_the_tasks_count():
    tasks = [EXERCISE[f"task-{k}"].source for k in (1, 2, 3)]
    minutes, points = ([int(re.search(rf"(\d+) {what}", text)[1]) for text in tasks] for what in ("minutes", "points"))
    assert points == [task.points for task in CHECKED]
    assert f"{sum(minutes)} minutes · 3 tasks, {sum(points)} points" in EXERCISE["title"].source


def test_the_first_tokens_are_clear_choices_so_that_no_order_flips_one():
    with LLM("smollm2-135m-instruct", dtype="float32", num_kv_blocks=32) as llm:
        source = EXERCISE["finale"].source.replace('LLM(dtype="float32")', "llm")
        exec(source.split("queue = ")[0], names := {"llm": llm})
        params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=2)
        order = [i for i, _ in waiting_prompts.plan_prompts(names["prompts"], [], BLOCK_SIZE)]
        outputs = [llm.generate(names["prompts"][i], params, use_tqdm=False)[0] for i in order]
    for output in outputs:
        best, second = sorted((entry.logprob for entry in output.outputs[0].logprobs[0].values()), reverse=True)[:2]
        assert best - second > MARGIN
    (printed,) = (o.text for o in EXERCISE["finale"].outputs if o.output_type == "stream")
    assert printed.count("counted like that by plan and pool: True") == 2 and "the same in both orders: True" in printed
