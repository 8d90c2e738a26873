"""The commands `minillm grade` and `minillm progress`: what they write, as text, JSON, CSV or for Gradescope."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterable

from minillm.course import mine
from minillm.course.grader.exercises import exercise_names, load_tasks
from minillm.course.grader.grade import Options, Report, grade, grade_folder
from minillm.course.grader.limits import keep_secrets
from minillm.errors import GradeError

COLUMNS = ("file", "exercise", "task", "score", "max_score", "message")


def run_grade(args) -> int:
    """Grade what the command line names; 1 when a file could not be graded at all."""
    if (args.file is None) == (args.batch is None):
        raise GradeError("name one notebook, or a folder with --batch DIR")
    if args.gradescope and args.batch:
        raise GradeError("--gradescope describes one submission: it does not go with --batch")
    if args.jobs < 1:
        raise GradeError(f"-j {args.jobs}: at least 1 notebook at a time")
    if args.extra and not args.extra.is_dir():
        raise GradeError(f"--extra {args.extra} is not a folder")
    if args.json and not args.json.parent.is_dir():
        raise GradeError(f"--json {args.json}: there is no folder {args.json.parent}")
    keep_secrets()
    options = Options(seed=args.seed, extra=args.extra, **({"package": args.checks} if args.checks else {}))
    reports: Iterable[Report]
    reports = [grade(args.file, options)] if args.file else grade_folder(args.batch, args.jobs, options)
    show = _show_csv if args.csv else _show_text
    done = []
    for report in reports:
        show(report, first=not done)
        done.append(report)
    if args.json:
        data = [report.to_dict() for report in done]
        whole = for_gradescope(done[0]) if args.gradescope else data if args.batch else data[0]
        args.json.write_text(json.dumps(whole, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return 1 if any(report.error for report in done) else 0


def run_progress(args) -> None:
    """Which tasks of the course have passed their check on this machine."""
    rows = progress()
    if args.json:
        print(json.dumps(rows))
        return
    for row in rows:
        print(f"{row['task']:<8} {'solved' if row['solved'] else '-':<8} {row['points']:>3}  {row['title']}")
    solved = [row for row in rows if row["solved"]]
    points = sum(row["points"] for row in solved)
    print(f"{len(solved)} of {len(rows)} tasks, {points} of {sum(row['points'] for row in rows)} points")
    print(f"kept in {mine.folder()}; marks come from `minillm grade`")


def progress() -> list[dict]:
    """One row per task of every exercise: {"task", "title", "points", "solved"}."""
    solved = mine.solved()
    tasks = [task for exercise in exercise_names() for task in load_tasks(exercise)]
    return [
        {"task": task.id, "title": task.title, "points": task.points, "solved": task.id in solved} for task in tasks
    ]


def for_gradescope(report: Report) -> dict:
    """Gradescope's results.json: one test per task, its output the lost items."""
    return {
        "score": report.score,
        "output": "\n".join([*report.notes, f"seed {report.seed}, checks {report.check_version}"]),
        "tests": [
            {
                "name": f"{result.task.id} {result.task.title}",
                "score": result.score,
                "max_score": result.points,
                "output": "\n".join(result.told),
            }
            for result in report.results
        ],
    }


def _show_text(report: Report, first: bool) -> None:
    if report.error:
        return print(f"{report.file}: not graded: {report.error}")
    print(f"{report.file}: {report.exercise}, {report.score:g} of {report.max_score} points, seed {report.seed}")
    for result in report.results:
        print(f"  {result.task.id} {result.task.title}: {result.score:g} of {result.points}")
        for line in result.told:
            print(f"    {line}")
    for note in report.notes:
        print(f"  {note}")
    if first:
        print(f"network: {report.network}")


def _show_csv(report: Report, first: bool) -> None:
    writer = csv.writer(sys.stdout, lineterminator="\n")
    if first:
        writer.writerow(COLUMNS)
    if report.error:
        writer.writerow([report.file, "", "", 0, 0, report.error])
    for result in report.results:
        row = [report.file, report.exercise, result.task.id, result.score, result.points, "; ".join(result.told)]
        writer.writerow(row)
