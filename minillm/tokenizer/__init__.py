"""Text to token ids and back: the first house on the street.

`tokenizer.py` is the house itself; `pretokenize.py` cuts text into words, `bpe.py` merges the bytes of a word
and learns merges, `streaming.py` encodes text while it arrives, `chat_template.py` writes a conversation as text,
`from_gguf.py` and `from_json.py` read what a model's files say, `as_json.py` hands a tokenizer to another process.
Built in lesson 01.
"""

from minillm.tokenizer.pretokenize import AddedToken
from minillm.tokenizer.streaming import StreamingEncoder
from minillm.tokenizer.tokenizer import IncrementalDecoder, Tokenizer

__all__ = ["AddedToken", "IncrementalDecoder", "StreamingEncoder", "Tokenizer"]
