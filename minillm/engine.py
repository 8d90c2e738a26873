"""The loop in the middle of the street: schedule -> batch -> forward -> sample -> commit.

`Engine` is made of parts that are handed to it, so any of them can be a learner's own. It knows
requests and tokens; finding a model, choosing dtypes and sizing memory is `open_engine.py`'s work. One thread
drives an engine. Built in lesson 12.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from minillm.batch import Batch
from minillm.detokenizer import Detokenizer
from minillm.errors import EngineClosedError, MinillmError, PromptError, StepError
from minillm.job import Job, Sequence
from minillm.kv_cache import KVCache
from minillm.outputs import RequestOutput, StreamChunk
from minillm.profiler import NO_PARTS, PART_NAMES, Parts
from minillm.request import Request
from minillm.sampling_params import SamplingParams


class Engine:
    """Runs requests to their end, one step at a time.

    model         Transformer: forward(batch, kv_cache, attend, parts) -> logits [B', V]
    tokenizer     Tokenizer
    kv_cache      KVCache, with as many blocks of the same size as the scheduler's block pool
    scheduler     Scheduler, owner of the block pool
    sampler       Sampler: (logits [B', V], requests) -> (token ids, logprobs)
    attend        the attention body, see minillm/attention
    max_model_len most tokens of one sequence, prompt and completion together
    clock         seconds, monotonic
    make_batch    (step, block_size, device) -> Batch
    step_graphs   StepGraphs: batch -> logits, or None for a batch that it does not run; None: all runs eagerly
    profile       measure the parts of each TTFT (slower on a GPU, where each part waits for the device)
    """

    def __init__(
        self,
        model,
        tokenizer,
        kv_cache: KVCache,
        scheduler,
        sampler,
        attend,
        max_model_len: int,
        clock: Callable[[], float] = time.perf_counter,
        make_batch: Callable[..., Batch] = Batch.from_step,
        step_graphs: Callable[[Batch], torch.Tensor | None] | None = None,
    ):
        self.model = model
        self.tokenizer = tokenizer
        self.kv_cache = kv_cache
        self.scheduler = scheduler
        self.sampler = sampler
        self.attend = attend
        self.max_model_len = max_model_len
        self.clock = clock
        self.make_batch = make_batch
        self.step_graphs = step_graphs
        self.profile = False
        self.closed = False
        self.was_idle = False  # the latest step found nothing to compute, and nothing was added since
        self._parts = Parts(self._device_clock)
        self._jobs: dict[str, Job] = {}  # by request id of the caller
        self._job_of: dict[Request, tuple[Job, Sequence]] = {}
        self._undelivered: list[StreamChunk] = []  # of a step that failed after others had ended in it
        self._num_added = 0

    # ---- the caller's side -------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return bool(self._jobs or self._undelivered)

    def is_running(self, request_id: str) -> bool:
        """Is anything of this request still to come?"""
        return request_id in self._jobs or any(chunk.request_id == request_id for chunk in self._undelivered)

    def make_request(
        self, prompt: str | list[int], params: SamplingParams, request_id: str | None = None, *, chat: bool = False
    ) -> Request:
        """Tokenise and check a prompt without queueing it. `chat` text already holds its special tokens.

        Raises PromptError for a prompt that is empty, of the wrong type, or outside the vocabulary, and
        EngineClosedError.
        """
        self.check_open()
        arrival = self.clock()
        if isinstance(prompt, str):
            ids = self.tokenizer.encode(prompt, add_special_tokens=not chat)
        elif isinstance(prompt, (list, tuple)):
            ids = self.tokenizer.check_ids(prompt)
        else:
            raise PromptError(f"a prompt is text or a list of token ids, not {type(prompt).__name__}")
        if not ids:
            raise PromptError("the prompt is empty; give at least one token")
        if request_id is None:
            request_id = f"request-{self._num_added}"
            self._num_added += 1
        return Request(
            request_id=request_id,
            prompt_token_ids=ids,
            params=params,
            prompt=prompt if isinstance(prompt, str) else None,
            arrival_time=arrival,
            tokenize_s=self.clock() - arrival,
        )

    def add(self, request: Request) -> None:
        """Queue a request. Raises PromptError if it can never fit, QueueFullError, EngineClosedError."""
        self.check_open()
        if request.request_id in self._jobs:
            raise PromptError(f"request id {request.request_id!r} is already running; choose another")
        self.was_idle = False
        job = Job([])
        self._enter(request, job)
        self._jobs[request.request_id] = job  # complete and known before it is queued: Ctrl-C in here, abort finds it
        try:
            self.scheduler.add(request)
        except MinillmError:
            del self._jobs[request.request_id], self._job_of[request]
            raise

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request and return its blocks at once. Gives what it has so far; None if it is not running."""
        job = self._jobs.pop(request_id, None)
        if job is None:
            return None
        self._end(job, "abort")
        return job.output()

    def close(self) -> None:
        """Abort everything and let go of the model and the cache. Closing twice is fine."""
        for request_id in list(self._jobs):
            self.abort(request_id)
        self.closed = True
        self.model = self.kv_cache = self.attend = self.step_graphs = None

    # ---- one step ----------------------------------------------------------------------------

    @torch.inference_mode()
    def step(self) -> list[StreamChunk]:
        """One forward pass over whatever the scheduler chose; what it added to each completion.

        If anything in it fails, its requests end with finish_reason "error", their blocks return to the
        pool, and the error is raised: a MinillmError as it is, anything else as StepError. Requests that had
        just ended are not lost: the next step returns them.
        """
        self.check_open()
        step = self.scheduler.schedule(self.clock())
        self.was_idle = not step.scheduled
        chunks = self._undelivered + [self._chunk(request, "", []) for request in step.ended]
        self._undelivered = []
        if not step.scheduled:
            return chunks
        requests = [request for request, _ in step.scheduled]
        if self.profile:
            self._remember_start(requests)
        try:
            sampled, token_ids, logprobs = self._forward(step)
        except BaseException as error:
            self._undelivered = chunks
            self._fail(requests)
            if isinstance(error, MinillmError) or not isinstance(error, Exception):
                raise
            ids = tuple(dict.fromkeys(r.request_id for r in requests))
            raise StepError(f"a step with {len(requests)} request(s) failed: {error!r}", ids) from error
        now = self.clock()
        chunks += [self._append(*row, now) for row in zip(sampled, token_ids, logprobs, strict=True)]
        return chunks

    def _forward(self, step) -> tuple[list[Request], list[int], list]:
        """Run the model and choose a token for every request whose last token is now computed."""
        parts = self._parts if self.profile else NO_PARTS
        batch = self.make_batch(step, self.kv_cache.block_size, self.model.device)
        self.kv_cache.copy_blocks(step.block_copies)
        logits = self.step_graphs(batch) if self.step_graphs and not self.profile else None
        if logits is None:
            logits = self.model.forward(batch, self.kv_cache, self.attend, parts)
        self.scheduler.commit(step)

        rows, sampled = [], []
        done = (request for request, _ in step.scheduled if request.is_sampled_after(0))
        for row, request in enumerate(done):
            family = [request, *self._fork(request)]  # siblings born here read the same logits
            sampled += family
            rows += [row] * len(family)
        if not sampled:
            return [], [], []
        if len(rows) > logits.shape[0]:
            logits = logits[torch.tensor(rows, device=logits.device)]
        with parts("sample"):
            token_ids, logprobs = self.sampler(logits, sampled)
        return sampled, token_ids, logprobs

    def _append(self, request: Request, token: int, logprobs: dict | None, now: float) -> StreamChunk:
        """Commit one new token: to the sequence, to its text, and to the question whether it ends."""
        job, sequence = self._job_of[request]
        request.token_ids.append(token)
        request.token_times.append(now)
        if self.profile and job.ttft_parts is None:
            job.ttft_parts = self._ttft_parts(job)
        if logprobs is not None:
            for other, entry in logprobs.items():
                entry.decoded_token = self.tokenizer.decode([other], skip_special_tokens=False)
            sequence.logprobs.append(logprobs)

        params, detokenizer = request.params, sequence.detokenizer
        is_stop = token in params.stop_token_ids
        is_eos = token in self.tokenizer.eos_token_ids and not params.ignore_eos
        hidden = (is_stop or is_eos) and not params.include_stop_str_in_output
        text = "" if hidden else detokenizer.push(token)

        reason = None
        if is_stop or is_eos:
            reason, stop = "stop", None if is_eos else token
        elif detokenizer.stop_string is not None:
            reason, stop = "stop", detokenizer.stop_string
        elif len(request.token_times) >= params.max_tokens:
            reason, stop = "length", "max_tokens"
        elif request.num_tokens >= self.max_model_len:
            reason, stop = "length", "max_model_len"
        if reason is not None:
            self.scheduler.finish(request, reason, stop)
        return self._chunk(request, text, [token], None if logprobs is None else [logprobs])

    def _chunk(
        self, request: Request, text: str, token_ids: list[int], logprobs: list[dict] | None = None
    ) -> StreamChunk:
        """What the caller sees of this step; the last chunk of a job carries its whole output."""
        job, sequence = self._job_of[request]
        if request.finished:
            text += sequence.detokenizer.flush()
            del self._job_of[request]
        chunk = StreamChunk(job.first.request_id, request.index, text, token_ids, logprobs)
        chunk.finish_reason, chunk.stop_reason = request.finish_reason, request.stop_reason
        if job.finished:
            del self._jobs[job.first.request_id]
            chunk.output = job.output()
        return chunk

    # ---- bookkeeping -------------------------------------------------------------------------

    def check_open(self) -> None:
        """Raises EngineClosedError after `close`."""
        if self.closed:
            raise EngineClosedError("this engine was closed; create a new LLM")

    def _enter(self, request: Request, job: Job) -> None:
        sequence = Sequence(request, Detokenizer(self.tokenizer, request.params))
        job.sequences.append(sequence)
        self._job_of[request] = (job, sequence)

    def _fork(self, request: Request) -> list[Request]:
        """The siblings of a request with n > 1, born when its prompt has been computed."""
        if not request.num_pending_forks:
            return []
        job, _ = self._job_of[request]
        children = self.scheduler.fork(request)
        for child in children:
            self._enter(child, job)
        return children

    def _end(self, job: Job, reason: str) -> None:
        for sequence in job.sequences:
            if not sequence.request.finished:
                self.scheduler.finish(sequence.request, reason)
                sequence.detokenizer.flush()
                self._job_of.pop(sequence.request, None)
        job.first.num_pending_forks = 0

    def _fail(self, requests: list[Request]) -> None:
        for request in requests:
            if request in self._job_of:
                job, _ = self._job_of[request]
                self._jobs.pop(job.first.request_id, None)
                self._end(job, "error")
            else:
                self.scheduler.finish(request, "error")  # the scheduler's own: a guess of `speculative_prefill`

    # ---- profile -----------------------------------------------------------------------------

    def _device_clock(self) -> float:
        if self.model.device.type == "cuda":
            torch.cuda.synchronize()
        return self.clock()

    def _remember_start(self, requests: list[Request]) -> None:
        for request in requests:
            job, _ = self._job_of[request]
            if job.parts_at_start is None:
                job.parts_at_start = dict(self._parts.seconds)

    def _ttft_parts(self, job: Job) -> dict[str, float]:
        """TTFT by kind of work. `other` is what no part covers: launches, scheduling, Python itself."""
        metrics = job.first.metrics()
        parts = {"tokenize": metrics.tokenize_s, "queue": metrics.queue_s}
        for name in PART_NAMES:
            parts[name] = self._parts.seconds[name] - (job.parts_at_start or {}).get(name, 0.0)
        parts["other"] = metrics.ttft_s - sum(parts.values())
        return parts
