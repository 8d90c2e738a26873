"""Prompts that wait for an engine whose cache has room for one of them: in which order, and what does each compute?

    queue = WaitingPrompts(llm, prompts)          # reads my_minillm/; own={...} takes these functions instead
    plan = queue.plan()                           # [(index, tokens to compute)], by plan_prompts
    queue.read([index for index, _ in plan])      # [(tokens computed, first token of the answer)], by the engine

Each reading starts with an empty cache and finds blocks by `hash_block`. It is there for counting and for a learner's
functions; a server keeps more than one prompt, and an order that asks for work alone lets somebody wait for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from minillm.block_pool import BlockPool
from minillm.config import EngineConfig
from minillm.course import mine
from minillm.course.plug import Part
from minillm.course.plug import hash_block as plug_hash_block
from minillm.engine import Engine
from minillm.kv_cache import KVCache
from minillm.sampler import Sampler
from minillm.sampling_params import SamplingParams
from minillm.scheduler import ChunkedScheduler

BLOCK_SIZE = 16
NAMES = ("hash_block", "plan_prompts", "PrefixPool")
ONE_TOKEN = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)


def plan_prompts(prompts: list[list[int]], warm: list[int], block_size: int) -> list[tuple[int, int]]:
    """(index, tokens to compute) of each prompt, in an order that computes least; equal prompts stay in order.

    warm  the prompt that was read last: its blocks are in the cache, and those of each prompt replace them
    """
    order = sorted(range(len(prompts)), key=lambda i: (-_shared(prompts[i], warm, block_size), prompts[i]))
    plan, before = [], warm
    for i in order:
        most = (len(prompts[i]) - 1) // block_size  # at least one token has to run
        plan.append((i, len(prompts[i]) - min(_shared(prompts[i], before, block_size), most) * block_size))
        before = prompts[i]
    return plan


def _shared(a: list[int], b: list[int], block_size: int) -> int:
    """Whole blocks with which both begin."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(a), len(b))) // block_size


class WaitingPrompts:
    """Prompts (lists of token ids) in order of arrival, on the weights of `llm`.

    own  functions by name; the reference stands in where one is missing; None: what my_minillm/ holds
    """

    def __init__(self, llm, prompts: Sequence[list[int]], own: Mapping[str, Callable | None] | None = None):
        own = {name: mine.load(name) for name in NAMES} if own is None else own
        self.prompts = [list(prompt) for prompt in prompts]
        self.num_blocks = max(-(-len(prompt) // BLOCK_SIZE) for prompt in self.prompts)
        self._llm = llm
        self._own = {name: own.get(name) for name in NAMES}
        self._plan = Part(own.get("plan_prompts") or plan_prompts)

    def describe(self) -> str:
        """Which parts are yours, in one line."""
        yours = [name for name, part in self._own.items() if part]
        others = [name for name in NAMES if name not in yours]
        return f"yours {', '.join(yours) or 'nothing yet'}; reference {', '.join(others) or 'nothing'}"

    def plan(self) -> list[tuple[int, int]]:
        """What plan_prompts says of them, with nothing in the cache."""
        return self._plan.ask([list(prompt) for prompt in self.prompts], [], BLOCK_SIZE)

    def read(self, order: Sequence[int]) -> list[tuple[int, int]]:
        """(tokens computed, first token of the answer) of each prompt in this order; the cache is empty at first."""
        engine, read = self._engine(), []
        for index in order:
            request = engine.make_request(self.prompts[index], ONE_TOKEN)
            engine.add(request)
            while engine.has_work:
                engine.step()
            read.append((len(self.prompts[index]) - request.num_cached_tokens, request.token_ids[-1]))
        return read

    def by_your_pool(self, order: Sequence[int]) -> list[int] | None:
        """Tokens to compute as your PrefixPool says; None without one."""
        if not self._own["PrefixPool"]:
            return None
        pool, computed = self._own["PrefixPool"](self.num_blocks, BLOCK_SIZE), []
        for index in order:
            ids = self.prompts[index]
            table, found = pool.start(list(ids), 0)
            pool.computed(list(ids), table, len(ids))
            pool.end(table)
            computed.append(len(ids) - found)
        return computed

    def _engine(self) -> Engine:
        llm, hash_fn = self._llm.engine, self._own["hash_block"]
        length = self.num_blocks * BLOCK_SIZE
        pool = BlockPool(self.num_blocks, BLOCK_SIZE, hash_fn=hash_fn and plug_hash_block(hash_fn))
        config = EngineConfig(block_size=BLOCK_SIZE, max_num_seqs=1, max_num_batched_tokens=length)
        return Engine(
            model=llm.model,
            tokenizer=llm.tokenizer,
            kv_cache=KVCache(llm.model.config, self.num_blocks, BLOCK_SIZE, llm.model.dtype, llm.model.device),
            scheduler=ChunkedScheduler(config, pool, length + 1),
            sampler=Sampler(),
            attend=llm.attend,
            max_model_len=length + 1,
        )
