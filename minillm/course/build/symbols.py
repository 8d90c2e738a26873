"""Which names minillm has, read from its source without importing it, so that a text can be held to them.

    has_symbol("minillm.kv_cache.KVCache")      a dotted path from the package down
    has_symbol("BlockPool.allocate")            a class of minillm and what it has
    has_symbol("timing.rounds")                 a module of minillm and what it has
    has_file("attention/flash.py")              a file, named as briefly as a text likes

Nothing is imported, because some modules need packages that a machine may lack.
"""

from __future__ import annotations

import ast
import builtins
import functools
from dataclasses import dataclass, field
from pathlib import Path

from minillm.course.build.addresses import ROOT

CODE_FOLDERS = ("minillm", "tests", "benchmarks")


@dataclass
class Class:
    """What an instance or the class itself can be asked for, and the names of what it derives from."""

    members: set[str] = field(default_factory=set)
    bases: list[str] = field(default_factory=list)


@dataclass
class Names:
    """minillm, read once. A module is called by its dotted path."""

    modules: dict[str, dict[str, str]] = field(default_factory=dict)  # module -> name -> where it comes from, or ""
    classes: dict[str, list[Class]] = field(default_factory=dict)  # simple name -> every class called so

    def has(self, dotted: str) -> bool:
        head, *rest = dotted.split(".")
        if head == "minillm":
            return self._has_path(head, rest)
        starts = [module for module in self.modules if module.endswith(f".{head}")]
        return any(self._has_path(module, rest) for module in starts) or self._has_member(head, rest)

    def knows(self, head: str) -> bool:
        """Whether a module or a class of minillm is called `head`."""
        return head in self.classes or any(module.split(".")[-1] == head for module in self.modules)

    def any_class_has(self, member: str) -> bool:
        return any(member in one.members for several in self.classes.values() for one in several)

    def _has_path(self, module: str, rest: list[str]) -> bool:
        if not rest:
            return module in self.modules
        if f"{module}.{rest[0]}" in self.modules and self._has_path(f"{module}.{rest[0]}", rest[1:]):
            return True
        source = self.modules[module].get(rest[0])
        if source is None:
            return False
        if source:  # imported from another module of minillm
            return source != module and self._has_path(source, rest)
        return len(rest) == 1 or rest[0] not in self.classes or self._has_member(rest[0], rest[1:])

    def _has_member(self, name: str, rest: list[str]) -> bool:
        """Deeper than one member the source does not say what a thing is, so that is not judged."""
        if not rest:
            return name in self.classes
        for one in self.classes.get(name, []):
            strangers = [base for base in one.bases if base not in self.classes and not hasattr(builtins, base)]
            if rest[0] in one.members or strangers or any(self._has_member(base, rest) for base in one.bases):
                return True
        return False


def has_symbol(dotted: str) -> bool:
    return names().has(dotted)


def has_file(name: str) -> bool:
    """Whether a file or folder of the repository is called so, or ends so: `flash.py`, `attention/flash.py`."""
    parts = Path(name).parts
    known = {*code_files(), *(path.parent for path in code_files())}
    return (ROOT / name).exists() or any(path.parts[-len(parts) :] == parts for path in known)


@functools.cache
def code_files() -> tuple[Path, ...]:
    return tuple(path.relative_to(ROOT) for folder in CODE_FOLDERS for path in sorted((ROOT / folder).rglob("*.py")))


@functools.cache
def names() -> Names:
    found = Names()
    for path in code_files():
        if path.parts[0] == "minillm":
            parts = path.with_suffix("").parts
            module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found.modules[module] = read_module(ast.parse((ROOT / path).read_text(encoding="utf-8")), found.classes)
    return found


def read_module(tree: ast.Module, classes: dict[str, list[Class]]) -> dict[str, str]:
    """The names of one module; its classes are added to `classes`."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("minillm"):
            for alias in node.names:
                found[alias.asname or alias.name] = node.module if alias.asname is None else ""
        elif isinstance(node, ast.ClassDef):
            classes.setdefault(node.name, []).append(read_class(node))
    for node in tree.body:
        found.update({name: "" for name in bound_names(node)})
    return found


def read_class(node: ast.ClassDef) -> Class:
    one = Class(
        bases=[base.attr if isinstance(base, ast.Attribute) else getattr(base, "id", "?") for base in node.bases]
    )
    one.members = {name for inner in node.body for name in bound_names(inner)}
    for inner in ast.walk(node):  # self.x = ... in any method
        if isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store):
            if isinstance(inner.value, ast.Name) and inner.value.id == "self":
                one.members.add(inner.attr)
    return one


def bound_names(node: ast.AST) -> set[str]:
    """What one statement defines or assigns."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return {node.name}
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return {(alias.asname or alias.name).split(".")[0] for alias in node.names}
    targets = {name.id for name in ast.walk(node) if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)}
    return targets if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.For, ast.With)) else set()
