"""What is wrong with a body, in one sentence, and which field it is.

Pydantic lists what each member of a union finds wrong: a list of 17 stop texts "should be a valid string", because text
alone would be fine, too. Of these the one is told that got furthest: a limit before a type, what is deep before what is
shallow.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

MEMBER = re.compile(r"(constrained-)?str|list\[.*\]")  # how Pydantic names a union's members among a path's parts
NO_OBJECT = "the body must be a JSON object, sent with content-type: application/json"


def describe(errors: Sequence[Mapping[str, Any]]) -> tuple[str, str | None]:
    """(message, path of the field or None) of the first field that is wrong, from FastAPI's list of errors."""
    first = errors[0]
    if first["type"] == "json_invalid":
        return f"the body is not JSON: {first['ctx']['error']} (character {first['loc'][-1]})", None
    path = first["loc"][1:]  # after "body"
    if not path:
        return NO_OBJECT if first["type"] != "missing" else f"the body is empty; {NO_OBJECT}", None
    member = next((i for i, part in enumerate(path) if _is_member(part)), None)
    if member is not None:
        rivals = [error for error in errors if error["loc"][1 : member + 1] == path[:member]]
        first = max(rivals, key=lambda error: (not error["type"].endswith("_type"), len(error["loc"])))
    name = ".".join(str(part) for part in first["loc"][1:] if not _is_member(part))
    return f"{name}: {first['msg']}", name


def _is_member(part: str | int) -> bool:
    return isinstance(part, str) and MEMBER.fullmatch(part) is not None
