"""Keeps the reference out of a learner's reach while a task is graded: what `Task.hides` names raises when used.

A hidden function raises when a frame of the learner's code stands above the call, however it was reached; the engine
itself may go on calling it. A hidden class does so in each of its methods, a hidden module in all that it defines. And
a task's cell cannot import them. Someone bent on it can still copy the published solution, which no process can tell.
"""

from __future__ import annotations

import builtins
import functools
import importlib
import sys
from types import FrameType, FunctionType, ModuleType, SimpleNamespace

GRADER = "minillm.course.grader"


class HiddenError(ImportError):
    """Learner code reached for the reference."""

    def __init__(self, name: str):
        super().__init__(f"{name} is out of reach while this task is graded: it is what you are to write")


class Curtain:
    """Guards around hidden objects; `active` holds the names that are refused right now.

    checks  the package of the checks: always hidden from learner code, and free to call what it likes
    folder  where the learner's code lies: its cells, and what they write
    names   every dotted name that some task of the exercise hides
    """

    def __init__(self, checks: str, folder: str, names: set[str]):
        self.checks = checks
        self.folder = folder
        self.active: frozenset[str] = frozenset()
        self._guards: set[object] = set()
        for name in sorted(names | {checks}):
            self._hide(name)

    def covers(self, obj: object) -> bool:
        """True for a hidden object itself, also inside functools.partial."""
        while isinstance(obj, functools.partial):
            obj = obj.func
        obj = getattr(obj, "__func__", obj)
        return isinstance(obj, FunctionType | type) and obj in self._guards

    def namespace_builtins(self) -> dict[str, object]:
        """Builtins for the learner's namespace, with an `import` that refuses what is hidden."""

        def guarded_import(name, globals=None, locals=None, fromlist=(), level=0):
            if name == GRADER and tuple(fromlist or ()) == ("check",):
                return SimpleNamespace(check=lambda *args, **kwargs: None)
            for wanted in (name, *(f"{name}.{item}" for item in fromlist or ())):
                if level == 0 and self._refuses(wanted):
                    raise HiddenError(wanted)
            return builtins.__import__(name, globals, locals, fromlist, level)

        return {**vars(builtins), "__import__": guarded_import}

    def _refuses(self, wanted: str) -> bool:
        hidden = self.active | {self.checks, GRADER}
        return any(is_within(wanted, name) for name in hidden)

    def _hide(self, name: str) -> None:
        try:
            target, owner, attribute = resolve(name)
        except ModuleNotFoundError:
            return  # it needs a package that is not here: nobody can use it
        if isinstance(target, ModuleType):
            for module in [module for found, module in list(sys.modules.items()) if is_within(found, name)]:
                for inner in list(vars(module).values()):
                    if getattr(inner, "__module__", None) == module.__name__:
                        self._guard(inner, name)
        elif isinstance(target, type):
            self._guard(target, name)
        else:
            setattr(owner, attribute, self._replace(target, name))

    def _guard(self, target: object, name: str) -> None:
        if isinstance(target, type):
            for key, member in list(vars(target).items()):
                inner = member.__func__ if isinstance(member, staticmethod | classmethod) else member
                if isinstance(inner, FunctionType):
                    guard = self._wrap(inner, name)
                    setattr(target, key, guard if inner is member else type(member)(guard))
            self._guards.add(target)
        elif isinstance(target, FunctionType):
            self._replace(target, name)

    def _replace(self, target, name: str):
        """The guard of a callable, which now stands for it in every module of the engine and of the checks."""
        guard = self._wrap(target, name)
        for module in list(sys.modules.values()):
            if getattr(module, "__name__", "").startswith(("minillm", self.checks)):
                for key, value in list(vars(module).items()):
                    if value is target:
                        setattr(module, key, guard)
        return guard

    def _wrap(self, target, name: str):
        def guard(*args, **kwargs):
            if (name in self.active or name == self.checks) and self._learner_calls(sys._getframe(1)):
                raise HiddenError(name)
            return target(*args, **kwargs)

        guard.__name__, guard.__doc__ = getattr(target, "__name__", name), target.__doc__
        self._guards.add(guard)
        return guard

    def _learner_calls(self, frame: FrameType | None) -> bool:
        """Whether the learner's code stands above, nearer than the check's."""
        while frame is not None and not is_within(frame.f_globals.get("__name__"), self.checks):
            if frame.f_code.co_filename.startswith(self.folder):
                return True
            frame = frame.f_back
        return False


def is_within(name: object, package: str) -> bool:
    """Whether a dotted name is the package or stands inside it."""
    return isinstance(name, str) and (name == package or name.startswith(package + "."))


def resolve(name: str) -> tuple[object, object, str]:
    """(object, its owner, its name there) of a dotted name.

    Raises ImportError when there is no such thing, ModuleNotFoundError when it needs a package that is not installed.
    """
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            owner = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError as error:
            if not is_within(name, error.name):
                raise
            continue
        target, previous = owner, owner
        try:
            for part in parts[cut:]:
                previous, target = target, getattr(target, part)
        except AttributeError:
            break
        return target, previous, parts[-1]
    raise ImportError(f"a check hides {name}, which does not exist")
