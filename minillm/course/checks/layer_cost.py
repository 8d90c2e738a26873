"""Checks the cost of a layer: FLOPs of its products, bytes of its weights and of its part of the cache.

A count is asked where other slips cannot hide in it: a layer without a feed-forward block, values of one byte, the
ratio of two answers. The oracle writes out every matrix and every visible pair. Task 1 of exercise 04.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from minillm.course.checks.answers import judge_by_rule, plain, ratio_rule
from minillm.course.grader.task import Case, Record, Verdicts

COST_KEYS = ("linear", "attention", "weights", "kv")
COST_ITEMS = (
    *("feed-forward", "head width", "grouped projections", "causal prefill", "chunk", "full square"),
    *("two FLOPs", "weights once", "cache traffic", "grouped cache", "bytes per value"),
)


def cost_cases(seed: int) -> list[Case]:
    r = random.Random(seed)
    heads, d, n = r.choice((4, 6, 8)), r.choice((8, 16)), r.randint(5, 9)
    more = n + r.randint(3, 20)
    base = {"E": heads * d, "F": 0, "H": heads, "Hkv": heads, "D": d, "n": 1, "context": 1, "causal": True, "size": 1}
    hand = {"E": 4, "F": 0, "H": 2, "Hkv": 2, "D": 2, "n": 3, "context": 3, "causal": True, "size": 1}
    grouped = {**base, "Hkv": heads // 2}
    long = {**base, "n": n, "context": more}
    calls = {
        "feed-forward": [{**base, "F": r.randint(20, 90)}],
        "head width": [{**base, "E": heads * d + r.randint(1, 40)}],
        "grouped projections": [grouped],
        "causal prefill": [hand, {**base, "n": n, "context": n}],
        "chunk": [{**hand, "n": 2, "context": 5}, long],
        "full square": [{**hand, "causal": False}, {**long, "causal": False}],
        "two FLOPs": [{**base, "context": more, "causal": False}],  # one query: causal or not, the pairs are the same
        "weights once": [{**base, "n": n, "context": n}],
        "cache traffic": [{**hand, "n": 1, "context": 10}, long],
        "grouped cache": [{**long, "Hkv": heads // 2}, long],
        "bytes per value": [{**long, "size": 4}, long],
    }
    return [{"items": [item], "calls": several} for item, several in calls.items()]


def cost_drive(layer_cost, case: Case) -> Record:
    return {"answers": [plain(layer_cost(**call)) for call in case["calls"]]}


def exact_cost(E, F, H, Hkv, D, n, context, causal, size) -> dict[str, int]:
    """Every matrix written out, every visible pair counted one by one."""
    matrices = {"q": E * H * D, "k": E * Hkv * D, "v": E * Hkv * D, "o": H * D * E, "gate": E * F, "up": E * F}
    values = sum(matrices.values()) + F * E
    first = context - n
    pairs = sum(1 for query in range(n) for key in range(context) if not causal or key <= first + query)
    products = {"scores": D, "mix": D}  # multiply-adds per pair and head
    return {
        "linear": 2 * n * values,
        "attention": 2 * H * pairs * sum(products.values()),
        "weights": values * size,
        "kv": sum(2 * Hkv * D * size for _ in range(context)) + sum(2 * Hkv * D * size for _ in range(n)),
    }


def cost_judge(case: Case, record: Record) -> Verdicts:
    return judge_by_rule(case, record, COST_KEYS, COST_RULES)


def _flops_rule(key: str, sentence: Callable[[dict, float], str]):
    """Right, or half of it everywhere: whoever counts a multiply-add once loses the item "two FLOPs" alone."""

    def rule(pairs):
        for call, answer in pairs:
            wanted = exact_cost(**call)[key]
            if answer[key] not in (wanted, wanted / 2):
                yield f"{key} {_of(call)}: got {answer[key]:,}, expected {wanted:,}. {sentence(call, answer[key])}"

    return rule


def _of(call: dict) -> str:
    """The call of a count that has no bytes in it, for a diagnosis."""
    return "of " + ", ".join(f"{name}={value}" for name, value in call.items() if name != "size")


def _feed_forward(call, got):
    without = exact_cost(**{**call, "F": 0})["linear"]
    counted = (got - without) / (2 * call["n"] * call["E"] * call["F"])
    return f"The feed-forward block has three matrices (gate, up, down); this counts {counted:g}"


def _causal(call, got):
    n, context, each = call["n"], call["context"], 4 * call["H"] * call["D"]
    if got == each * (n * (context - n) + n * n / 2) or got == each * n * n / 2:
        return "Query i of a prompt sees i + 1 keys, its own too: n (n + 1) / 2 pairs, not n² / 2"
    if got in (each * n * context, each * n * context / 2):
        return "A causal query sees no later key: of n x context pairs only the visible ones count"
    if n < context and got in (each * n * (n + 1) / 2, each * n * (n + 1) / 4):
        return "The keys in the cache before this chunk are seen by every query of it"
    return "Count the keys that each query sees and add them up"


def _two(pairs):
    for call, answer in pairs:
        wanted = exact_cost(**call)
        halves = [key for key in ("linear", "attention") if answer[key] == wanted[key] / 2]
        if len(halves) == 2:
            yield "both counts are half of what they should be: a multiply-add is two FLOPs"
        elif halves == ["attention"]:
            yield "attention is half: each pair takes part in two products, the score q.k and the mix of the values"
        for key in ("linear", "attention"):
            if answer[key] != wanted[key]:
                yield f"{key} {_of(call)}: got {answer[key]:,}, expected {wanted[key]:,}"


def _weights_once(pairs):
    for call, answer in pairs:
        wanted = exact_cost(**call)["weights"]
        if answer["weights"] == wanted * call["n"]:
            yield f"weights counted once for each of {call['n']} tokens: a step reads a matrix once for all its rows"
        elif answer["weights"] != wanted:
            yield f"weights {_of(call)}: got {answer['weights']:,} bytes, expected {wanted:,}"


def _cache(pairs):
    for call, answer in pairs:
        got, row = answer["kv"], 2 * call["Hkv"] * call["D"]
        wanted = row * (call["context"] + call["n"])
        why = {
            row * call["context"]: "K and V of the new tokens are also written",
            row * call["n"]: "K and V of the whole context are also read",
            wanted / 2: "K and V are two tensors",
        }.get(got, "")
        if got != wanted:
            yield f"kv {_of(call)}: got {got:,} bytes, expected {wanted:,}. {why}".rstrip()


COST_RULES = {
    "feed-forward": _flops_rule("linear", _feed_forward),
    "head width": _flops_rule("linear", lambda call, got: "Q leaves as H x D values, which need not be E"),
    "grouped projections": _flops_rule("linear", lambda call, got: "K and V have Hkv heads, not H"),
    "causal prefill": _flops_rule("attention", _causal),
    "chunk": _flops_rule("attention", _causal),
    "full square": _flops_rule("attention", lambda call, got: "Without causality all n x context pairs are computed"),
    "two FLOPs": _two,
    "weights once": _weights_once,
    "cache traffic": _cache,
    "grouped cache": ratio_rule(
        "kv", lambda call, other: call["Hkv"] / other["Hkv"], "the cache holds Hkv heads, not H"
    ),
    "bytes per value": ratio_rule(
        "weights kv",
        lambda call, other: call["size"] / other["size"],
        "multiply by the bytes of one value, and do so once",
    ),
}
