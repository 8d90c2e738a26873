"""The process in which a learner's code runs: `python -m minillm.course.grader.child FD`. Started by parent.py.

It does what it is told over a socket, one answer per question: run a cell, or call a task's object on a case and send
back what came out. It knows no oracle's answer and decides nothing. The learner's code can do anything in here, and
the most that it reaches is a wrong record: it is judged by someone else, on cases made after its cells have run.

Not protected: the checks' source is public and can be read from disk; counts and states that `drive` notes down in
this process can be forged by code that attacks it; the solutions are published.
"""

from __future__ import annotations

import os
import socket
import sys
from types import ModuleType
from typing import TYPE_CHECKING

from minillm.course.grader.limits import isolate, limit_memory

if TYPE_CHECKING:  # everything that brings in PyTorch is imported after the process has cut itself off
    from minillm.course.grader.task import Task


def main(descriptor: int) -> None:
    network = isolate()  # first: before PyTorch starts threads
    import torch

    torch.set_num_threads(1)
    from minillm.course.grader import wire

    with socket.socket(fileno=descriptor) as channel:
        job = wire.receive(channel, None)
        desk = Desk(job["exercise"], job["package"])
        limit_memory()
        wire.send(channel, {"token": job["token"], "network": network}, None)
        while True:
            try:
                question = wire.receive(channel, None)
            except EOFError:
                return
            answer = desk.answer(question)
            wire.send(channel, {"token": question["token"], **answer}, None)


class Desk:
    """The learner's namespace, and the objects found in it for each task."""

    def __init__(self, exercise: str, package: str):
        from minillm.course.grader.exercises import load_tasks
        from minillm.course.grader.hide import Curtain

        self.tasks = {task.id: task for task in load_tasks(exercise, package)}
        self.folder = os.getcwd()
        self.curtain = Curtain(package, self.folder, {name for task in self.tasks.values() for name in task.hides})
        self.objects: dict[str, object] = {}
        module = ModuleType("__main__")
        sys.modules["__main__"] = module  # where dataclasses and friends look for the learner's names
        self.names = vars(module)
        self.names["__builtins__"] = self.curtain.namespace_builtins()

    def answer(self, question: dict) -> dict:
        self.curtain.active = frozenset()
        if question["do"] == "run":
            return {"error": self.run(question["number"], question["source"], question["task"])}
        if question["do"] == "compile":
            return self.compile(question["task"], question["case"])
        return self.drive(question["task"], question["case"])

    def run(self, number: int, source: str, task_id: str | None) -> str:
        """Run the definitions of a cell; "" or what went wrong, as a sentence."""
        from minillm.course.grader.cells import definitions
        from minillm.course.grader.marks import explain

        task = self.tasks.get(task_id)
        if task:
            self.names.pop(task.name, None)  # what an earlier cell left under this name is no solution
            self.curtain.active = frozenset(task.hides)
        file = os.path.join(self.folder, f"cell_{number}.py")  # Triton reads a kernel's source from its file
        try:
            code = definitions(source)
            with open(file, "w", encoding="utf-8") as stream:
                stream.write(code)
            exec(compile(code, file, "exec", dont_inherit=True), self.names)
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            return explain(error, file)
        if not task:
            return ""
        if task.name not in self.names:
            return f"the cell does not define {task.name}"
        self.objects[task.id] = self.names[task.name]
        if self.curtain.covers(self.objects[task.id]):
            del self.objects[task.id]
            return f"{task.name} is the reference itself"
        return ""

    def drive(self, task_id: str, case: dict) -> dict:
        from minillm.course.grader.kernel_task import KernelTask

        task, obj = self.tasks[task_id], self.objects[task_id]
        if not isinstance(task, KernelTask):
            return self.call(task, obj, case)
        from minillm.course.grader.kernel_child import Launcher

        launcher = Launcher(obj, run=True)
        answer = self.call(task, launcher, case)
        return answer if launcher.launches or "error" in answer else {"error": "launches no kernel"}

    def compile(self, task_id: str, case: dict) -> dict:
        """What the launcher would launch for a case, compiled."""
        from minillm.course.grader.kernel_child import Launcher, compile_launches

        launcher = Launcher(self.objects[task_id], run=False)
        answer = self.call(self.tasks[task_id], launcher, case)
        return answer if "error" in answer else {"record": {"kernels": compile_launches(launcher.launches)}}

    def call(self, task: Task, obj: object, case: dict) -> dict:
        from minillm.course.grader.marks import Failure, drive_case

        self.curtain.active = frozenset(task.hides)
        outcome = drive_case(task, obj, case)
        if isinstance(outcome, Failure):
            return {"error": outcome.sentence, "unsolved": outcome.unsolved}
        return {"record": outcome}


if __name__ == "__main__":
    main(int(sys.argv[1]))
