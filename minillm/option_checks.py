"""How an option is declared, and what it is asked when it is set: is it a known word, an integer, within a range.

`EngineConfig`, `ModelConfig` and `SamplingParams` ask it of their fields. A wrong value raises ConfigError, which names
the option, the value and the limit.
"""

from __future__ import annotations

import difflib
from dataclasses import field, fields
from typing import Any

from minillm.errors import ConfigError


def option(default, help: str) -> Any:
    """A field of a dataclass with the sentence that `--help` shows for it; `cli/options.py` adds words and default."""
    return field(default=default, metadata={"help": help})


def known(cls, options: dict) -> dict:
    """These options, when all of them are fields of the dataclass `cls`; else the error names the nearest field."""
    names = [f.name for f in fields(cls)]
    for name in options:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(names)}"
            raise ConfigError(f"unknown {cls.__name__} option {name!r}{hint}")
    return options


def choice(name: str, value, allowed: tuple) -> None:
    """One of these words."""
    if not isinstance(value, (str, type(None))) or value not in allowed:  # an array answers `in` with an array
        raise ConfigError(f"{name}={value!r} is not one of {', '.join(map(str, allowed))}")


def truth(name: str, value) -> None:
    """True or False, and not 0 or 1."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name}={value!r} must be True or False")


def several(name: str, value) -> tuple:
    """A list, a set or a tuple as a tuple; None as an empty one."""
    if value is not None and not isinstance(value, (list, tuple, set, frozenset)):
        raise ConfigError(f"{name}={value!r} must be a list")
    return tuple(value or ())


def integer(name: str, value, low: int) -> None:
    """An integer from `low` on; True is none."""
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ConfigError(f"{name}={value!r} must be an integer of at least {low}")


def positive(name: str, value) -> None:
    """An integer from 1 on."""
    integer(name, value, 1)


def between(name: str, value, low: float, high: float, open_low: bool = False) -> None:
    """A number from `low` (or above it, with `open_low`) to `high`; NaN is none."""
    ok = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not ok or not (low < value if open_low else low <= value) or not value <= high:
        raise ConfigError(f"{name}={value!r} is not in {'(' if open_low else '['}{low:g}, {high:g}]")
