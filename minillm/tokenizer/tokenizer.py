"""Text to token ids and back: our own byte-level BPE, equal to the `tokenizers` library token by token.

The way of a text: cut at added tokens (`pretokenize.py`), cut into words, each word's bytes merged
(`bpe.py`), the parts looked up. Nothing is unknown and nothing is lost, as long as the vocabulary has all
256 bytes; bytes it lacks (SmolLM2 lacks 21, mostly invalid in UTF-8) are dropped, as in the library.
Reading files is `from_gguf.py` and `from_json.py`. Built in lesson 01.
"""

from __future__ import annotations

import codecs
import operator
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minillm.errors import CheckpointError, ConfigError, PromptError
from minillm.tokenizer.bpe import BYTE_TO_CHAR, merge_word, to_alphabet, to_bytes, train_merges
from minillm.tokenizer.from_gguf import gguf_arguments
from minillm.tokenizer.from_json import json_arguments
from minillm.tokenizer.pretokenize import (
    AddedToken,
    AddedTokenSplitter,
    check_pattern_name,
    check_text,
    normalize_nfc,
    word_pattern,
)

if TYPE_CHECKING:
    from minillm.tokenizer.chat_template import ChatTemplate

MAX_CACHED_WORDS = 65_536
MAX_CACHED_LENGTH = 64  # characters; longer words rarely come twice


