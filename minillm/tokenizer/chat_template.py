"""Chat messages to prompt text, with the model's own Jinja template in Jinja's sandbox.

A template is code from a model file, so it runs without access to Python's internals. Offers what
templates of Hugging Face models expect. Imported by `tokenizer.py` at the first chat: it is the only user of Jinja.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from minillm.errors import PromptError


class ChatTemplate:
    """A compiled template. Raises PromptError when its source is not valid Jinja."""

    def __init__(self, source: str):
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag]
        )
        environment.filters["tojson"] = _to_json
        environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise PromptError(f"the model's chat template is not valid Jinja: {error}") from error

    def render(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
        """The prompt text. Raises PromptError when these are no messages or the template fails on them."""
        if isinstance(messages, (str, bytes)) or not isinstance(messages, Sequence) or not messages:
            raise PromptError(f"messages={messages!r:.80} must be a non-empty list of dictionaries")
        for message in messages:
            if not _is_message(message):
                raise PromptError(f'{message!r:.80} is not a message such as {{"role": "user", "content": "Hi"}}')
        try:
            return self._template.render(messages=[dict(message) for message in messages], **variables)
        except Exception as error:  # the template is foreign code; whatever it raises is about these messages
            raise PromptError(
                f"the model's chat template refused the messages: {type(error).__name__}: {error}"
            ) from error


def _is_message(message) -> bool:
    """Content is text, or parts for templates that know them; a message may lack it that has something else to say."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        return False
    content = message.get("content")
    return isinstance(content, (str, list, Mapping)) or content is None and bool(set(message) - {"role", "content"})


class _GenerationTag(Extension):
    """{% generation %} ... {% endgeneration %} marks training targets; for inference its content is plain text."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    """Jinja's own filter would escape HTML characters."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
