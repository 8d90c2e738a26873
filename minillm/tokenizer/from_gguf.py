"""The tokenizer inside a GGUF file, read into the arguments of `Tokenizer`.

Takes metadata that is already decoded and opens no file. Only byte-level BPE (tokenizer.ggml.model "gpt2")
is understood; anything else is refused with what was found and what is supported.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from minillm.errors import CheckpointError
from minillm.tokenizer.pretokenize import SUPPORTED, AddedToken

# tokenizer.ggml.pre -> our name
PRE_NAMES = {
    "gpt-2": "gpt2",
    "gpt2": "gpt2",
    "smollm": "smollm",
    "llama-bpe": "llama3",
    "llama3": "llama3",
    "llama-v3": "llama3",
    "qwen2": "qwen2",
}
# tokenizer.ggml.token_type, as the GGUF format numbers them (1 is an ordinary token)
UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 2, 3, 4, 5


def gguf_arguments(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments for `Tokenizer` from GGUF metadata.

    Reads tokenizer.ggml.{model, pre, tokens, merges, token_type, bos_token_id, eos_token_id, eot_token_id,
    eom_token_id, add_bos_token, add_eos_token} and tokenizer.chat_template. Raises CheckpointError.
    """
    model, pre = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre")
    if model != "gpt2":
        raise CheckpointError(f"tokenizer.ggml.model is {model!r}, this reads 'gpt2'; {SUPPORTED}")
    if pre not in PRE_NAMES:
        raise CheckpointError(f"tokenizer.ggml.pre is {pre!r}, this reads {', '.join(PRE_NAMES)}; {SUPPORTED}")
    if fields.get("tokenizer.ggml.add_eos_token"):
        raise CheckpointError("tokenizer.ggml.add_eos_token is true; an end token after every prompt is not supported")
    tokens, merges, types = (_list(fields, name) for name in ("tokens", "merges", "token_type"))
    if len(types) != len(tokens):
        raise CheckpointError(f"tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens")

    pre = PRE_NAMES[pre]
    bos_id = fields.get("tokenizer.ggml.bos_token_id")
    add_bos_default = pre == "llama3" and bos_id is not None  # files leave it out where llama.cpp knows it
    end_ids = [fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    return {
        "tokens": ["" if kind == UNUSED else token for token, kind in zip(tokens, types, strict=True)],
        "merges": [tuple(merge.split(" ", 1)) for merge in merges],  # "a b"; the byte alphabet has no blank
        "pre": pre,
        "added_tokens": [
            AddedToken(token, id, special=kind != USER_DEFINED)
            for id, (token, kind) in enumerate(zip(tokens, types, strict=True))
            if kind in (UNKNOWN, CONTROL, USER_DEFINED) and token
        ],
        "ignore_merges": pre == "llama3",
        "nfc": pre == "qwen2",
        "bos_token_id": bos_id,
        "add_bos": bool(fields.get("tokenizer.ggml.add_bos_token", add_bos_default)),
        "eos_token_ids": tuple(id for id in end_ids if id is not None),
        "chat_template": fields.get("tokenizer.chat_template"),
    }


def _list(fields: Mapping[str, Any], name: str) -> list:
    value = fields.get(f"tokenizer.ggml.{name}")
    if not isinstance(value, list) or not value:
        raise CheckpointError(f"tokenizer.ggml.{name} is missing or empty; {SUPPORTED}")
    return value
