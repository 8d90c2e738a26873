"""The simulator: sums checked by hand, the cost model by the roofline, the loop by the real engine's own steps."""

import json
import random
import statistics
import subprocess
import sys
from itertools import pairwise

import pytest

from minillm.config import EngineConfig
from minillm.devices import DEVICES, find_device
from minillm.errors import ConfigError
from minillm.estimate import shape_of
from minillm.model_config import ModelConfig
from minillm.option_words import SCHEDULING_POLICIES
from minillm.request import Request
from minillm.roofline import step_seconds
from minillm.sampling_params import SamplingParams
from minillm.simulator import (
    SLO,
    Arrival,
    FittedStepTime,
    RooflineStepTime,
    bursts,
    conversations,
    kv_blocks,
    make_simulated_scheduler,
    poisson,
    read_trace,
    shared_prompt,
    simulate,
    summarize,
    write_trace,
)
from minillm.simulator.replay import Event
from minillm.simulator.tokens import NamedTokens
from tests.unit.engines import MAX_LEN, make_engine, random_prompts
from tests.unit.fake_engine import FakeEngine

SMALL = shape_of("8b")


def one_second(sequences, num_sampled):
    return 1.0


def run(trace, policy="chunked", step_time=one_second, num_blocks=1000, keep_events=False, **options):
    options = {"max_num_batched_tokens": 64, "block_size": 4, "max_model_len": 64, **options}
    config = EngineConfig(scheduling_policy=policy, **options)
    scheduler = make_simulated_scheduler(SMALL, config, num_blocks)
    result = simulate(trace, scheduler, step_time, keep_events)
    scheduler.block_pool.check([])
    assert scheduler.block_pool.num_free == num_blocks
    return result


# ---- the loop ------------------------------------------------------------------------------------


def test_two_requests_worked_out_by_hand():
    """Each step takes a second; b arrives in the middle of a's first step and waits for the next one."""
    result = run([Arrival(10.0, 20, 3), Arrival(10.5, 70, 2)], keep_events=True, max_model_len=100)
    a, b = result.records
    assert (a.ttft_s, list(a.itl_s), a.tpot_s, a.e2el_s, a.queue_s) == (1.0, [1.0, 1.0], 1.0, 3.0, 0.0)
    assert (b.ttft_s, list(b.itl_s), b.e2el_s, b.queue_s) == (2.5, [1.0], 3.5, 0.5)
    assert result.events == [
        Event(10.0, 11.0, [("0", 20)]),
        Event(11.0, 12.0, [("0", 1), ("1", 63)]),
        Event(12.0, 13.0, [("0", 1), ("1", 7)]),
        Event(13.0, 14.0, [("1", 1)]),
    ]
    assert (result.duration, result.num_steps, result.num_rows, result.busy_s) == (4.0, 4, 93, 4.0)
    assert result.longest_gap_tokens == 64


def test_between_two_requests_the_clock_jumps_and_nothing_is_computed():
    result = run([Arrival(0.0, 5, 1), Arrival(100.0, 5, 1)])
    assert [r.ttft_s for r in result.records] == [1.0, 1.0] and result.num_steps == 2


def test_requests_that_can_never_be_served_are_counted_and_the_others_go_on():
    result = run([Arrival(0, 65, 2), Arrival(0, 8, 2), Arrival(0, 8, 2), Arrival(0, 8, 2)], max_queued_requests=2)
    assert result.num_refused == 2 and [r.output_len for r in result.records] == [2, 2]


@pytest.mark.parametrize("policy", SCHEDULING_POLICIES)
def test_every_request_ends_with_its_tokens_under_every_policy(policy, session_seed):
    trace = poisson(80, 3.0, session_seed, input_median=12, output_median=6)
    trace = [a for a in trace if a.prompt_len < 60]
    result = run(trace, policy, num_blocks=40, max_num_seqs=7)
    for arrival, record in zip(trace, result.records, strict=True):
        assert record.output_len == min(arrival.output_len, 64 - arrival.prompt_len) == len(record.itl_s) + 1
        assert record.prompt_len == arrival.prompt_len


