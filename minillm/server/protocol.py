"""What clients may send: the OpenAI API's completions and chat completions, as far as we serve them.

A field that stands here has an effect; any other is refused by name. Names that OpenAI's API lacks (`top_k`,
`min_p`, `ignore_eos`, ...) are vLLM's. See https://platform.openai.com/docs/api-reference. Answers are answers.py.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from minillm.sampling_params import SamplingParams

MAX_PROMPTS = 128  # of one request to /v1/completions
MAX_STOPS = 16
MAX_LOGPROBS = 20
SAMPLING = {field.name for field in fields(SamplingParams)}

Stop = Annotated[str, Field(min_length=1, max_length=1000)]
TokenId = Annotated[int, Field(ge=0)]
TokenIds = Annotated[list[TokenId], Field(min_length=1)]


class Strict(BaseModel):
    """No field too many, and "5" is not 5."""

    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(Strict):
    include_usage: bool = False


class GenerationRequest(Strict):
    """What both kinds of request share. null means the model's own default."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = Field(None, description="read and not used: nobody has an account here")
    n: int = Field(1, ge=1, le=64)
    max_tokens: int | None = Field(None, ge=1)
    min_tokens: int | None = Field(None, ge=0)
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    min_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOPS)] | None = None
    ignore_eos: bool | None = None
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    priority: int | None = Field(None, ge=-(2**31), lt=2**31, description="smaller is served first")

    @property
    def num_logprobs(self) -> int | None:
        raise NotImplementedError

    def sampling_params(self, default: SamplingParams) -> SamplingParams:
        """The default with what the client gave. Raises ConfigError naming the field and its range."""
        names = SAMPLING & set(type(self).model_fields) - {"logprobs"}
        given = self.model_dump(include=names, exclude_none=True)
        if isinstance(given.get("stop"), str):
            given["stop"] = (given["stop"],)
        return default.updated(**given, logprobs=self.num_logprobs)


class CompletionRequest(GenerationRequest):
    """POST /v1/completions: one prompt or several, as text or token ids."""

    prompt: (
        str
        | TokenIds
        | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS)]
        | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS)]
    )
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        one = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return [self.prompt] if one else self.prompt


class TextPart(Strict):
    type: Literal["text"]
    text: str


class Message(Strict):
    """`name` is part of the protocol; whether it shows is up to the model's chat template."""

    role: Literal["system", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None

    def for_template(self) -> dict[str, str]:
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": self.role, "content": content, **({"name": self.name} if self.name else {})}


class ChatRequest(GenerationRequest):
    """POST /v1/chat/completions. Without a limit the answer ends where the model ends it, or the context does."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: int | None = Field(None, ge=1, description="the newer name of max_tokens, and stronger")
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def sampling_params(self, default: SamplingParams) -> SamplingParams:
        params = super().sampling_params(default)
        return params if self.max_completion_tokens is None else params.updated(max_tokens=self.max_completion_tokens)
