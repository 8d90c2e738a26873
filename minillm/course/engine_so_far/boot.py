"""Assemble one stage of the growing engine: your functions where they are, the reference where they are missing.

Every stage has the same face, whatever stands behind it: `add` a prompt, `step` until nothing is left. v1 has no
cache and so no engine; from v2 on it is minillm's `Engine` with the parts of the stage.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping

import torch

from minillm.attention import naive
from minillm.attention.choose import choose_attention
from minillm.batch import Batch
from minillm.config import EngineConfig
from minillm.course import mine, plug
from minillm.course.engine_so_far.stages import Stage, stages_until
from minillm.course.engine_so_far.textbook import REFERENCE, TextbookModel, not_in_the_textbook
from minillm.engine import Engine
from minillm.kv_cache import ContiguousKV, KVCache
from minillm.option_words import ATTENTION_BODIES
from minillm.sampler import Sampler
from minillm.sampling_params import SamplingParams
from minillm.scheduler import ChunkedScheduler

MAX_MODEL_LEN = 512
SLOTS = 4  # longest sequences that the cache of a stage has room for
MAX_SEQS = 8  # requests in one forward pass, from v7 on
BLOCK_SIZE = 16
ATTENTION_PARTS = {
    "naive": ("causal_mask", "grouped_attention"),
    "flash": ("flash_attention",),
    "triton": (),
    "auto": ("merge",),
}
"""Which of a learner's functions belong to which attention; those of another one are out of use."""


class SoFar:
    """A stage that runs.

    stage    its Stage
    parts    name -> the learner's function as a plug.Part, None where the reference runs; in order of the stages
    machine  NoCache or Served: add(ids, max_tokens) -> name, step() -> [(name, token)], has_work
    notes    why a function of the learner's is not used, one sentence each
    """

    def __init__(self, stage: Stage, parts: dict[str, plug.Part | None], machine, notes: list[str]):
        self.stage = stage
        self.parts = parts
        self.machine = machine
        self.notes = notes

    @property
    def stamp(self) -> str:
        """ "yours" when a part of it is, else "reference"."""
        return "yours" if any(self.parts.values()) else "reference"

    def stream(self, ids: list[int], max_tokens: int) -> Iterator[int]:
        """The greedy tokens after `ids`, one by one; ends of text are ignored."""
        self.machine.add(ids, max_tokens)
        while self.machine.has_work:
            for _, token in self.machine.step():
                yield token

    def generate(self, ids: list[int], max_tokens: int) -> list[int]:
        return list(self.stream(ids, max_tokens))

    def describe(self) -> str:
        """Which parts are yours, in one line, and what had to stay out."""
        yours = [name for name, part in self.parts.items() if part]
        others = [name for name, part in self.parts.items() if not part]
        line = f"{self.stage}: yours {', '.join(yours) or 'nothing yet'}; reference {', '.join(others) or 'nothing'}"
        return "\n".join([line, *self.notes])


def boot(
    llm,
    stage: str = "v8",
    own: Mapping[str, Callable] | None = None,
    max_model_len: int = MAX_MODEL_LEN,
    also: Mapping[str, Callable] | None = None,
) -> SoFar:
    """A stage on the weights of `llm`.

    own   functions by name; {}: the reference alone; None: what my_minillm/ holds
    also  functions by name that are put over those: what a notebook has just defined

    Raises ValueError for a stage that does not exist and for a name of `also` that is none of its parts, GradeError
    for a saved function that does not load.
    """
    stages = stages_until(stage)
    kind = _attention_kind(stages[-1], llm.engine.model.device)
    superseded = [name for other, parts in ATTENTION_PARTS.items() if other != kind for name in parts]
    names = [name for each in stages for name in each.parts if name not in superseded]
    found = {name: mine.load(name) for name in names} if own is None else {name: own.get(name) for name in names}
    if unknown := sorted(set(also or {}) - set(names)):
        raise ValueError(f"{stage} has no part {', '.join(unknown)}; its parts are {', '.join(names)}")
    runs = mine.load("slot_runs") if own is None else own.get("slot_runs")
    if runs and "slot_mapping" in found and not found["slot_mapping"]:
        found["slot_mapping"] = plug.slots_of_runs(runs)
    found |= also or {}
    notes: list[str] = []
    model, of_model = _model(llm.engine.model, found, notes)
    attend, of_attention = _attention(kind, found, model.device, model.dtype)
    if found.get("causal_mask") and not found["grouped_attention"]:
        notes.append("not used: causal_mask, because the reference's attention brings its own mask")

    parts: dict[str, plug.Part | None] = {**dict.fromkeys(names), **of_model, **of_attention}
    if stages[-1].kv == "none":
        return SoFar(stages[-1], parts, NoCache(model, attend), notes)

    for name in ("slot_mapping", "hash_block", "prefix_table", "schedule"):
        if found.get(name):
            parts[name] = getattr(plug, name)(found[name])
    return SoFar(stages[-1], parts, Served(_engine(llm, model, stages[-1], attend, parts, max_model_len)), notes)


