"""Text to token ids and back: our own byte-level BPE.

The interface comes first; the bodies follow in the next commits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


class Tokenizer:
    """Byte-level BPE with the vocabulary of one model."""

    vocab_size: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]

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
        raise NotImplementedError

    @classmethod
    def from_tokenizer_json(
        cls, path: str | Path, *, vocab_size: int | None = None, extra_eos_ids: Iterable[int] = ()
    ) -> Tokenizer:
        """The tokenizer of a Hugging Face folder (or of a tokenizer.json in one), with the chat template and the
        end-of-sequence ids of the files beside it. Keywords as in `from_gguf`. Raises CheckpointError.
        """
        raise NotImplementedError

    @classmethod
    def bytes_only(cls, vocab_size: int = 257) -> Tokenizer:
        """One token per byte (id = byte value) and <|end|> = 256, for random models; ids from 257 decode to ""."""
        raise NotImplementedError
