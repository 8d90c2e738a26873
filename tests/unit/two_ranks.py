"""An LLM on two ranks, for the tests of what they compute and of how they start and end."""

import psutil

from minillm import LLM, SamplingParams

WAIT_S = 120  # for what takes a second on an idle machine
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
OPTIONS = dict(dtype="float32", attention="sdpa", num_kv_blocks=64, max_num_batched_tokens=16)


def open_two(model="random:tiny", **options):
    return LLM(model, tensor_parallel_size=2, **{**OPTIONS, **options})


def child_of(llm):
    return llm.engine.model.others.processes[1]


def tokens(llm, prompts, params=GREEDY):
    return [[c.token_ids for c in output.outputs] for output in llm.generate(prompts, params, use_tqdm=False)]


def ended(process):
    return process.wait(WAIT_S) is not None


def is_alive(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