def test_a_sequence_that_outgrows_the_pool_is_recorded_as_what_it_is():
    result = run([Arrival(0.0, 8, 40)], num_blocks=4)
    assert (result.records[0].stop_reason, result.records[0].output_len) == ("kv_cache_full", 9)


@pytest.mark.parametrize("policy", SCHEDULING_POLICIES)
def test_the_simulator_makes_the_same_steps_as_the_real_engine(tiny, session_seed, policy):
    """All arrive at once: then steps depend on nothing but the scheduler, and the two logs must be one."""
    rng = random.Random(session_seed)
    arrivals = [Arrival(0.0, rng.randint(1, 60), rng.randint(1, 12)) for _ in range(12)]
    options = {"max_num_batched_tokens": MAX_LEN, "max_num_seqs": 5, "scheduling_policy": policy}
    engine = make_engine(tiny, num_blocks=14, **options)
    prompts = random_prompts(tiny, [a.prompt_len for a in arrivals], session_seed)
    for number, (prompt, arrival) in enumerate(zip(prompts, arrivals, strict=True)):
        params = SamplingParams(temperature=0.0, max_tokens=arrival.output_len, ignore_eos=True)
        engine.add(engine.make_request(prompt, params, str(number)))
    log, schedule = [], engine.scheduler.schedule

    def spy(now):
        step = schedule(now)
        log.append([(r.request_id, n) for r, n in step.scheduled])
        return step

    engine.scheduler.schedule = spy
    while engine.has_work:
        engine.step()
    simulated = run(arrivals, num_blocks=14, keep_events=True, block_size=16, max_model_len=MAX_LEN, policy=policy,
                    max_num_batched_tokens=MAX_LEN, max_num_seqs=5)  # fmt: skip
    assert [event.scheduled for event in simulated.events] == log


def test_ten_times_more_than_can_be_served_ends_and_shows_in_ttft(session_seed):
    calm = run(poisson(100, 0.05, session_seed, 12, 4), max_num_seqs=4)
    storm = run(poisson(100, 5.0, session_seed, 12, 4), max_num_seqs=4)
    for result in (calm, storm):
        assert len(result.records) + result.num_refused == 100
    ttft = [statistics.median(r.ttft_s for r in result.records) for result in (calm, storm)]
    assert ttft[1] > 5 * ttft[0]


def test_real_requests_wait_for_one_chunk_of_a_guess_at_most():
    trace = [Arrival(0.0, 40, 2, "s", 32), Arrival(20.0, 40, 2, "s", 32), *(Arrival(40.0, 63, 1) for _ in range(4))]
    trace += [Arrival(60.5, 40, 2, "s", 32), Arrival(80.0, 40, 2, "s", 32)]
    result = run(trace, "speculative_prefill", num_blocks=34, speculative_chunk_size=8, keep_events=True)
    guesses = [event for event in result.events if event.scheduled[0][0] == "guess"]
    assert guesses and all(sum(n for _, n in event.scheduled) <= 8 for event in guesses)
    assert result.speculation.num_used_tokens > 0
    assert all(record.queue_s <= 1.0 for record in result.records[-2:])


# ---- prefixes ------------------------------------------------------------------------------------


def test_prompts_of_one_prefix_share_whole_blocks_of_it_and_others_share_nothing():
    trace = [Arrival(i * 10.0, 22, 1, "system", 14) for i in range(3)] + [Arrival(40.0, 22, 1), Arrival(50.0, 22, 1)]
    result = run(trace)
    assert [r.num_cached_tokens for r in result.records] == [0, 12, 12, 0, 0]


def test_the_next_turn_of_a_conversation_finds_prompt_and_answer():
    result = run([Arrival(0.0, 20, 9, "talk"), Arrival(50.0, 20 + 9 + 7, 3, "talk")])
    assert result.records[1].num_cached_tokens == (20 + 9 - 1) // 4 * 4


