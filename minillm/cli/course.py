"""The course's commands: grade, progress."""

from __future__ import annotations

from pathlib import Path

from minillm.cli.options import plain_command


def add_commands(commands) -> None:
    grade = plain_command(commands, "grade", run_grade, "marks for one exercise notebook, or for a folder of them")
    grade.add_argument("file", nargs="?", type=Path, metavar="FILE.ipynb")
    grade.add_argument("--batch", type=Path, metavar="DIR", help="grade every notebook below this folder")
    grade.add_argument("-j", "--jobs", type=int, default=1, help="notebooks at a time; default 1")
    grade.add_argument("--json", type=Path, metavar="OUT", help="write the marks to this file")
    grade.add_argument("--gradescope", action="store_true", help="write OUT in the form that Gradescope reads")
    grade.add_argument("--csv", action="store_true", help="print one CSV row per task instead of text")
    grade.add_argument("--seed", type=int, help="of the random cases; without it a fresh one is drawn and reported")
    grade.add_argument("--extra", type=Path, metavar="DIR", help="an instructor's own cases, DIR/exNN.py")
    grade.add_argument("--checks", metavar="PACKAGE", help="another package of checks than the course's")

    progress = plain_command(commands, "progress", run_progress, "which tasks have passed their check here")
    progress.add_argument("--json", action="store_true", help="print one JSON list")


def run_grade(args) -> int:
    from minillm.course.grader import command

    return command.run_grade(args)


def run_progress(args) -> None:
    from minillm.course.grader import command

    command.run_progress(args)
