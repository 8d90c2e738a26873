"""Rules for the text of every notebook: its length, what it links to, what it calls by a name, what it shows.

A rule takes the notebook as JSON (see cells.py) and yields one sentence per offence.
"""

from __future__ import annotations

import builtins
import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

from minillm.course.build.cells import bound_names, code_cells, texts
from minillm.course.build.symbols import has_file, has_symbol, names

MAX_WORDS = 1_650  # about 1,500, and a tenth of tolerance
LINK = re.compile(r"""(?:\]\(|\b(?:src|href)=["'])\s*<?([^)\s"'>]+)""")
IMAGE_WITHOUT_ALT = re.compile(r"!\[\s*\]\(|<img(?![^>]*\balt=[\"'][^\"']+)[^>]*>", re.IGNORECASE)
DRAWING_WITHOUT_NAME = re.compile(
    r"<(?:svg|canvas)(?![^>]*\baria-label=[\"'][^\"']+)[^>]*>(?!\s*<title>)", re.IGNORECASE
)
EMOJI = re.compile("[\U0001f000-\U0001faff\u2600-\u26ff\u2705\u2728\u274c\ufe0f]")
FENCED = re.compile(r"```.*?```|<!--.*?-->", re.DOTALL)
INLINE_CODE = re.compile(r"`([^`\n]+)`")
CODE_IN_TEXT = re.compile(r"```.*?```|`[^`]*`|\$\$.*?\$\$|\$[^$\n]*\$|<!--.*?-->", re.DOTALL)
FILE = re.compile(r"(?:minillm|tests|benchmarks|notebooks|exercises|solutions)/[\w./-]*|(?:[\w-]+/)*\w+\.py")
DATA_FILE = re.compile(r"[\w./-]+\.(?:json|jsonl|safetensors|gguf|txt|md|toml|csv|png|ptx)")
DOTTED = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+)(?:\(.*\))?")
MARKUP = ("text/html", "text/markdown", "image/svg+xml")


def check_words(notebook: dict) -> Iterator[str]:
    words = sum(map(count_words, texts(notebook)))
    if words > MAX_WORDS:
        yield f"{words:,} words of prose, allowed are {MAX_WORDS:,}"


def check_emoji(notebook: dict) -> Iterator[str]:
    for text in texts(notebook):
        if EMOJI.search(text):
            yield f"an emoji in the text: {EMOJI.search(text).group()}"


def check_alt_text(notebook: dict) -> Iterator[str]:
    """Every picture has words for those who do not see it: in the text, in outputs, and inside their HTML."""
    for text in texts(notebook):
        yield from (f"a picture in the text has no alt text: {tag}" for tag in unnamed_pictures(text))
    for cell in code_cells(notebook):
        for output in cell["outputs"]:
            for kind, data in output.get("data", {}).items():
                alt = output.get("metadata", {}).get(kind, {}).get("alt", "")
                if kind.startswith("image/") and not alt.strip():
                    yield f"cell {cell.get('id')} shows {kind} without alt text"
                if kind in MARKUP and not alt.strip():
                    yield from (f"cell {cell.get('id')} shows {tag} without alt text" for tag in unnamed_pictures(data))


def unnamed_pictures(markup: str) -> list[str]:
    return [match.group()[:60] for rule in (IMAGE_WITHOUT_ALT, DRAWING_WITHOUT_NAME) for match in rule.finditer(markup)]


def check_code_names(notebook: dict) -> Iterator[str]:
    """`BlockPool.allocate`, `minillm.x.y`, `kv_cache.py`: what looks like a part of minillm is one.

    A name that the notebook's own code binds, or Python, or a package other than minillm, is not judged.
    """
    own = bound_names(notebook) | set(dir(builtins))
    for cell in notebook["cells"]:
        if cell["cell_type"] != "markdown":
            continue
        for span in INLINE_CODE.findall(FENCED.sub("", cell["source"])):
            dotted = None if DATA_FILE.fullmatch(span) else DOTTED.fullmatch(span)
            if FILE.fullmatch(span):
                missing = not has_file(span) and not span.startswith("my_minillm/")
            else:
                missing = dotted and not is_known(dotted[1], own)
            if missing:
                yield f"cell {cell.get('id')} names `{span}`, which minillm does not have"


def is_known(dotted: str, own: set[str]) -> bool:
    """Whether a dotted name is minillm's, or clearly none of its business."""
    head, last = dotted.split(".")[0], dotted.split(".")[-1]
    if has_symbol(dotted):
        return True
    if names().knows(head):  # `engine.step`: a variable called like a module
        return head[0].islower() and head != "minillm" and (head in own or names().any_class_has(last))
    return head in own or head[0].islower()


def check_links(notebook: dict, folder: Path) -> Iterator[str]:
    """Relative links and pictures lead to files that exist."""
    for cell in notebook["cells"]:
        if cell["cell_type"] != "markdown":
            continue
        for target in LINK.findall(CODE_IN_TEXT.sub("", cell["source"])):
            file = unquote(target.split("#")[0])
            if file and not re.match(r"[a-z]+:", file) and not (folder / file).exists():
                yield f"cell {cell.get('id')} links to {file}, which does not exist"


def count_words(text: str) -> int:
    text = re.sub(r"\]\([^)]*\)|<[^>]*>", " ", CODE_IN_TEXT.sub(" ", text))
    return len(re.findall(r"[^\W\d_][\w'’-]*", text))


RULES = (check_words, check_emoji, check_alt_text, check_code_names)