def test_named_tokens_are_as_long_as_the_prompt_and_their_slices_tell_texts_apart():
    a, b = NamedTokens(20, "a", "system", 10), NamedTokens(30, "b", "system", 10)
    assert len(a) == 20 and a[0:8] == b[0:8] and a[8:12] != b[8:12] and a[0:4] != a[4:8]
    request = Request("r", range(20), None, token_ids=a)
    assert request.num_tokens == request.num_prompt_tokens == 20


# ---- step time -----------------------------------------------------------------------------------


def random_step(rng):
    sequences = []
    for _ in range(rng.randint(1, 12)):
        n = rng.choice([1, 1, 1, rng.randint(2, 700)])
        sequences.append((n, n + rng.choice([0, rng.randint(0, 3000)])))
    return sequences, rng.randint(0, len(sequences))


@pytest.mark.parametrize("window", [None, 512])
@pytest.mark.parametrize("device", DEVICES)
def test_a_step_takes_what_the_roofline_says(device, window, session_seed):
    rng = random.Random(session_seed)
    shape = ModelConfig(32000, 1024, 4096, 8, 16, 4, 64, sliding_window=window)
    ours = RooflineStepTime(shape, find_device(device), "float16", 1, 0.5, 0.7, 0.001)
    for _ in range(20):
        sequences, sampled = random_step(rng)
        expected = step_seconds(shape, sequences, find_device(device), "float16", 0.5, 0.7, 0.001, sampled)
        assert ours(sequences, sampled) == pytest.approx(expected, rel=1e-9)
    assert ours([], 0) == 0.0


@pytest.mark.parametrize("size", [2, 4, 8])
def test_tensor_parallelism_divides_the_work_and_adds_two_all_reduces_per_layer(size):
    model, device = shape_of("70b"), find_device("A100-80GB")
    sequences = [(512, 512), (1, 900)]
    free = {"overhead_s": 0.0, "link_latency_s": 0.0}
    alone = RooflineStepTime(model, device, **free)(sequences, 2)
    shared = RooflineStepTime(model, device, tensor_parallel_size=size, **free)(sequences, 2)
    moved = 513 * 8192 * 2 * 2 * (size - 1) / size  # bytes that each GPU sends in a ring, twice over
    logits = 2 * 32000 * 2 * (size - 1) / size  # bytes that arrive at the GPU that samples
    assert shared == pytest.approx(alone / size + (2 * 80 * moved + logits) / 300e9, rel=1e-9)


def test_heads_that_cannot_be_shared_are_refused_with_both_numbers():
    with pytest.raises(ConfigError, match="tensor_parallel_size=16 .* 64 heads and 8 KV heads"):
        RooflineStepTime(shape_of("70b"), find_device("H100"), tensor_parallel_size=16)


def test_a_fitted_line_is_straight_between_its_knots_and_goes_on_behind_the_last():
    time = FittedStepTime(((1, 2.0), (3, 4.0), (10, 4.0), (20, 14.0)), pair_s=0.5, row_s=0.25, sampled_s=8.0)
    assert [time.line(n) for n in (1, 2, 3, 7, 10, 15, 30)] == [2.0, 3.0, 4.0, 4.0, 4.0, 9.0, 24.0]
    # a chunk of 2 at the end of 5 (4 + 5 pairs, 7 rows) and a decode at 4 (4 pairs, 5 rows)
    assert time([(2, 5), (1, 4)], 2) == 4.0 + 0.5 * 13 + 0.25 * 12 + 8.0
    assert time([], 0) == 0.0


# ---- memory --------------------------------------------------------------------------------------


