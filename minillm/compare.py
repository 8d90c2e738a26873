"""Comparisons of ways to do the same thing, each with its ledger: `minillm bench --compare NAME`.

A comparison names what stays equal, where a way wins, where it loses, and how its own numbers could mislead. Times
are taken in turns within one run and compared round by round, so that a slow moment of the machine hits both sides.
To add one: a module with `compare(llm, quick) -> Comparison` and `check(config)`, and its name in COMPARISONS.
"""

from __future__ import annotations

import importlib
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields

from minillm.config import EngineConfig
from minillm.errors import ConfigError

COMPARISONS = {
    "attention": "minillm.compare_attention",
    "precision": "minillm.compare_precision",
    "alignment": "minillm.compare_alignment",
    "pipeline": "minillm.compare_pipeline",
}


@dataclass(frozen=True)
class Ledger:
    invariant: str
    wins: str
    loses: str
    misleads: str


@dataclass(frozen=True)
class Comparison:
    """One table and its ledger.

    name     as in COMPARISONS
    setting  what was held fixed: model, tokens, device, repeats
    columns  heading -> (format of a value, what the column means)
    rows     one dict per way, "name" and the columns; None where a column has no meaning
    notes    what the figures of this run say, one sentence each
    """

    name: str
    setting: dict
    columns: dict[str, tuple[str, str]]
    rows: list[dict]
    notes: list[str]
    ledger: Ledger

    def lines(self) -> list[str]:
        """The comparison as text for a terminal."""
        shown = [", ".join(f"{key} {value}" for key, value in self.setting.items()), ""]
        table = [["", *self.columns]] + [self._cells(row) for row in self.rows]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        for name, *cells in table:
            cells = (f"{cell:>{width}}" for cell, width in zip(cells, widths[1:], strict=True))
            shown.append("  ".join([f"{name:<{widths[0]}}", *cells]))
        shown += ["", *(f"{heading}: {meaning}" for heading, (_, meaning) in self.columns.items()), "", *self.notes, ""]
        return shown + [f"{key}: {value}" for key, value in self._ledger().items()]

    def as_dict(self) -> dict:
        """The comparison, ready for JSON."""
        rows = [{key: _rounded(value) for key, value in row.items()} for row in self.rows]
        meanings = {heading: meaning for heading, (_, meaning) in self.columns.items()}
        return {
            "compare": self.name,
            **self.setting,
            "columns": meanings,
            "rows": rows,
            "notes": self.notes,
            "ledger": self._ledger(),
        }

    def _ledger(self) -> dict[str, str]:
        names = {"wins": "wins where", "loses": "loses where", "misleads": "could mislead"}
        return {names.get(key, key): value for key, value in asdict(self.ledger).items()}

    def _cells(self, row: dict) -> list[str]:
        shown = ("-" if row[key] is None else format(row[key], form) for key, (form, _) in self.columns.items())
        return [row["name"], *shown]


def compare(name: str, llm, quick: bool = False) -> Comparison:
    """Run the comparison of this name on a loaded engine. Raises ConfigError as `check` does."""
    check(name, llm.config)
    return importlib.import_module(COMPARISONS[name]).compare(llm, quick)


def check(name: str, config: EngineConfig) -> None:
    """Raises ConfigError for options of an engine on which this comparison cannot be made; no engine is needed yet."""
    importlib.import_module(COMPARISONS[name]).check(config)


def check_left_out(name: str, config: EngineConfig, options: Sequence[str], why: str) -> None:
    """Raises ConfigError for one of these options that was given: the comparison would not do what it asks for."""
    for field in fields(config):
        value = getattr(config, field.name)
        if field.name in options and value != field.default:
            raise ConfigError(f"--compare {name} {why}, so {field.name}={value!r} would be left unheard; drop it")


def in_turns(runs: dict[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """What each run returns (its seconds), `repeats` rounds over all of them after one that is thrown away."""
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(repeats + 1):
        for name, run in runs.items():
            seconds = run()
            if turn:
                taken[name].append(seconds)
    return taken


def ratio(a: list[float], b: list[float]) -> float:
    """How many times b's seconds a takes: the median over rounds."""
    return statistics.median(x / y for x, y in zip(a, b, strict=True))


def _rounded(value):
    return float(f"{value:.4g}") if isinstance(value, float) else value
