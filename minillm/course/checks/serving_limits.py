"""Checks what a device can serve: KV bytes per token, requests that fit, the ridge batch, the time of a decode step.

What is derived from an earlier answer is judged by the learner's own earlier answer, so a slip is lost once. The
device of the cases does 1,000 FLOPs and moves 10 bytes per second. Task 2 of exercise 04.
"""

from __future__ import annotations

import math
import random
from fractions import Fraction

from minillm.course.checks.answers import judge_by_rule, plain, ratio_rule
from minillm.course.grader.task import Case, Record, Verdicts

LIMIT_KEYS = ("kv_per_token", "fits", "ridge_batch", "decode_s")
LIMIT_ITEMS = (
    *("K and V", "grouped heads", "bytes per value", "weights first", "whole requests", "does not fit"),
    *("ridge batch", "other sizes", "slower of two", "cache is read"),
)


def limits_cases(seed: int) -> list[Case]:
    r = random.Random(seed)
    heads, kv = r.choice((8, 12, 16)), 4
    model = {"layers": r.randint(3, 9), "heads": heads, "kv_heads": heads, "head_dim": 16, "parameters": 0, "size": 1}
    device = {"flops": 1000.0, "bandwidth": 10.0, "memory": 0.0}
    room = 2 * model["layers"] * heads * 16 * 100  # bytes of one request of 100 tokens, in values of one byte
    batch = r.randint(3, 9)

    def call(model_changes=None, device_changes=None, context=100, batch=1):
        shapes = {**model, "parameters": 50, **(model_changes or {})}
        peaks = {**device, "memory": 50.0 + 3 * room, **(device_changes or {})}
        return {"model": shapes, "device": peaks, "context": context, "batch": batch}

    weights = r.randint(4, 7) * room
    calls = {
        "K and V": [call()],
        "grouped heads": [call({"kv_heads": kv}), call()],
        "bytes per value": [call({"size": 4}), call()],
        "weights first": [call({"parameters": weights, "size": 4}, {"memory": 4 * (weights + r.randint(2, 6) * room)})],
        "whole requests": [call({"parameters": 0}, {"memory": (r.randint(2, 6) + 0.9) * room})],
        "does not fit": [call({"parameters": weights}, {"memory": weights - 2.5 * room})],
        "ridge batch": [call({"size": 2}, {"flops": r.randint(20, 300) * 10.0 + 3})],
        "other sizes": [call({"size": size}, {"flops": 10.0 * 2 * r.randint(20, 300)}) for size in (1, 4)],
        "slower of two": [
            call({"parameters": 10**9}, {"flops": 20.0 * batch}, context=1, batch=batch),  # the two are equal
            call({"parameters": 10**9}, context=1, batch=batch),
            call({"parameters": 10**9}, {"flops": 1.0}, context=1, batch=batch),
        ],
        "cache is read": [call({"parameters": room}, {"flops": 1e9}, batch=batch)],
    }
    return [{"items": [item], "calls": several} for item, several in calls.items()]


def limits_drive(serving_limits, case: Case) -> Record:
    answers = [serving_limits(dict(c["model"]), dict(c["device"]), c["context"], c["batch"]) for c in case["calls"]]
    return {"answers": [plain(answer) for answer in answers]}


def limits_judge(case: Case, record: Record) -> Verdicts:
    return judge_by_rule(case, record, LIMIT_KEYS, LIMIT_RULES)


def _kv(pairs):
    for call, answer in pairs:
        m = call["model"]
        wanted = sum(2 * m["kv_heads"] * m["head_dim"] for _ in range(m["layers"]))
        if answer["kv_per_token"] != wanted:
            why = {wanted / 2: ": K and V are two tensors", wanted / m["layers"]: ": every layer keeps its own"}
            got = answer["kv_per_token"]
            yield f"kv_per_token: got {got:,}, expected {wanted:,}{why.get(got, '')}"


def _fits(sentence: str):
    """Judged by the learner's own kv_per_token: a slip there is lost once."""

    def rule(pairs):
        for call, answer in pairs:
            m, per_request = call["model"], answer["kv_per_token"] * call["context"]
            free = call["device"]["memory"] - m["parameters"] * m["size"]
            wanted = max(0, math.floor(free / per_request)) if per_request > 0 else -1
            if answer["fits"] != wanted:
                yield f"fits: got {answer['fits']:,}, expected {wanted:,}: {sentence}"

    return rule


def _ridge(sentence: str):
    def rule(pairs):
        for call, answer in pairs:
            device, size = call["device"], call["model"]["size"]
            wanted = math.ceil(Fraction(device["flops"]) / Fraction(device["bandwidth"]) * size / 2)
            if answer["ridge_batch"] != wanted:
                yield f"ridge_batch at {size} bytes per value: got {answer['ridge_batch']:,}, expected {wanted:,}: " + (
                    sentence
                )

    return rule


def _decode(sentence: str):
    def rule(pairs):
        for call, answer in pairs:
            m, device = call["model"], call["device"]
            compute = 2 * m["parameters"] * call["batch"] / device["flops"]
            moved = m["parameters"] * m["size"] + answer["kv_per_token"] * call["context"] * call["batch"]
            wanted, got = max(compute, moved / device["bandwidth"]), answer["decode_s"]
            if not _close(got, wanted):
                slips = _decode_slips(compute, m["parameters"] * m["size"], moved, call["batch"], device["bandwidth"])
                why = next((slip for slip, seconds in slips.items() if _close(got, seconds)), sentence)
                yield f"decode_s: got {got:,.4g} s, expected {wanted:,.4g} s: {why}"

    return rule


def _close(got: float, wanted: float) -> bool:
    return abs(got - wanted) <= 1e-3 * wanted


def _decode_slips(compute: float, weights: float, moved: float, batch: int, bandwidth: float) -> dict[str, float]:
    """Sentence -> the seconds that this slip gives."""
    return {
        "arithmetic grows with the batch: each request needs its own 2 FLOPs per parameter": max(
            compute / batch, moved / bandwidth
        ),
        "the weights are fetched once for the whole batch": max(compute, (moved + (batch - 1) * weights) / bandwidth),
    }


LIMIT_RULES = {
    "K and V": _kv,
    "grouped heads": ratio_rule(
        "kv_per_token",
        lambda call, other: call["model"]["kv_heads"] / other["model"]["kv_heads"],
        "the cache holds kv_heads heads, not heads",
    ),
    "bytes per value": ratio_rule(
        "kv_per_token",
        lambda call, other: call["model"]["size"] / other["model"]["size"],
        "multiply by the bytes of one value, and do so once",
    ),
    "weights first": _fits("the weights, parameters x size bytes, take their memory before any request does"),
    "whole requests": _fits("nine tenths of a request are no request, and no answer is rounded up"),
    "does not fit": _fits("weights that do not fit leave room for no request, not for a negative number"),
    "ridge batch": _ridge("2 FLOPs per value and request take as long as reading the value"),
    "other sizes": _ridge("a value of another size takes another time to read"),
    "slower of two": _decode("the slower of arithmetic and memory decides, the other one hides behind it"),
    "cache is read": _decode("a step reads K and V of every request's context besides the weights"),
}