def test_a_70b_needs_more_than_one_a100_and_its_blocks_are_what_eight_of_them_have_left():
    config, model, device = EngineConfig(), shape_of("70b"), find_device("A100-80GB")
    with pytest.raises(ConfigError, match="1 x A100-80GB offer 72.0 GB, and weights .138.0 GB"):
        kv_blocks(model, config, device)
    blocks = kv_blocks(model, config, device, tensor_parallel_size=8)
    held = blocks * 16 * 2 * 80 * 8 * 128 * 2
    left = 8 * 72e9 - 2 * 68_976_648_192
    assert 0.98 * left < held < left
    assert kv_blocks(model, EngineConfig(num_kv_blocks=77), device) == 77


# ---- traces --------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [poisson, bursts, shared_prompt, conversations])
def test_a_trace_is_the_same_for_the_same_seed_and_another_for_another(make, session_seed):
    trace = make(500, 5.0, session_seed)
    assert trace == make(500, 5.0, session_seed) != make(500, 5.0, session_seed + 1)
    assert len(trace) == 500 and [a.time for a in trace] == sorted(a.time for a in trace)
    assert all(a.prompt_len >= 1 and a.output_len >= 1 for a in trace)


def test_a_poisson_trace_has_the_rate_and_the_medians_it_was_asked_for(session_seed):
    trace = poisson(20_000, 8.0, session_seed, input_median=300, output_median=50)
    assert trace[-1].time == pytest.approx(20_000 / 8, rel=0.05)
    assert statistics.median(a.prompt_len for a in trace) == pytest.approx(300, rel=0.05)
    assert statistics.median(a.output_len for a in trace) == pytest.approx(50, rel=0.05)


def test_bursts_come_together_and_conversations_grow(session_seed):
    times = [a.time for a in bursts(64, 4.0, session_seed, size=16)]
    assert len(set(times)) == 4 and times[0] == times[15] != times[16]
    talk = [a for a in conversations(400, 4.0, session_seed, turns=3) if a.prefix_id == "conversation-0"]
    assert len(talk) == 3 and all(b.prompt_len > a.prompt_len + a.output_len for a, b in pairwise(talk))


def test_a_trace_survives_its_file(tmp_path, session_seed):
    path = tmp_path / "my trace.jsonl"
    trace = shared_prompt(50, 5.0, session_seed) + [Arrival(99.0, 5, 6, priority=2)]
    write_trace(path, trace)
    assert read_trace(path) == trace


BROKEN_LINES = (
    "{",
    "[1, 2]",
    '{"arrival": 1}',
    '{"arrival": 1, "prompt_len": 0, "output_len": 2}',
    '{"arrival": -1, "prompt_len": 3, "output_len": 2}',
    '{"arrival": NaN, "prompt_len": 3, "output_len": 2}',
    '{"arrival": Infinity, "prompt_len": 3, "output_len": 2}',
    '{"arrival": 1, "prompt_len": 3.5, "output_len": 2}',
    '{"arrival": 1, "prompt_len": 3, "output_len": 2, "colour": 1}',
)


