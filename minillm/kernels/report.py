"""The compile report of `minillm kernels`: rows chosen, compiled one after another, and told as a table.

One row per kernel, GPU, head size, dtype and phase, with what the compiler says about it beside the GPU's limit.
The committed copy, benchmarks/results/compile_report.json, is read by lesson 12. To write it anew:

    python -m minillm kernels --json > benchmarks/results/compile_report.json
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

from tqdm import tqdm

from minillm.errors import ConfigError
from minillm.kernels.compile import compile_row, table, versions
from minillm.kernels.launch import LaunchRow

FIELDS = [field.name for field in fields(LaunchRow) if field.name != "reason"]


def report(only: list[str] = (), dump: str | None = None) -> dict:
    """{"versions", "rows"}: the figures of `compile_row` for every row that `only` leaves.

    only  "field=value" conditions; values of one field are alternatives, fields restrict each other
    dump  folder that takes the Triton IR (.ttir) and the PTX (.ptx) of each row

    Shows its progress on stderr. Raises ConfigError for a field or value that no row has.
    """
    rows = select(table(), only)
    figures = []
    for row in tqdm(rows, desc="compile", unit="kernel"):
        compiled = compile_row(row)
        figures.append(compiled.figures)
        if dump is not None:
            Path(dump).mkdir(parents=True, exist_ok=True)
            stem = "-".join(str(compiled.figures[name]) for name in FIELDS[:5])
            Path(dump, f"{stem}.ttir").write_text(compiled.ttir, encoding="utf-8")
            Path(dump, f"{stem}.ptx").write_text(compiled.ptx, encoding="utf-8")
    return {"versions": versions(), "rows": figures}


def select(rows: list[LaunchRow], only: list[str]) -> list[LaunchRow]:
    """The rows that meet every "field=value"; two values of one field are alternatives."""
    wanted: dict[str, set[str]] = {}
    for condition in only:
        name, _, value = condition.partition("=")
        known = {_value(row, name) for row in rows} if name in FIELDS else None
        if known is None:
            raise ConfigError(f"{condition!r} is not FIELD=VALUE with a field of {', '.join(FIELDS)}")
        if value not in known:
            raise ConfigError(f"no kernel row has {condition!r}; values of {name}: {', '.join(sorted(known))}")
        wanted.setdefault(name, set()).add(value)
    return [row for row in rows if all(_value(row, name) in values for name, values in wanted.items())]


def _value(row: LaunchRow, name: str) -> str:
    value = getattr(row, name)
    return ".".join(map(str, value)) if isinstance(value, tuple) else str(value)


def as_json(result: dict) -> str:
    """JSON with a row per line, so that two reports can be compared line by line."""
    rows = ",\n".join(json.dumps(row) for row in result["rows"])
    return f'{{"versions": {json.dumps(result["versions"])}, "rows": [\n{rows}\n]}}'


def lines(result: dict) -> Iterator[str]:
    """The report as text, a line per row; what is over a limit is named at the end of its line."""
    version = result["versions"]
    yield f"Triton {version['triton']}, ptxas {version['ptxas']}, for 10.0 {version['ptxas_blackwell']}"
    yield (
        "kernel           GPU  head dtype         phase      tile     warps stages regs spill   shared (limit)"
        "      matrix instructions"
    )
    for row in result["rows"]:
        tile = f"{row['block_m']}x{row['block_n']}"
        matrix = [f"{row[name]} {name}" for name in ("mma", "wgmma", "tcgen05") if row[name]] or ["none"]
        yield (
            f"{row['kernel']:<16} {row['compute_capability']:>4} {row['head_size']:>4} {row['dtype']:<13} "
            f"{row['phase']:<10} {tile:<8} {row['num_warps']:>5} {row['num_stages']:>6} {row['registers']:>4} "
            f"{row['spill_bytes']:>5} {row['shared_bytes']:>8} ({row['shared_limit']:>7})  {', '.join(matrix)}"
            + "".join(f"  {problem}" for problem in problems(row))
        )


def problems(row: dict) -> list[str]:
    """What keeps a row from running well: memory over the limit, or a matrix instruction that is missing."""
    found = []
    if row["shared_bytes"] > row["shared_limit"]:
        found.append("DOES NOT FIT")
    if row["expected"] != "none" and not row[row["expected"]]:
        found.append(f"NO {row['expected']}")
    return found
