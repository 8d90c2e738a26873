"""Sparse attention by name: `attention="sliding_window(1024, sinks=4)"` as a checked object.

Three methods, one frozen dataclass each. The text is taken apart by hand, never evaluated, so that it may come
from a command line or a server's configuration. What the methods compute stands in `minillm/attention/sparse/`.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, fields

from minillm.errors import ConfigError


class _Method:
    name: str

    def __str__(self) -> str:
        given = ((field.name, getattr(self, field.name)) for field in fields(self))
        return f"{self.name}({', '.join(f'{key}={value}' for key, value in given if value is not None)})"

    def _integer(self, key: str, low: int) -> None:
        value = getattr(self, key)
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise ConfigError(f"{self.name}: {key}={value!r} must be an integer of at least {low}")


@dataclass(frozen=True)
class SlidingWindow(_Method):
    """A query sees its last `window` keys, its own included, and the first `sinks` keys of the request (A12).

    window None: that of the model's own windowed layers, which then see the sinks too; other layers stay dense.
    """

    window: int | None = None
    sinks: int = 0
    name = "sliding_window"

    def __post_init__(self):
        self._integer("sinks", 0)
        if self.window is not None:
            self._integer("window", 1)
        elif not self.sinks:
            raise ConfigError("sliding_window() changes nothing: give a window, as in sliding_window(1024), or sinks")


@dataclass(frozen=True)
class DynamicBlocks(_Method):
    """Blocks of queries see the blocks of keys that score highest; sink and diagonal are always kept (A14).

    mass   keep blocks until the estimated attention on them reaches this share; 1 keeps all
    top    or: keep this many blocks per block of queries, the sink and the diagonal counted
    block  tokens of a block, a power of two
    """

    mass: float | None = None
    top: int | None = None
    block: int = 64
    name = "dynamic_blocks"

    def __post_init__(self):
        if (self.mass is None) == (self.top is None):
            raise ConfigError(
                f"dynamic_blocks: mass={self.mass!r} and top={self.top!r}; give one of them, as in "
                "dynamic_blocks(mass=0.95) or dynamic_blocks(top=8)"
            )
        if self.top is not None:
            self._integer("top", 1)
        else:
            _share("dynamic_blocks", "mass", self.mass)
        self._integer("block", 16)
        if self.block & (self.block - 1):
            raise ConfigError(f"dynamic_blocks: block={self.block} is not a power of two; use 16, 32, 64 or 128")


@dataclass(frozen=True)
class LSH(_Method):
    """A query sees the nearest keys before it that were hashed to its bucket, in any of several rounds (A13).

    rounds   independent hash functions; a query sees what any of them finds
    bucket   keys of its own bucket that a query sees per round, the latest ones
    buckets  values of a hash function: even, or 1 for no hashing
    sinks    first keys of the request that every query sees besides; hashing misses them
    seed     of the random directions
    """

    rounds: int = 4
    bucket: int = 64
    buckets: int = 16
    sinks: int = 0
    seed: int = 0
    name = "lsh"

    def __post_init__(self):
        for key, low in (("rounds", 1), ("bucket", 1), ("buckets", 1), ("sinks", 0), ("seed", 0)):
            self._integer(key, low)
        if self.buckets % 2 and self.buckets != 1:
            raise ConfigError(f"lsh: buckets={self.buckets} must be even (each direction has two ends), or 1")


Sparse = SlidingWindow | DynamicBlocks | LSH
METHODS = {method.name: method for method in (SlidingWindow, DynamicBlocks, LSH)}


def is_sparse(text: str) -> bool:
    """Does this value of the option `attention` name a sparse method, rightly spelled or not?"""
    return isinstance(text, str) and ("(" in text or text.strip() in METHODS)


def parse(text: str) -> Sparse:
    """The method that `name(value, key=value, ...)` asks for; raises ConfigError naming what is wrong with it."""
    shape = re.fullmatch(r"\s*(\w+)\s*(?:\(([^()]*)\))?\s*", text)
    if shape is None:
        raise ConfigError(f"attention={text!r} cannot be read; write it like sliding_window(1024, sinks=4)")
    name, inside = shape.groups()
    if name not in METHODS:
        raise ConfigError(f"attention={text!r}: {name!r} is not one of {', '.join(METHODS)}{_near(name, METHODS)}")
    method = METHODS[name]
    known = [field.name for field in fields(method)]
    given: dict[str, int | float] = {}
    named = False
    for position, piece in enumerate((inside or "").split(",") if (inside or "").strip() else []):
        key, equals, value = (part.strip() for part in piece.rpartition("="))
        if not equals:
            if named or position >= len(known):
                where = "stands behind a named value and has no name" if named else "is one value too many"
                raise ConfigError(f"attention={text!r}: {value!r} {where}; {name} takes {', '.join(known)}")
            key = known[position]
        named = bool(equals)
        if key not in known:
            raise ConfigError(f"attention={text!r}: {name} has no {key!r}, only {', '.join(known)}{_near(key, known)}")
        if key in given:
            raise ConfigError(f"attention={text!r}: {key} is given twice")
        given[key] = _number(text, key, value)
    return method(**given)


def check_model(text: str, sliding_window: int | None) -> None:
    """Raise ConfigError when this value of `attention` would change nothing in a model with this window, or none."""
    method = parse(text) if is_sparse(text) else None
    if isinstance(method, SlidingWindow) and method.window is None and sliding_window is None:
        raise ConfigError(f"attention={text!r} adds sinks to the model's own window, and this model has none; give one")


def _number(text: str, key: str, value: str) -> int | float:
    try:
        return int(value) if re.fullmatch(r"[+-]?\d+", value) else float(value)
    except ValueError:  # Python reads no integer of more than 4,300 digits either
        raise ConfigError(f"attention={text!r:.200}: {key}={value!r:.80} is not a number") from None


def _share(name: str, key: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 1:
        raise ConfigError(f"{name}: {key}={value!r} is not in (0, 1]; 1 keeps everything")


def _near(word: str, known) -> str:
    near = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""
