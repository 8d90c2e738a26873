"""Rows as lines of text, and the shares of a peak that a row's rate comes to.

A row holds what was compared (strings and integers), `times` (body -> summary of `measure`), and where it makes sense
`work`: {"flops": ...} or {"bytes": ...} of one call. Rates and shares follow from those.
"""

from __future__ import annotations

RATES = {"flops": ("tflops", 1e12), "bytes": ("tb_per_s", 1e12)}


def with_rates(row: dict) -> dict:
    """The row with the rate of each body, and how many times as fast it is as the body `row["against"]`."""
    for name, time in row.get("times", {}).items():
        if "median_us" not in time:
            continue
        for work, amount in row.get("work", {}).items():
            rate, unit = RATES[work]
            time[rate] = float(f"{amount / (time['median_us'] * 1e-6) / unit:.4g}")
        against = row["times"].get(row.get("against"), {})
        if "median_us" in against and name != row["against"]:
            time["times_as_fast"] = round(against["median_us"] / time["median_us"], 3)
    return row


def with_shares(sections: dict, environment: dict) -> dict:
    """Shares of the measured ceilings and of the datasheet's, in per cent, for every time with a rate.

    Without a GPU there is no ceiling, so there is no share.
    """
    if environment["gpu"] is None:
        return sections
    measured = {
        row["ceiling"]: row["value"] for row in sections.get("ceilings", {}).get("rows", ()) if "ceiling" in row
    }
    ceilings = {"measured": measured, "datasheet": environment.get("datasheet", {})}
    for record in sections.values():
        for row in record["rows"]:
            for time in row.get("times", {}).values():
                for rate, _ in RATES.values():
                    for kind, ceiling in ceilings.items():
                        if rate in time and rate in ceiling:
                            time[f"{rate}_percent_of_{kind}"] = round(100 * time[rate] / ceiling[rate], 1)
    return sections


def line(section: str, row: dict) -> str:
    """`section | what | body median (low .. high) rate | ...`"""
    facts = [f"{key}={_short(value)}" for key, value in row.items() if key not in ("times", "work", "against")]
    parts = [f"{section:<14}", " ".join(facts)]
    for name, time in row.get("times", {}).items():
        if "error" in time:
            parts.append(f"{name}: {time['error'][:80]}")
            continue
        text = f"{name} {time['median_us']:,.1f} us ({time['low_us']:,.1f} .. {time['high_us']:,.1f})"
        text += f" x{time['times_as_fast']:.2f}" if "times_as_fast" in time else ""
        text += "".join(f" {time[rate]:.3g} {rate.replace('_per_', '/')}" for rate, _ in RATES.values() if rate in time)
        parts.append(text)
    return " | ".join(parts)


def _short(value) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
