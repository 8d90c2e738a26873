"""A conversation over one cache, written with three parts that anyone can exchange: a cache, a look back, a loop.

    talk = conversation(llm)                      # reads my_minillm/; own={...} takes these functions instead
    talk.answers([question, another], 20, stop)   # greedy token ids, turn by turn
    print(talk.describe())                        # which parts are yours

The layers are those of `textbook.py`; there is one `SequenceCache` for each of them. It is there for reading and for a
learner's functions; the engine keeps its rows in pages, for many requests at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F

from minillm.course import mine
from minillm.course.engine_so_far import textbook
from minillm.course.plug import Part
from minillm.errors import GradeError

MAX_MODEL_LEN = 512


class SequenceCache:
    """K and V of one sequence in one layer.

    memory  [2, capacity, Hkv, D], handed over once; nothing in it may be read before it is written
    """

    def __init__(self, memory: torch.Tensor):
        self.memory = memory
        self.length = 0

    def write(self, k: torch.Tensor, v: torch.Tensor, start: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Put rows k, v [n, Hkv, D] at positions start..start+n-1; returns views of all rows up to there.

        A start below the length rewinds: rows behind the chunk are forgotten. Raises ValueError, before anything is
        written, for rows beyond the capacity and for a start that would leave a gap.
        """
        end, capacity = start + len(k), self.memory.shape[1]
        if end > capacity:
            raise ValueError(f"rows {start} to {end - 1} do not fit into {capacity}: make the cache larger")
        if start > self.length:
            raise ValueError(f"row {start} would leave a gap: {self.length} rows are written")
        self.memory[0, start:end], self.memory[1, start:end] = k, v
        self.length = end
        return self.memory[0, :end], self.memory[1, :end]


def look_back(q, k, v, start: int, cache, turn: Callable, window: int | None = None) -> torch.Tensor:
    """Attention of n new tokens, q [n, H, D], k and v [n, Hkv, D], from position `start` on: out [n, H, D].

    cache   write(k, v, start) -> (k, v) of everything that is visible; turn  (heads, positions [n]) -> heads
    window  visible keys per query, the query's own included; rows that left it are not read
    """
    n, heads, size = q.shape
    positions = torch.arange(start, start + n, device=q.device)
    k, v = cache.write(turn(k, positions), v, start)
    first = 0 if window is None else max(0, start - window + 1)
    k, v = k[first:], v[first:]
    q = turn(q, positions).unflatten(1, (k.shape[1], -1))
    distance = positions[:, None] - torch.arange(first, start + n, device=q.device)
    hidden = (distance < 0) | (distance >= (window or start + n))
    scores = torch.einsum("nkgd,skd->kgns", q, k) / math.sqrt(size)
    weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
    return torch.einsum("kgns,skd->nkgd", weights, v).reshape(n, heads, size)


def converse(model: Callable, turns: list[list[int]], max_tokens: int, budget: int, stop: int) -> list[list[int]]:
    """Greedy answers to `turns`, one after another over one cache; each ends with `stop` or after max_tokens.

    model  (ids, start) -> logits [n, V]: runs at most `budget` tokens, whose K and V it keeps from row `start` on
    """
    answers, rows, owed = [], 0, []
    for ids in turns:
        ids, answer = owed + list(ids), []  # the last token of an answer has been chosen and not been run
        while len(answer) < max_tokens and stop not in answer:
            for piece in (ids[at : at + budget] for at in range(0, len(ids), budget)):
                logits = model(piece, rows)
                rows += len(piece)
            ids = [int(logits[-1].argmax())]
            answer += ids
        owed = ids
        answers.append(answer)
    return answers


REFERENCE = {"SequenceCache": SequenceCache, "look_back": look_back, "converse": converse}


class Conversation:
    """The weights of a loaded model, multiplied by the blocks of the textbook, over one cache per layer.

    own  functions by name, also those of the textbook; the reference stands in where one is missing or None

    Raises GradeError for a model that the textbook does not describe.
    """

    def __init__(self, model, own: Mapping[str, Callable | None], max_model_len: int = MAX_MODEL_LEN):
        if reason := textbook.not_in_the_textbook(model):
            raise GradeError(f"the textbook model cannot stand in for this one: {reason}")
        self._model, self._max_model_len = model, max_model_len
        self._weights = [textbook.layer_weights(layer) for layer in model.layers]
        self.parts = {name: Part(own.get(name) or fn) for name, fn in {**textbook.REFERENCE, **REFERENCE}.items()}
        self._yours = [name for name in self.parts if own.get(name)]

    def describe(self) -> str:
        """Which parts are yours, in one line."""
        others = [name for name in self.parts if name not in self._yours]
        return f"yours {', '.join(self._yours) or 'nothing yet'}; reference {', '.join(others) or 'nothing'}"

    @torch.inference_mode()
    def answers(self, turns: list[list[int]], max_tokens: int, stop: int, budget: int = 16) -> list[list[int]]:
        """The greedy answers to these turns, each with the ones before it in the cache."""
        model, config = self._model, self._model.config
        shape = (2, self._max_model_len, config.num_key_value_heads, config.head_dim)
        memories = [torch.full(shape, math.nan, dtype=model.dtype, device=model.device) for _ in self._weights]
        caches = [self.parts["SequenceCache"].ask(memory) for memory in memories]
        return self.parts["converse"].ask(
            lambda ids, start: self._logits(ids, start, caches), turns, max_tokens, budget, stop
        )

    def _logits(self, ids: list[int], start: int, caches: list) -> torch.Tensor:
        model, config = self._model, self._model.config

        def norm(rows, weight):
            return self.parts["rms_norm"].tensor(rows.shape, rows, weight, config.rms_norm_eps)

        def turn(heads, positions):
            return self.parts["rotate"].tensor(heads.shape, heads, positions, config.rope_theta)

        x = F.embedding(torch.tensor(ids, device=model.device), model.embedding)
        for i, (w, cache) in enumerate(zip(self._weights, caches, strict=True)):
            window = config.layer_window(i)

            def attend(q, k, v, cache=cache, window=window):  # q and k as they came: look_back turns them
                return self.parts["look_back"].tensor(q.shape, q, k, v, start, cache, turn, window)

            x = self.parts["block"].tensor(x.shape, x, w, config.head_dim, norm, lambda heads: heads, attend)
        return model.lm_head(norm(x, model.norm.weight))


def conversation(llm, own: Mapping[str, Callable | None] | None = None) -> Conversation:
    """A conversation on the weights of `llm`; own None: what my_minillm/ holds. Raises GradeError as `boot` does."""
    names = (*textbook.REFERENCE, *REFERENCE)
    return Conversation(llm.engine.model, {name: mine.load(name) for name in names} if own is None else own)
