"""The texts that lessons read to the model: files of minillm/data, written for this course."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "data"


def read(name: str) -> str:
    """One text by its name. Raises ValueError naming the texts there are."""
    path = FOLDER / f"{name}.txt"
    if not path.is_file():
        known = ", ".join(sorted(file.stem for file in FOLDER.glob("*.txt")))
        raise ValueError(f"no text is called {name!r}; there are: {known}")
    return path.read_text(encoding="utf-8").strip()
