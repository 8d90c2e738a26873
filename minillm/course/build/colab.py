"""Install the project inside a Colab runtime, leaving alone what Colab itself stands on.

Replacing torch, numpy, ipywidgets or IPython under a running kernel breaks it, so pip gets their installed
versions as constraints and refuses rather than change them. The default model is fetched when first loaded.
"""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import tempfile
from pathlib import Path

KEEP = ("torch", "numpy", "ipywidgets", "ipython", "triton")


def install(home: str) -> None:
    """pip install the clone at `home`, showing what pip prints; does nothing when it is already installed."""
    if not needs_install(home):
        return
    with tempfile.TemporaryDirectory() as folder:
        constraints = Path(folder) / "keep.txt"
        constraints.write_text("\n".join(keep_versions()) + "\n", encoding="utf-8")
        # Through a pipe: in Colab a child's own output does not reach the cell.
        process = subprocess.Popen(
            pip_command(home, constraints), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for line in process.stdout:
            print(line, end="")
        if process.wait() != 0:
            raise RuntimeError(
                "pip could not install the project, see above; try Runtime > Disconnect and delete runtime"
            )


def pip_command(home: str, constraints: Path) -> list[str]:
    return [sys.executable, "-m", "pip", "install", "-c", str(constraints), "-e", f"{home}[cpu]"]


def keep_versions() -> list[str]:
    """`name==version` for each of KEEP that is installed."""
    lines = []
    for name in KEEP:
        try:
            lines.append(f"{name}=={importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return lines


def needs_install(home: str) -> bool:
    """False when the installed project is the clone at `home`."""
    try:
        address = importlib.metadata.distribution("minillm-course").read_text("direct_url.json") or ""
    except importlib.metadata.PackageNotFoundError:
        return True
    return Path(home).resolve().as_uri() not in address
