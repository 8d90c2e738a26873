"""The two cells that every notebook opens with, and the repository's address inside them.

The address stands once, as REPO under [tool.minillm] in pyproject.toml; `make notebooks REPO=owner/name REF=tag`
writes it there and from there into each badge and clone line. What the set-up cell does in Colab is in colab.py.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
BADGE_IMAGE = "https://colab.research.google.com/assets/colab-badge.svg"
BADGE_LINK = re.compile(r"https://colab\.research\.google\.com/github/[\w.-]+/[\w.-]+/blob/[^/\s]+/")
SETUP_MARK = "# setup:"
SETUP_ADDRESS = re.compile(r'^REPO, REF = "([\w.-]+/[\w.-]+)", "([^"/\s]+)"$', re.MULTILINE)

SETUP = """\
# setup: run this cell first; running it again does no harm
import os
import subprocess
import sys
from importlib.util import find_spec

REPO, REF = "{repo}", "{ref}"
if "google.colab" in sys.modules:
    home = "/content/minillm"
    if not os.path.isdir(home):
        address = f"https://github.com/{{REPO}}"
        subprocess.run(["git", "clone", "--depth", "1", "--branch", REF, address, home], check=True)
    if home not in sys.path:
        sys.path.insert(0, home)
    from minillm.course.build import colab

    colab.install(home)
    os.chdir(f"{{home}}/{folder}")
if find_spec("minillm") is None:
    raise ModuleNotFoundError(f"{{sys.executable}} has no minillm: start with `make lab`")"""


def read_repo(root: Path = ROOT) -> str:
    return tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["minillm"]["REPO"]


def badge_cell(repo: str, ref: str, path: str) -> str:
    """Markdown of the first cell; `path` is the notebook's path inside the repository."""
    link = f"https://colab.research.google.com/github/{repo}/blob/{ref}/{path}"
    return f"[![Open in Colab]({BADGE_IMAGE})]({link}) In Colab, *File → Save a copy in Drive* keeps your changes."


def setup_cell(repo: str, ref: str, path: str) -> str:
    """Code of the first code cell."""
    return SETUP.format(repo=repo, ref=ref, folder=Path(path).parent.as_posix())


def write_address(root: Path, repo: str, ref: str) -> None:
    """Put the address into pyproject.toml and README.md."""
    old = read_repo(root)
    pyproject, readme = root / "pyproject.toml", root / "README.md"
    text = pyproject.read_text(encoding="utf-8")
    pyproject.write_text(text.replace(f'REPO = "{old}"', f'REPO = "{repo}"'), encoding="utf-8")
    if readme.is_file():
        text = readme.read_text(encoding="utf-8").replace(f"github.com/{old}", f"github.com/{repo}")
        link = f"https://colab.research.google.com/github/{repo}/blob/{ref}/"
        readme.write_text(BADGE_LINK.sub(link, text), encoding="utf-8")