@pytest.mark.parametrize("line", BROKEN_LINES)
def test_a_line_that_is_no_arrival_is_named(tmp_path, line):
    path = tmp_path / "trace.jsonl"
    path.write_text('{"arrival": 0, "prompt_len": 3, "output_len": 2}\n' + line + "\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="line 2"):
        read_trace(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(tmp_path / "none")


# ---- summary -------------------------------------------------------------------------------------


def test_the_summary_is_what_one_counts_by_hand():
    result = run([Arrival(10.0, 20, 3), Arrival(10.5, 60, 2), Arrival(11.0, 4, 1)], max_model_len=100)
    assert [r.ttft_s for r in result.records] == [1.0, 1.5, 2.0]  # 1 + 60 + 3 of c's 4 tokens fill the second step
    summary = summarize(result.records, result.duration, SLO(ttft=1600))
    assert (summary["completed"], summary["total_input_tokens"], summary["total_output_tokens"]) == (3, 84, 6)
    assert (summary["mean_ttft_ms"], summary["median_ttft_ms"]) == (1500.0, 1500.0)
    assert summary["median_tpot_ms"] == summary["p99_itl_ms"] == summary["longest_decode_gap_ms"] == 1000.0
    assert summary["request_goodput"] == 2 / result.duration == 2 / 3.0
    assert summary["output_throughput"] == 6 / 3.0


def test_goodput_counts_only_those_who_met_every_limit():
    assert SLO.parse(["ttft:500", "tpot:20.5"]) == SLO(ttft=500, tpot=20.5)
    for wrong in ("ttft", "ttft:0", "speed:3", "tpot:fast"):
        with pytest.raises(ConfigError, match=wrong):
            SLO.parse([wrong])


def test_an_empty_trace_is_an_empty_summary():
    result = run([])
    summary = summarize(result.records, result.duration, SLO(ttft=1))
    assert summary["completed"] == summary["request_throughput"] == 0 and summary["p99_ttft_ms"] is None


# ---- the command ---------------------------------------------------------------------------------


def command(*args, hash_seed="1"):
    environment = {"PYTHONHASHSEED": hash_seed, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "minillm", "simulate", *args],
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_command_prints_the_same_bytes_twice_whatever_the_hash_seed(tmp_path):
    options = ("--num-requests", "60", "--trace", "shared_prompt", "--compare", "--json", "--goodput", "ttft:900")
    first, second = command(*options), command(*options, hash_seed="2")
    assert first == second
    policies = json.loads(first)["policies"]
    assert list(policies) == list(SCHEDULING_POLICIES)
    assert all(row["completed"] == 60 and row["request_goodput"] is not None for row in policies.values())
    assert policies["speculative_prefill"]["num_wasted_tokens"] >= 0


def test_the_command_reads_a_trace_and_writes_events(tmp_path, capsys):
    from minillm.cli import main

    trace, events = tmp_path / "trace.jsonl", tmp_path / "events.jsonl"
    write_trace(trace, [Arrival(0.0, 100, 3), Arrival(0.0, 5000, 2)])
    knobs = ["--block-size", "16", "--prefill-chunk-size", "512", "--max-num-batched-tokens", "8192"]
    where = ["--model", "70b", "--device", "A100-80GB", "--tensor-parallel-size", "8", "--trace", str(trace)]
    assert main(["simulate", *where, *knobs, "--events", str(events)]) == 0
    out = capsys.readouterr().out
    assert "chunked" in out and "TTFT p50" in out and "tensor_parallel_size 8" in out
    steps = [json.loads(line) for line in events.read_text(encoding="utf-8").splitlines()]
    assert steps[0]["scheduled"] == [["0", 100]] and steps[0]["start"] == 0.0 < steps[0]["end"] == steps[1]["start"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--trace", "nowhere.jsonl"], "cannot be read"),
        (["--compare", "--scheduling-policy", "static"], "drop --scheduling-policy"),
        (["--device", "A1000"], "unknown device"),
        (["--model", "70b"], "no room"),
        (["--pad-batches"], "pad_batches"),
        (["--request-rate", "0"], "positive"),
        (["--num-requests", "2", "--events", "no/such/folder/events"], "cannot be written"),
    ],
)
def test_what_cannot_be_simulated_is_refused_in_one_line(options, words, capsys):
    from minillm.cli import main

    assert main(["simulate", *options]) == 2
    assert words in capsys.readouterr().err


def test_the_fake_engine_and_the_simulator_agree_on_who_gives_way(session_seed):
    """A pool too small for all: the simulator's preemptions are those of an engine whose cache is checked."""
    rng = random.Random(session_seed)
    lengths = [(rng.randint(3, 20), rng.randint(4, 16)) for _ in range(10)]
    engine = FakeEngine(num_blocks=12, max_num_batched_tokens=16, max_model_len=64)
    requests = [engine.add([rng.randrange(10**6) for _ in range(p)], n, ignore_eos=True) for p, n in lengths]
    engine.run()
    result = run([Arrival(0.0, p, n) for p, n in lengths], num_blocks=12, max_num_batched_tokens=16, max_num_seqs=8)
    assert [r.num_preemptions for r in result.records] == [r.num_preemptions for r in requests]
