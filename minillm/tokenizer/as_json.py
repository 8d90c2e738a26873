"""A tokenizer as one line of JSON, for another process that is to encode as this one does.

The reverse of `from_json.py` would write files for other libraries; this carries the arguments of `Tokenizer`.
"""

from __future__ import annotations

import json
from dataclasses import asdict

from minillm.tokenizer.pretokenize import AddedToken, normalize_nfc
from minillm.tokenizer.tokenizer import Tokenizer


def dumps(tokenizer: Tokenizer) -> str:
    """One line; `loads` makes a tokenizer of it that encodes and decodes alike."""
    return json.dumps(
        {
            "tokens": tokenizer._tokens,
            "merges": tokenizer.merges,
            "pre": tokenizer._pre,
            "added_tokens": [asdict(token) for token in tokenizer._added.values()],
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_ids": tokenizer.eos_token_ids,
            "add_bos": tokenizer.add_bos,
            "ignore_merges": tokenizer._ignore_merges,
            "nfc": tokenizer._normalize is normalize_nfc,
            "chat_template": tokenizer.chat_template,
            "vocab_size": tokenizer.vocab_size,
        }
    )


def loads(text: str) -> Tokenizer:
    """The tokenizer that `dumps` was given. Raises CheckpointError when its parts contradict each other."""
    arguments = json.loads(text)
    arguments["added_tokens"] = [AddedToken(**token) for token in arguments["added_tokens"]]
    arguments["merges"] = [tuple(pair) for pair in arguments["merges"]]
    return Tokenizer(**arguments)