class Tokenizer:
    """Byte-level BPE with the vocabulary of one model. Safe to share between threads.

    tokens         id -> token in GPT-2's byte alphabet (added tokens as plain text); "" is an unused id
    merges         pairs of tokens, learnt first to learnt last
    pre            how text is cut into words: gpt2, smollm, llama3 or qwen2
    added_tokens   found inside text before anything else; those marked special are hidden by skip_special_tokens
    add_bos        encode() puts bos_token_id first unless told otherwise
    ignore_merges  a word that is a token as a whole is taken as it is (llama3)
    nfc            compose characters first (qwen2)
    chat_template  Jinja source
    vocab_size     rows of the model's embedding where they are more than the tokens; those ids decode to ""
    Raises CheckpointError when the parts contradict each other.
    """

    def __init__(
        self,
        tokens: Sequence[str],
        merges: Iterable[tuple[str, str]],
        *,
        pre: str = "gpt2",
        added_tokens: Iterable[AddedToken] = (),
        bos_token_id: int | None = None,
        eos_token_ids: Iterable[int] = (),
        add_bos: bool = False,
        ignore_merges: bool = False,
        nfc: bool = False,
        chat_template: str | None = None,
        vocab_size: int | None = None,
    ):
        added_tokens = list(added_tokens)
        self.vocab_size = len(tokens) if vocab_size is None else vocab_size
        self.bos_token_id = bos_token_id
        self.eos_token_ids = tuple(dict.fromkeys(eos_token_ids))
        self.add_bos = add_bos
        self.chat_template = chat_template
        self.special_tokens = {token.content: token.id for token in added_tokens if token.special}

        self._tokens = list(tokens)
        self._ids = {token: id for id, token in enumerate(tokens) if token}
        self._ranks = {pair: rank for rank, pair in enumerate(merges)}
        self._added = {token.id: token for token in added_tokens}
        self._special_ids = frozenset(self.special_tokens.values())
        check_pattern_name(pre)
        self._pre = pre
        self._normalize = normalize_nfc if nfc else str
        self._raw_splitter = AddedTokenSplitter([t for t in added_tokens if not t.normalized])
        self._splitter = AddedTokenSplitter(
            [replace(t, content=self._normalize(t.content)) for t in added_tokens if t.normalized]
        )
        self._ignore_merges = ignore_merges
        self._word_ids: dict[str, list[int]] = {}
        self._check()

    @classmethod
    def from_gguf(
        cls, fields: Mapping[str, Any], *, vocab_size: int | None = None, extra_eos_ids: Iterable[int] = ()
    ) -> Tokenizer:
        """The tokenizer inside a GGUF file.

        fields         metadata already decoded, such as {"tokenizer.ggml.tokens": [...], ...}; other keys are ignored
        vocab_size     rows of the model's embedding when there are more of them than tokens; the rest decode to ""
        extra_eos_ids  joined with the file's own end-of-sequence ids
        Raises CheckpointError.
        """
        return cls._from_arguments(gguf_arguments(fields), vocab_size, extra_eos_ids)

    @classmethod
    def from_tokenizer_json(
        cls, path: str | Path, *, vocab_size: int | None = None, extra_eos_ids: Iterable[int] = ()
    ) -> Tokenizer:
        """The tokenizer of a Hugging Face folder (or of a tokenizer.json in one), with the chat template and the
        end-of-sequence ids of the files beside it. Keywords as in `from_gguf`. Raises CheckpointError.
        """
        return cls._from_arguments(json_arguments(path), vocab_size, extra_eos_ids)

    @classmethod
    def _from_arguments(cls, arguments: dict, vocab_size: int | None, extra_eos_ids: Iterable[int]) -> Tokenizer:
        eos_token_ids = (*arguments.pop("eos_token_ids"), *extra_eos_ids)
        return cls(**arguments, eos_token_ids=eos_token_ids, vocab_size=vocab_size)

    @classmethod
    def bytes_only(cls, vocab_size: int = 257) -> Tokenizer:
        """One token per byte (id = byte value) and <|end|> = 256, for random models; ids from 257 decode to ""."""
        end = AddedToken("<|end|>", 256)
        return cls([*BYTE_TO_CHAR, end.content], [], added_tokens=[end], eos_token_ids=(end.id,), vocab_size=vocab_size)

    @classmethod
    def train(
        cls, texts: str | Iterable[str], vocab_size: int, *, pre: str = "gpt2", special_tokens: Sequence[str] = ()
    ) -> Tokenizer:
        """A tokenizer learnt from `texts`: ids 0-255 are the bytes, then the merges, then `special_tokens`.

        Deterministic: see `bpe.train_merges` for ties. The vocabulary is smaller than asked for when the texts
        have too few pairs. Raises ConfigError when `vocab_size` has no room for the bytes and special tokens.
        """
        num_merged = vocab_size - len(BYTE_TO_CHAR) - len(special_tokens)
        if num_merged < 0:
            raise ConfigError(
                f"vocab_size={vocab_size} is less than {len(BYTE_TO_CHAR)} bytes + {len(special_tokens)} special tokens"
            )
        pattern, nfc = word_pattern(pre), pre == "qwen2"
        word_counts: Counter[str] = Counter()
        for text in [texts] if isinstance(texts, str) else texts:
            check_text(text)
            word_counts.update(map(to_alphabet, pattern.findall(normalize_nfc(text) if nfc else text)))
        merges = train_merges(word_counts, num_merged)
        tokens = list(dict.fromkeys([*BYTE_TO_CHAR, *map("".join, merges)]))
        added = [AddedToken(content, len(tokens) + i) for i, content in enumerate(special_tokens)]
        return cls([*tokens, *special_tokens], merges, pre=pre, added_tokens=added, nfc=nfc)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`. Added tokens written in the text become their ids, as in the `tokenizers` library.

        add_special_tokens  put the bos token first if the model wants one; a chat prompt already holds it
        Raises PromptError when `text` is not a str or cannot be written as UTF-8 (lone surrogates).
        """
        check_text(text)
        ids = [self.bos_token_id] if add_special_tokens and self.add_bos else []
        for raw_piece in self._raw_splitter.split(text):
            pieces = [raw_piece] if isinstance(raw_piece, int) else self._splitter.split(self._normalize(raw_piece))
            for piece in pieces:
                if isinstance(piece, int):
                    ids.append(piece)
                    continue
                for word in self._words.findall(piece):
                    ids += self._word_ids.get(word) or self._encode_word(word)
        return ids

    def _encode_word(self, word: str) -> list[int]:
        """Merge one word and remember it; text repeats its words, so most are found in the cache."""
        symbols = to_alphabet(word)
        if self._ignore_merges and symbols in self._ids:
            ids = [self._ids[symbols]]
        else:
            known = [char for char in symbols if char in self._ids]
            ids = [self._ids[token] for token in merge_word(known, self._ranks)]
        if len(word) <= MAX_CACHED_LENGTH:
            if len(self._word_ids) >= MAX_CACHED_WORDS:
                self._word_ids.clear()
            self._word_ids[word] = ids
        return ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`; bytes that are not UTF-8 become U+FFFD. Raises PromptError for ids out of range."""
        ids = self.check_ids(ids)
        hidden = self._special_ids if skip_special_tokens else ()
        return b"".join([self.token_bytes(id) for id in ids if id not in hidden]).decode("utf-8", errors="replace")

    def token_bytes(self, id: int) -> bytes:
        """The bytes of one token: rarely whole characters. Raises PromptError for an id out of range."""
        if not 0 <= id < self.vocab_size:
            raise PromptError(f"token id {id} is outside the vocabulary: 0 to {self.vocab_size - 1}")
        if id in self._added:
            return self._added[id].content.encode("utf-8")
        return to_bytes(self._tokens[id]) if id < len(self._tokens) else b""

    def check_ids(self, ids: Iterable[int]) -> list[int]:
        """`ids` as a list of Python ints. Raises PromptError unless all are integers inside the vocabulary."""
        try:
            if isinstance(ids, (str, bytes, Mapping, Set)):
                raise TypeError("not integers in an order")
            given = list(ids)
            checked = [operator.index(id) for id in given]
            if bool in map(type, given):
                raise TypeError("True is no token")
        except TypeError as error:
            raise PromptError(f"expected a list of token ids (integers), got {ids!r:.80}") from error
        for id in checked:
            if not 0 <= id < self.vocab_size:
                self.token_bytes(id)  # raises
        return checked

    def is_special(self, id: int) -> bool:
        """Whether skip_special_tokens hides this id."""
        return id in self._special_ids

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **variables
    ) -> str:
        """The prompt text of a conversation, [{"role": "user", "content": "..."}, ...], special tokens written out.

        add_generation_prompt  end with the opening of the assistant's turn
        variables              more names for the template, such as enable_thinking=False
        Encode the result with add_special_tokens=False. Special tokens inside a message count as such, so
        content from strangers can end its turn. Raises PromptError: no template, wrong messages, a template error.
        """
        if self.chat_template is None:
            raise PromptError("this model has no chat template; give it plain text (generate) instead of messages")
        named = {"bos_token": self.bos_token_id, "eos_token": next(iter(self.eos_token_ids), None)}
        named = {name: self._tokens[id] for name, id in named.items() if id is not None}
        defaults = {"tools": None, "documents": None, "add_generation_prompt": add_generation_prompt, **named}
        return self._compiled_template.render(messages, {**defaults, **variables})

    @property
    def merges(self) -> list[tuple[str, str]]:
        """Pairs of tokens in GPT-2's byte alphabet, learnt first to learnt last: a pair's index is its rank."""
        return list(self._ranks)

    @cached_property
    def _compiled_template(self) -> ChatTemplate:
        from minillm.tokenizer.chat_template import ChatTemplate  # Jinja is imported at the first chat

        return ChatTemplate(self.chat_template)

    @cached_property
    def _words(self):
        return word_pattern(self._pre)

    def _check(self) -> None:
        if self.vocab_size < len(self._tokens):
            raise CheckpointError(f"{len(self._tokens)} tokens, but the model has only {self.vocab_size} rows for them")
        for name, id in [("bos", self.bos_token_id)] + [("eos", id) for id in self.eos_token_ids]:
            if id is not None and not (isinstance(id, int) and 0 <= id < len(self._tokens)):
                raise CheckpointError(f"{name} token id {id!r} is outside the vocabulary of {len(self._tokens)} tokens")
        if self.add_bos and self.bos_token_id is None:
            raise CheckpointError("the tokenizer is to add a bos token but names none")
        for token in self._added.values():
            if not 0 <= token.id < len(self._tokens) or self._tokens[token.id] != token.content:
                raise CheckpointError(f"added token {token.content!r} is not the token with id {token.id}")
        for pair in self._ranks:
            if len(pair) != 2 or not (pair[0] in self._ids and pair[1] in self._ids and pair[0] + pair[1] in self._ids):
                raise CheckpointError(f"merge {' '.join(pair)!r}: a part or the result is not in the vocabulary")


class IncrementalDecoder:
    """Text piece by piece while tokens arrive; an unfinished character waits for its remaining bytes.

    All pieces of `push` and the final `flush` joined are `tokenizer.decode` of all ids.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True):
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, id: int) -> str:
        """The characters that this token completes, often none. Raises PromptError for an id out of range."""
        if self._skip_special_tokens and self._tokenizer.is_special(id):
            return ""
        return self._utf8.decode(self._tokenizer.token_bytes(id))

    def flush(self) -> str:
        """U+FFFD for a character that stayed unfinished, else ""; afterwards a new text may begin."""
        return self._utf8.decode(b"", final=True)
