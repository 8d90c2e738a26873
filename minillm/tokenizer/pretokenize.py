r"""Cutting text before any merge: first at the added tokens (<|im_end|> ...), then into words.

Merges never cross a word's edge, so the pattern decides whether "don't", "123" or three spaces can become
one token. Each model family was trained with one of four patterns, under the names GGUF files use:

            "it's 1234\n\n  x" becomes
    gpt2    it 's _1234 \n\n_ _x             (_ is a space)
    smollm  it 's _ 1 2 3 4 \n\n_ _x         digits stand alone
    llama3  it 's _ 123 4 \n\n _ _x          at most three digits, newlines end a word, 'S in capitals too
    qwen2   it 's _ 1 2 3 4 \n\n _ _x        the same with single digits
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from minillm.errors import ConfigError, PromptError

if TYPE_CHECKING:
    import regex

# As tokenizer.json files spell them, except smollm: there a step that cuts out single digits runs before gpt2's
# pattern, so that blanks before a digit end like blanks before the end of the text. One pattern says both.
WORD_PATTERNS = {
    "gpt2": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "smollm": r"\p{N}|'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?![^\s\p{N}])|\s+",
    "llama3": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    "qwen2": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
}
SUPPORTED = "supported: byte-level BPE with the pre-tokenization of " + ", ".join(WORD_PATTERNS)


def check_pattern_name(pre: str) -> None:
    """Raises ConfigError unless `pre` names one of the patterns."""
    if pre not in WORD_PATTERNS:
        raise ConfigError(f"pre={pre!r} is not one of {', '.join(WORD_PATTERNS)}")


def word_pattern(pre: str) -> regex.Pattern:
    """The compiled pattern named `pre`; its `findall` returns words that join to the text. Raises ConfigError."""
    import regex  # at the first text: a model that is fed token ids does without it

    check_pattern_name(pre)
    return regex.compile(WORD_PATTERNS[pre])


def check_text(text: str) -> None:
    """Raises PromptError when `text` is not a str or cannot be written as UTF-8 (lone surrogates)."""
    if not isinstance(text, str):
        raise PromptError(f"expected text (str), got {type(text).__name__}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise PromptError(
            f"character {error.start} of the text is a lone surrogate (U+{ord(text[error.start]):04X}), which UTF-8 "
            'cannot hold; clean the text first, for example text.encode("utf-8", "replace").decode()'
        ) from error


@dataclass(frozen=True)
class AddedToken:
    """A token found in the text itself, before words and merges. Field names are tokenizer.json's."""

    content: str
    id: int
    special: bool = True  # hidden by skip_special_tokens
    lstrip: bool = False  # also takes the blanks on its left
    rstrip: bool = False  # also takes the blanks on its right
    single_word: bool = False  # not inside a word
    normalized: bool = False  # searched after normalisation instead of before


class AddedTokenSplitter:
    """Cuts text at its added tokens; where two begin at the same place, the longer one is taken."""

    def __init__(self, added_tokens: Sequence[AddedToken]):
        self._by_content = {token.content: token for token in added_tokens if token.content}
        longest_first = sorted(self._by_content, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None

    def split(self, text: str) -> Iterator[str | int]:
        """Pieces in order: plain text as a str, an added token as its id."""
        start = 0  # of the text not yet handed out
        for match in self._pattern.finditer(text) if self._pattern else ():
            token = self._by_content[match.group()]
            first, last = match.span()
            if token.single_word and (_is_word(text[first - 1 : first]) or _is_word(text[last : last + 1])):
                continue
            while token.lstrip and first > start and _is_blank(text[first - 1]):
                first -= 1
            while token.rstrip and last < len(text) and _is_blank(text[last]):
                last += 1
            if start < first:
                yield text[start:first]
            yield token.id
            start = last
        if start < len(text):
            yield text[start:]


def normalize_nfc(text: str) -> str:
    """Composed characters where Unicode has them: "e" + U+0301 becomes "é"."""
    return unicodedata.normalize("NFC", text)


def _is_blank(char: str) -> bool:
    import regex

    return bool(regex.match(r"\s", char))


def _is_word(char: str) -> bool:
    import regex

    return bool(regex.match(r"\w", char))
