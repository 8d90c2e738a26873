"""The six gauges against sums by hand and a clock that is told the time; all six are always printed."""

import random

import pytest

from minillm import LLM
from minillm.checkpoint import load
from minillm.costs import NAIVE_PASSES, kv_bytes_per_token, layer_parameters
from minillm.course import gauges
from minillm.course.engine_so_far import STAGES, boot
from minillm.course.gauges import NAMES, Gauges, bytes_moved, percentile, requests_that_fit, serve

BY_KEY = {stage.key: stage for stage in STAGES}


class Machine:
    """One token per step for the oldest request; each step takes `seconds`."""

    def __init__(self, seconds):
        self.seconds, self.now, self.queue, self.added = seconds, 0.0, [], []

    @property
    def has_work(self):
        return bool(self.queue)

    def add(self, ids, max_tokens):
        self.queue.append([len(self.added), max_tokens])
        self.added.append(self.now)
        return len(self.added) - 1

    def step(self):
        self.now += self.seconds
        first = self.queue[0]
        first[1] -= 1
        if not first[1]:
            self.queue.pop(0)
        return [(first[0], 7)]


def test_serve_notes_when_each_request_came_and_when_each_token_left():
    machine = Machine(2.0)
    served = serve(machine, [[1], [2], [3]], [4, 1, 2], [0, 0, 3], clock=lambda: machine.now)
    assert served == [(0.0, [2.0, 4.0, 6.0, 8.0]), (0.0, [10.0]), (6.0, [12.0, 14.0])]


def test_a_request_that_comes_after_the_last_token_of_the_first_still_comes():
    machine = Machine(1.0)
    assert serve(machine, [[1], [2]], [2, 1], [0, 2], clock=lambda: machine.now) == [(0, [1, 2]), (2, [3])]


@pytest.mark.parametrize("count", [1, 4, 100, 200])
def test_the_percentile_is_a_value_that_was_measured(count):
    values = [random.random() for _ in range(count)]
    found = percentile(values, 99)
    assert found in values
    assert sum(v <= found for v in values) >= 0.99 * count > sum(v < found for v in values)


def test_requests_that_fit_are_those_of_the_sums():
    rng = random.Random(2)
    [rng.randrange(1000) for _ in range(256)]
    lengths = []
    for _ in range(768):
        length = rng.randint(32, 512)
        [rng.randrange(1000) for _ in range(length)]
        lengths.append(length)
    blocks = 6 * 2048 // 16

    def until_full(blocks_of, total=0):
        count = 0
        for length in lengths:
            total += blocks_of(length)
            if total > blocks:
                return count
            count += 1

    paged = until_full(lambda n: -(-(256 + n) // 16))
    shared = until_full(lambda n: -(-n // 16), total=16)  # the rules' 16 blocks are there once
    found = {key: requests_that_fit(stage) for key, stage in BY_KEY.items()}
    assert (found["v1"], found["v2"], found["v3"], found["v4"]) == (0, 6, paged, shared)
    assert {found[key] for key in ("v5", "v6", "v7", "v8")} == {found["v4"]}


def test_bytes_moved_are_those_of_the_sums():
    c = load("smollm2-135m-instruct").config
    weights = 4 * (layer_parameters(c) * c.num_hidden_layers + c.hidden_size * c.vocab_size)
    kv = kv_bytes_per_token(c, 4)
    cached = 64 * weights + kv * (2 * 512 + sum(n + 1 for n in range(513, 576)))
    assert bytes_moved(BY_KEY["v5"], c) == cached
    of_pairs = NAIVE_PASSES * c.num_hidden_layers * c.num_attention_heads * 4
    assert bytes_moved(BY_KEY["v4"], c) == cached + of_pairs * (512**2 + sum(range(513, 576)))
    again = 64 * weights + sum(2 * kv * n + of_pairs * n**2 for n in range(512, 576))
    assert bytes_moved(BY_KEY["v1"], c) == again
    of_layers = 4 * layer_parameters(c) * c.num_hidden_layers
    assert bytes_moved(BY_KEY["v8"], c) == cached + 7 * of_layers + kv * sum(range(64, 512, 64))


def test_measuring_fills_all_six_on_any_stage():
    with LLM("random:tiny", dtype="float32") as llm:
        for stage in ("v1", "v2", "v8"):
            found = gauges.measure(boot(llm, stage, {}), llm.engine.model.config)
            assert min(found.ttft_s, found.tpot_s, found.longest_gap_s, found.p99_ttft_s, found.bytes_moved) > 0


OLD = Gauges(0.4, 0.2, 1.0, 2.0, 6, 2_000_000_000)
NEW = Gauges(0.41, 0.05, 3.0, 2.0, 22, 3_000_000_000)


def test_all_six_are_printed_and_only_measured_lines_are_marked(capsys):
    gauges.show(NEW, OLD, moves="tpot_s")
    lines = capsys.readouterr().out.splitlines()
    assert [line.removeprefix("~ ").split("  ")[0] for line in lines] == list(NAMES.values())
    assert [line.startswith("~ ") for line in lines] == [True] * 4 + [False] * 2
    words = [line.split() for line in lines]
    assert words[0][-1] == "same" and words[3][-1] == "same"
    assert "better 4x" in lines[1] and lines[1].endswith("<- this lesson")
    assert lines[2].endswith("worse 3x") and lines[4].endswith("better 3.67x") and lines[5].endswith("worse 1.5x")
    assert sum("<- this lesson" in line for line in lines) == 1


def test_without_a_before_the_values_stand_alone(capsys):
    gauges.show(NEW)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["~", "TTFT", "of", "one", "request", "410", "ms"]
    assert lines[4].split() == ["requests", "that", "fit", "22"] and lines[5].split() == ["bytes", "moved", "3.0", "GB"]
