"""The text of one sequence while it grows: what may be shown now, and where a stop string ends it.

Text is held back while it could still turn out otherwise: the bytes of an unfinished character (the
tokenizer's business), and a tail that is the beginning of a stop string. So a stop string never leaks
into a stream, however tokens cut it, and nothing is lost when it does not come. Built in lesson 01.
"""

from __future__ import annotations

from minillm.sampling_params import SamplingParams
from minillm.tokenizer import IncrementalDecoder, Tokenizer


class Detokenizer:
    """Token ids in, text out. All returned pieces joined are `text`, at every moment.

    text         everything released so far
    stop_string  the stop string that ended the text, or None

    The text ends at the stop string that is complete first, character by character, so the result does not
    depend on how tokens cut the text; of two that complete together the longer one counts. As in vLLM, a stop
    string that is complete within the first `min_tokens` tokens does not count.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams):
        self.stop_string: str | None = None
        self._decoder = IncrementalDecoder(tokenizer, params.skip_special_tokens)
        self._params = params
        self._num_tokens = 0
        self._held = ""  # decoded, not released: the beginning of a stop string
        self._released: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self._released)

    def push(self, token_id: int) -> str:
        """The text that may be shown now that this token is known; "" once a stop string was found."""
        self._num_tokens += 1
        return self._release(self._advance(self._decoder.push(token_id)))

    def flush(self) -> str:
        """The rest, when the sequence ends for another reason than a stop string; "" after one."""
        text = self._advance(self._decoder.flush()) + self._held
        self._held = ""
        return self._release(text)

    def _release(self, text: str) -> str:
        self._released.append(text)
        return text

    def _advance(self, new_text: str) -> str:
        """Take in decoded text: what of it, and of the text held so far, can be released."""
        if self.stop_string is not None or not new_text:
            return ""
        window = self._held + new_text
        match = self._first_match(window)
        if match is None:
            end = len(window) - self._length_to_hold(window)
            self._held = window[end:]
            return window[:end]
        start, end = match
        self.stop_string, self._held = window[start:end], ""
        return window[: end if self._params.include_stop_str_in_output else start]

    def _first_match(self, window: str) -> tuple[int, int] | None:
        """(start, end) of the stop string in the window that is complete first and ends in new text."""
        if self._num_tokens <= self._params.min_tokens:
            return None
        matches = []
        for stop in self._params.stop:
            # One that lies wholly in the held text was complete within min_tokens, so it does not count.
            start = window.find(stop, max(0, len(self._held) + 1 - len(stop)))
            if start >= 0:
                matches.append((start, start + len(stop)))
        return min(matches, key=lambda match: (match[1], match[0]), default=None)

    def _length_to_hold(self, window: str) -> int:
        """Length of the longest end of the window that begins a stop string."""
        longest = max((len(stop) for stop in self._params.stop), default=0)
        for start in range(max(0, len(window) - longest + 1), len(window)):
            if any(stop.startswith(window[start:]) for stop in self._params.stop):
                return len(window) - start
        return 0