def _model(model, found: Mapping[str, Callable | None], notes: list[str]):
    """(the model, the learner's parts in it by name); why they stay out, if they have to, goes into `notes`."""
    own = [name for name in REFERENCE if found.get(name)]
    if not own:
        return model, {}
    if reason := not_in_the_textbook(model):
        notes.append(f"not used: {', '.join(own)}, because {reason}")
        return model, {}
    parts = {name: plug.Part(found[name] or reference) for name, reference in REFERENCE.items()}
    return TextbookModel(model, parts), {name: parts[name] for name in own}


def _attention_kind(stage: Stage, device: torch.device) -> str:
    """What the stage's attention is on this device: without a GPU, Triton's place is taken by flash."""
    if stage.attention == "triton" and not ("triton" in ATTENTION_BODIES and device.type == "cuda"):
        return "flash"
    return stage.attention


def _attention(kind: str, found: Mapping[str, Callable | None], device, dtype) -> tuple[Callable, dict]:
    """(the attention body, the learner's parts in it by name)."""
    if kind == "naive" and found["grouped_attention"]:
        own_mask = found["causal_mask"]
        mask = plug.Part(own_mask or naive.visible_keys)
        part = plug.attention(found["grouped_attention"], mask)
        return part, {"causal_mask": mask if own_mask else None, "grouped_attention": part}
    if kind == "flash" and found["flash_attention"]:
        part = plug.attention(found["flash_attention"])
        return part, {"flash_attention": part}
    if kind == "auto" and found["merge"]:
        part = plug.merge(found["merge"])
        return part, {"merge": part}
    return choose_attention(device, dtype, kind)[0], {}


def _engine(llm, model, stage: Stage, attend, parts: Mapping[str, plug.Part | None], max_model_len: int) -> Engine:
    contiguous = stage.kv == "contiguous"
    pool = stage.pool(SLOTS * max_model_len, max_model_len, BLOCK_SIZE, parts.get("hash_block"))
    if own_table := parts.get("prefix_table"):
        pool = own_table(pool.num_blocks, pool.block_size, parts["hash_block"])
    cache = ContiguousKV if contiguous else KVCache
    config = EngineConfig(
        block_size=pool.block_size,
        max_num_seqs=MAX_SEQS if stage.together else 1,
        max_num_batched_tokens=stage.budget or SLOTS * max_model_len,
        enable_chunked_prefill=stage.budget is not None,
    )
    make_scheduler = parts.get("schedule") or ChunkedScheduler
    options = {"make_batch": parts["slot_mapping"]} if parts.get("slot_mapping") else {}
    return Engine(
        model=model,
        tokenizer=llm.tokenizer,
        kv_cache=cache(model.config, pool.num_blocks, pool.block_size, model.dtype, model.device),
        scheduler=make_scheduler(config, pool, max_model_len),
        sampler=Sampler(eos_token_ids=llm.tokenizer.eos_token_ids),
        attend=attend,
        max_model_len=max_model_len,
        **options,
    )


class NoCache:
    """v1: one request after another, and for each new token the whole sequence is computed again."""

    def __init__(self, model, attend):
        self.model = model
        self.attend = attend
        self._queue: deque[list] = deque()  # [name, token ids so far, tokens still to come]
        self._num_added = 0

    @property
    def has_work(self) -> bool:
        return bool(self._queue)

    def add(self, ids: list[int], max_tokens: int) -> int:
        self._queue.append([self._num_added, list(ids), max_tokens])
        self._num_added += 1
        return self._num_added - 1

    def step(self) -> list[tuple[int, int]]:
        first = self._queue[0]
        name, ids, _ = first
        token = int(self.logits(ids).argmax())
        ids.append(token)
        first[2] -= 1
        if not first[2]:
            self._queue.popleft()
        return [(name, token)]

    @torch.inference_mode()
    def logits(self, ids: list[int]) -> torch.Tensor:
        """Logits [V] behind the last token; K and V live for this call only."""
        model = self.model
        pages = KVCache(model.config, -(-len(ids) // BLOCK_SIZE), BLOCK_SIZE, model.dtype, model.device)
        batch = Batch.build([ids], [len(ids)], [list(range(pages.num_blocks))], BLOCK_SIZE, device=model.device)
        return model.forward(batch, pages, self.attend)[0]


class Served:
    """v2 and later: minillm's Engine behind the same three names."""

    def __init__(self, engine: Engine):
        self.engine = engine

    @property
    def has_work(self) -> bool:
        return self.engine.has_work

    def add(self, ids: list[int], max_tokens: int) -> str:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        request = self.engine.make_request(ids, params)
        self.engine.add(request)
        return request.request_id

    def step(self) -> list[tuple[str, int]]:
        return [(chunk.request_id, token) for chunk in self.engine.step() for token in chunk.token_ids]
