"""Token ids of a request that has none: what the prefix cache compares is a name, not a text.

A simulated prompt is a stretch of an endless text with a name. Two prompts of one name begin alike, and a slice of
the tokens is the name with its bounds, so a block is hashed and compared in the same time whatever its size.
"""

from __future__ import annotations


class NamedTokens(list):
    """A list of `length` zeros whose slices say which text they are from.

    text    name of the text that the first `shared` tokens are from; None: of a text of its own
    shared  tokens that come from it, None: all, those included that will be generated
    own     name of the text that everything behind them is from
    """

    def __init__(self, length: int, own, text=None, shared: int | None = None):
        super().__init__((0,) * length)
        self.own = own
        self.text = own if text is None else text
        self.shared = shared if text is not None else None

    def __getitem__(self, index):
        if not isinstance(index, slice):
            return super().__getitem__(index)
        whole = self.shared is None or index.stop <= self.shared
        return ((self.text if whole else self.own, index.start, index.stop),)
