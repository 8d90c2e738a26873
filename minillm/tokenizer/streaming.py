r"""Text to token ids while the text is still arriving: the ids of all pieces joined are those of the whole text.

Text is encoded up to a place where nothing that may follow can change the ids before it, and the rest waits. Such a
place lies behind a letter or digit and before a blank or a punctuation mark:

    "The cat sat on the ma"   ->   "The cat sat on the" is certain, " ma" may become " mat"

No pattern of `pretokenize.py` has a word with a letter or digit directly before a blank or mark, each word is found
from its own beginning on, and a blank or mark composes with nothing before it, so both sides can be encoded alone.
Text without any such place (one endless word, a row of emoji) waits for its end. Lesson 17.
"""

from __future__ import annotations

from functools import cached_property

from minillm.tokenizer.pretokenize import check_text
from minillm.tokenizer.tokenizer import Tokenizer

PLACE = r"(?V1)[\p{L}\p{N}](?=[[\s\p{P}]--\p{Pc}])"
"""The character before a place to cut; "_" is left out because it belongs to a word for `single_word` tokens."""


class StreamingEncoder:
    """What `push` and `finish` return, joined, is `tokenizer.encode` of all pieces joined. One text per encoder.

    add_special_tokens  as in `encode`
    """

    def __init__(self, tokenizer: Tokenizer, add_special_tokens: bool = True):
        self._tokenizer = tokenizer
        self._add_special_tokens = add_special_tokens
        self._waiting: list[str] = []  # pieces that are not encoded yet
        self._length = 0  # characters in them
        self._look_at = 0  # length at which it is worth looking for a place again

    def push(self, piece: str) -> list[int]:
        """The ids that have become certain, often none. Raises PromptError as `encode` does."""
        check_text(piece)
        self._waiting.append(piece)
        self._length += len(piece)
        if self._length < self._look_at:
            return []
        text = "".join(self._waiting)
        end = self._last_place(text)
        self._waiting, self._length = [text[end:]], len(text) - end
        self._look_at = 2 * self._length  # a word of a million letters is not searched a million times
        return self._encode(text[:end]) if end else []

    def finish(self) -> list[int]:
        """The ids of the rest."""
        text, self._waiting, self._length = "".join(self._waiting), [], 0
        return self._encode(text)

    def _encode(self, text: str) -> list[int]:
        ids = self._tokenizer.encode(text, self._add_special_tokens)
        self._add_special_tokens = False
        return ids

    def _last_place(self, text: str) -> int:
        """How many characters are certain; 0 when none are."""
        if self._anywhere_is_wrong:
            return 0
        normalize = self._tokenizer._normalize
        for match in self._backwards.finditer(text):
            if normalize(match.group()) != match.group():
                continue  # NFC may end this letter with a mark, which joins the one that follows
            before = text[: match.end()]
            if not (before.endswith(self._openings) or normalize(before).endswith(self._openings)):
                return match.end()
        return 0

    @cached_property
    def _backwards(self):
        import regex

        return regex.compile("(?r)" + PLACE)

    @cached_property
    def _contents(self) -> list[tuple[str, bool, bool]]:
        """(text, rstrip, single_word) of the added tokens, as they are searched for."""
        added, normalize = self._tokenizer._added.values(), self._tokenizer._normalize
        return [(normalize(t.content) if t.normalized else t.content, t.rstrip, t.single_word) for t in added]

    @cached_property
    def _openings(self) -> tuple[str, ...]:
        """Ends of a text behind which an added token may go on, or still take the blanks that follow."""
        import regex

        place = regex.compile(PLACE)
        inside = {content[: m.end()] for content, _, _ in self._contents for m in place.finditer(content)}
        greedy = {content for content, rstrip, _ in self._contents if rstrip and content}
        return tuple(sorted(inside | greedy))

    @cached_property
    def _anywhere_is_wrong(self) -> bool:
        """A token that must not touch a word looks at the letter before it, which a cut would hide."""
        import regex

        begins = regex.compile(PLACE)
        return any(single_word and begins.match("a" + content[:1]) for content, _, single_word in self._contents)
