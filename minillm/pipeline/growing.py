"""A request whose prompt is still arriving: computed as far as it is known, its cache grows chunk by chunk.

For scheduler and model it is an ordinary request in chunked prefill. What is different: it is open, so nothing is
sampled from it, and its tokens become more between steps. One token is always held back until the text has ended,
because the last token of a prompt must be computed when it is known to be the last. Lesson 17.
"""

from __future__ import annotations

from minillm.engine import Engine
from minillm.errors import ConfigError, PromptError
from minillm.option_checks import positive
from minillm.pipeline.producer import Arriving
from minillm.request import Request, Status
from minillm.sampling_params import SamplingParams
from minillm.scheduler.step import Step

CHUNK_TOKENS = 128


class GrowingPrompt:
    """Carries what arrives into one request of an engine.

    request       to be added to the engine; its first tokens are there
    chunk_tokens  fewer new tokens than that wait for more of them, unless the text has ended

    Making one waits for the first chunk. Raises PromptError when the text is empty or broken, and ProducerError.
    """

    def __init__(self, engine: Engine, arriving: Arriving, params: SamplingParams, chunk_tokens: int = CHUNK_TOKENS):
        self.engine = engine
        self.chunk_tokens = chunk_tokens
        self._arriving = arriving
        self._held: list[int] = []
        self.request = engine.make_request(self._next_chunk(wait=True), params)
        self.request.arrival_time = arriving.began
        self.request.tokenize_s = engine.clock() - arriving.began  # until there was something to compute
        self.request.is_open = True
        self._close_if_ended()

    def feed(self) -> None:
        """Call it before each step while the request is open: it waits only if the engine has nothing else to do.

        Raises PromptError as soon as the prompt has become too long, and what `Arriving.take` raises.
        """
        if not self.request.is_open or self.request.finished:
            return
        ids = self._next_chunk(wait=self.engine.was_idle)
        if ids:
            grow(self.engine.scheduler, self.request, ids)
        self._close_if_ended()

    def _next_chunk(self, wait: bool) -> list[int]:
        """Tokens to be computed now: all that are known but for one; none if there are less than a chunk."""
        while True:
            self._held += self._arriving.take(wait, enough=self.engine.scheduler.max_model_len)
            if self._arriving.ended:
                ids, self._held = self._held, []
                return ids
            if len(self._held) > self.chunk_tokens:
                ids, self._held = self._held[:-1], self._held[-1:]
                return ids
            if not wait:
                return []

    def _close_if_ended(self) -> None:
        arriving, request = self._arriving, self.request
        if not arriving.ended:
            return
        request.is_open = False
        request.prompt = "".join(arriving.pieces)
        request.text_ended_time = arriving.text_ended
        request.arrival = {
            "pieces": len(arriving.pieces),
            "tokenize_s": arriving.tokenize_s,  # in the other process
            "waited_s": arriving.waited_s,  # the engine had nothing to compute, for want of text or tokens
            "hidden_s": arriving.hidden_s,  # tokenised while the engine computed
        }


def check_growing(engine: Engine, chunk_tokens: int) -> None:
    """Raises ConfigError for an engine that computes prompts whole, EngineClosedError for one that was closed."""
    engine.check_open()
    check_cuts(engine.scheduler.enable_chunked_prefill)
    positive("chunk_tokens", chunk_tokens)


def check_cuts(cuts_prompts: bool) -> None:
    """Raises ConfigError where a scheduler does not compute a prompt in chunks."""
    if not cuts_prompts:
        raise ConfigError(
            "a prompt that arrives in pieces is computed in chunks, which this scheduler does not do; use "
            "scheduling_policy='chunked' with enable_chunked_prefill=True, or generate() with the whole text"
        )


def grow(scheduler, request: Request, ids: list[int]) -> None:
    """Append tokens to the prompt of an open request; a running one owns blocks for them when this returns.

    Where too few blocks are free it gives back those it has and waits for its turn like a preempted one, whose whole
    sequence is admitted at once: so two prompts that grow cannot block each other half-way. Raises PromptError when
    the prompt can never be computed.
    """
    request.prompt_token_ids.extend(ids)
    request.token_ids.extend(ids)
    scheduler.check(request)
    if request.num_tokens == scheduler.max_model_len:
        raise PromptError(
            f"after {request.num_tokens} tokens, and more may come, the prompt leaves no room for a new one: "
            f"max_model_len={scheduler.max_model_len} counts both; shorten it"
        )
    if request.status is not Status.RUNNING:
        return
    pool = scheduler.block_pool
    missing = pool.blocks_for(request.num_tokens) - len(request.block_table)
    if missing > pool.num_free:
        scheduler.preempt(request, Step())
    else:
        request.block_table += pool.allocate(missing)


def make_way(engine: Engine) -> None:
    """After a step without work: prompts that wait for their text give their blocks to requests that wait for blocks.

    Nobody else holds any then, since whoever can be computed is. They queue again behind those requests, and compute
    what the prefix cache has lost of them when it is their turn.
    """
    scheduler = engine.scheduler
    if not engine.was_idle or all(request.is_open for request in scheduler.waiting):
        return
    for request in list(scheduler.running):
        scheduler.preempt(request, Step())
        scheduler.waiting.remove(request)
        scheduler.waiting.append(request)
    engine.was_idle = False
