"""The friendly face of the engine: a model by name, then text in and text out.

    with LLM() as llm:
        print(llm.chat([{"role": "user", "content": "Why is the sky blue?"}])[0].outputs[0].text)

`open_engine.py` makes its parts, `Engine` does the work; here a caller's prompts become requests and their chunks
become outputs. Any number of LLMs can live side by side; an LLM is driven by one thread.
"""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext

import torch

from minillm.config import EngineConfig
from minillm.inputs import Message, Prompt, check_pieces, conversations_of, params_of, prompts_of
from minillm.open_engine import open_engine
from minillm.outputs import RequestOutput, StreamChunk
from minillm.pipeline.growing import CHUNK_TOKENS, GrowingPrompt, check_growing, make_way
from minillm.pipeline.producer import Producer
from minillm.request import Request
from minillm.sampling_params import SamplingParams
from minillm.scoring import token_logits


class LLM:
    """A loaded model and its engine.

    model      a name, a folder, a .gguf file, or random:<size>, see minillm/checkpoint/
    **options  fields of EngineConfig

    Raises ConfigError for options, CheckpointError for the model's files, RankError when a rank does not start. With
    tensor_parallel_size=N or pipeline_parallel_size=N the other ranks are processes that end with this object; under
    torchrun they are those of torchrun, and there only rank 0 comes back from this call, the others end with SystemExit
    when it closes its LLM.
    `config`, `reasons` (what was chosen and why) and `default_sampling_params` are there to be read.
    """

    def __init__(self, model: str | None = None, **options):
        if model is not None:
            options["model"] = model
        elif "model" not in options and os.environ.get("MINILLM_MODEL"):
            options["model"] = os.environ["MINILLM_MODEL"]
        self.config = config = EngineConfig.from_options(**options)
        self._mailboxes: dict[str, deque[StreamChunk | Exception]] = {}  # by request id, one for each open stream
        self._close_ranks: Callable[[], object] = lambda: None
        self._producer: Producer | None = None  # tokenises prompts that arrive in pieces; from the first one on

        opened = open_engine(config)
        self.engine, self.reasons = opened.engine, opened.reasons
        if opened.close_ranks:
            self._close_ranks = weakref.finalize(self, opened.close_ranks)  # also of an LLM that nobody closes
        self.model_name = opened.checkpoint.name
        self.tokenizer = opened.checkpoint.tokenizer
        self.default_sampling_params = SamplingParams(**{"temperature": 0.0, **opened.checkpoint.generation})
        self.max_model_len = self.engine.max_model_len

    # ---- text in, text out -------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | list[Prompt],
        sampling_params: SamplingParams | list[SamplingParams] | None = None,
        use_tqdm: bool = True,
        profile: bool = False,
    ) -> list[RequestOutput]:
        """Complete every prompt; outputs in the order of the prompts.

        prompts          text or token ids, one or a list
        sampling_params  one for all, or one per prompt; default: `default_sampling_params`
        use_tqdm         show a progress bar
        profile          also fill `metrics.ttft_parts`

        Every prompt is checked before the first one starts. Raises PromptError, QueueFullError, StepError,
        NumericsError. After any error or a KeyboardInterrupt nothing of this call is left in the engine.
        """
        return self._run(prompts_of(prompts), sampling_params, use_tqdm, profile, chat=False)

    def chat(
        self,
        messages: list[Message] | list[list[Message]],
        sampling_params: SamplingParams | list[SamplingParams] | None = None,
        use_tqdm: bool = True,
        profile: bool = False,
    ) -> list[RequestOutput]:
        """Answer one conversation, or a list of them, through the model's chat template.

        messages  {"role": ..., "content": ...} each, in order; the rest as in `generate`

        Raises what `generate` raises, and PromptError for a model without a template.
        """
        prompts = [self.tokenizer.apply_chat_template(m) for m in conversations_of(messages)]
        return self._run(prompts, sampling_params, use_tqdm, profile, chat=True)

    def stream(
        self,
        prompt: Prompt | list[Message],
        sampling_params: SamplingParams | None = None,
        profile: bool = False,
    ) -> Iterator[StreamChunk]:
        """Yield what each step adds to this prompt (text, ids, or a conversation), as soon as it exists.

        Leaving the loop early aborts the request and frees its blocks. A wrong prompt is refused by this call, one that
        does not fit at the first piece. Raises what `generate` raises.
        """
        chat = isinstance(prompt, (list, tuple)) and bool(prompt) and isinstance(prompt[0], Mapping)
        if chat:
            prompt = self.tokenizer.apply_chat_template(list(prompt))
        (params,) = params_of(sampling_params, 1, self.default_sampling_params)
        return self._stream(self.engine.make_request(prompt, params, chat=chat), profile)

    def generate_from(
        self, pieces: Iterable[str], sampling_params: SamplingParams | None = None, chunk_tokens: int = CHUNK_TOKENS
    ) -> RequestOutput:
        """Complete one prompt whose text is still arriving: it is computed as far as it is known.

        pieces        a file opened as text, a generator, or anything else that yields str, cut wherever it likes; read
                      in a thread of its own, so leave this LLM alone in there
        chunk_tokens  fewer new tokens than that wait for more of them, unless the text has ended

        Tokens are those of `generate` with the whole text. The pieces are tokenised in another process, started by the
        first such call and kept until `close`; `metrics.arrival` says what that hid. Raises what `generate` raises,
        PromptError also when `pieces` fails or goes on beyond max_model_len, and ProducerError.
        """
        output = None
        for chunk in self.stream_from(pieces, sampling_params, chunk_tokens):
            output = chunk.output
        return output

    def stream_from(
        self, pieces: Iterable[str], sampling_params: SamplingParams | None = None, chunk_tokens: int = CHUNK_TOKENS
    ) -> Iterator[StreamChunk]:
        """Yield what each step adds, as `stream`, to a prompt that is still arriving, as in `generate_from`."""
        (params,) = params_of(sampling_params, 1, self.default_sampling_params)
        check_pieces(pieces)
        check_growing(self.engine, chunk_tokens)
        self._producer = self._producer or Producer(self.tokenizer)
        return self._stream_from(pieces, params, chunk_tokens)

    def _stream_from(self, pieces: Iterable[str], params: SamplingParams, chunk_tokens: int) -> Iterator[StreamChunk]:
        with self._producer.read(pieces, clock=self.engine.clock) as arriving:
            prompt = GrowingPrompt(self.engine, arriving, params, chunk_tokens)
            yield from self._stream(prompt.request, profile=False, feed=prompt.feed)

    def _stream(
        self, request: Request, profile: bool, feed: Callable[[], object] = lambda: None
    ) -> Iterator[StreamChunk]:
        self.engine.profile = profile
        mailbox = self._mailboxes[request.request_id] = deque()
        try:
            self.engine.add(request)
            while mailbox or self.engine.is_running(request.request_id):
                if not mailbox:
                    feed()
                    self._step()
                elif isinstance(mailbox[0], Exception):
                    raise mailbox[0]
                else:
                    yield mailbox.popleft()
        finally:
            del self._mailboxes[request.request_id]
            self.engine.abort(request.request_id)
            self.engine.profile = False

    def _step(self) -> list[StreamChunk]:
        """One step of the engine. Open streams find their chunks, or their error, in their mailboxes, whoever
        drives the engine: another stream, or a `generate` between two of their pieces.
        """
        open_streams = [name for name in self._mailboxes if self.engine.is_running(name)]
        try:
            chunks = self.engine.step()
        except Exception as error:
            for name in open_streams:
                if not self.engine.is_running(name):
                    self._mailboxes[name].append(error)
            raise
        make_way(self.engine)
        for chunk in chunks:
            if chunk.request_id in self._mailboxes:
                self._mailboxes[chunk.request_id].append(chunk)
        return chunks

    def _run(self, prompts, sampling_params, use_tqdm: bool, profile: bool, chat: bool) -> list[RequestOutput]:
        params = params_of(sampling_params, len(prompts), self.default_sampling_params)
        requests = [self.engine.make_request(p, s, chat=chat) for p, s in zip(prompts, params, strict=True)]
        for request in requests:
            self.engine.scheduler.check(request)

        outputs: dict[str, RequestOutput | None] = {request.request_id: None for request in requests}
        self.engine.profile = profile
        try:
            for request in requests:
                self.engine.add(request)
            with _progress_bar(len(requests)) if use_tqdm else nullcontext() as bar:
                while not all(outputs.values()):
                    for chunk in self._step():
                        if chunk.output is not None and chunk.request_id in outputs:
                            outputs[chunk.request_id] = chunk.output
                            if bar is not None:
                                bar.update()
        finally:
            for request in requests:
                self.engine.abort(request.request_id)
            self.engine.profile = False
        return list(outputs.values())

    @torch.inference_mode()
    def score(self, prompt: Prompt, start: int = 1) -> list[float]:
        """Log-probability of the prompt's tokens from number `start` on, each given all before it (natural log).

        Raises PromptError, see `logits`.
        """
        scores: list[float] = []
        for logits, ids in self.logits(prompt, start):
            scores += logits.log_softmax(-1).gather(1, ids[:, None])[:, 0].tolist()
        return scores

    def logits(self, prompt: Prompt, start: int = 1, step: int | None = None) -> Iterator[tuple[torch.Tensor, ...]]:
        """Yield (logits [n, V] in float32, ids [n]) that belong together: the tokens from number `start` on, and the
        logits from which each of them would be drawn, a few rows at a time.

        step  tokens per forward pass from there on, after a prefill of those before; 1 takes the way of a decode.
              Default: the token budget for all of them

        Raises PromptError when the prompt does not fit or `start` is not one of its tokens with one before it.
        """
        request = self.engine.make_request(prompt, self.default_sampling_params)
        self.engine.scheduler.check(request)
        return token_logits(self.engine, request.token_ids, self.config.max_num_batched_tokens, start, step)

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a running request; its blocks are free when this returns. None if it is not running."""
        return self.engine.abort(request_id)

    def reset_prefix_cache(self) -> None:
        """Forget what was computed for earlier prompts, so that the next one is computed from its first token."""
        self.engine.scheduler.block_pool.reset_prefix_cache()

    def close(self) -> None:
        """Give the memory back. Further calls raise EngineClosedError."""
        self.engine.close()
        self._close_ranks()
        if self._producer is not None:
            self._producer.close()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc_info) -> None:
        self.close()


def _progress_bar(total: int):
    from tqdm import tqdm

    return tqdm(total=total, desc="generate", unit="prompt")
