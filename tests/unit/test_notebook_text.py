"""The form of lessons and exercises, and the names in their text: each rule catches its offence and nothing else."""

import copy
import json
import re

import pytest

from minillm.course.build import addresses, cells, exercise_text, lesson_text, prose
from minillm.course.build.structure import committed, find_problems, rules_of
from minillm.course.build.symbols import has_file, has_symbol
from minillm.course.grader.exercises import find_task

REPO = "ada/course"
HINTS = "".join(f"<details><summary>Hint {n}</summary>\n\nthink of {n}\n\n</details>\n" for n in (1, 2, 3))
THREAD = "[the thread](https://github.com/ada/engine/issues/12)"
LEDGER = """
## Ledger

| | the cache |
|---|---|
| invariant | the same tokens come out |
| where it wins | long prompts |
| where it loses | short prompts |
| how this benchmark could mislead | it runs once |
"""
CLOSING = "## In three sentences\n\n1. The first, e.g. this one.\n2. The second\n   goes on.\n3. The third.\n\nNext."


def code(name, source, count, *outputs, tags=()):
    outputs = [{"metadata": {}, **output} for output in outputs]
    cell = {"cell_type": "code", "id": name, "metadata": {"tags": list(tags)}, "source": source}
    return {**cell, "execution_count": count, "outputs": outputs}


def markdown(name, source):
    return {"cell_type": "markdown", "id": name, "metadata": {}, "source": source}


def picture(alt):
    return {"output_type": "display_data", "data": {"image/png": "AA=="}, "metadata": {"image/png": {"alt": alt}}}


def text(kind, data):
    return {"output_type": "display_data", "data": {kind: data}}


STREET = picture("Houses. You are here: model.")


def printed(words):
    return {"output_type": "stream", "name": "stdout", "text": words}


def notebook(path, *cells):
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    badge = markdown("badge", addresses.badge_cell(REPO, "main", path))
    setup = code("setup", addresses.setup_cell(REPO, "main", path), 1)
    cells = [badge, *cells[:1], setup, *cells[1:]]
    return {"nbformat": 4, "nbformat_minor": 5, "metadata": {"kernelspec": kernel}, "cells": cells}


def good_lesson():
    return notebook(
        "notebooks/05_cache.ipynb",
        markdown("title", "# 05 · The cache\n\n*40 minutes · exercises 50 minutes*\n\nSee `kv_cache.py`, `KVCache`."),
        code(
            "street",
            "setup.start('05', 'cache')\nshow(street('model'))",
            2,
            printed("~ here\n"),
            picture("You are here: x"),
        ),
        code("guess", "guess_s = 3", 3),
        code("measure", "draw(3)", 4, printed("~ 2 ms\n"), picture("two bars")),
        code("box", "widgets.text_box(draw, 'a')", 5, text("text/plain", "a box")),
        markdown("ledger", LEDGER),
        code("own", "from minillm.engine import Engine\nshow_code(Engine.step)", 6, tags=["nbval-ignore-output"]),
        markdown("exercises", "[Exercises](../exercises/ex05_cache.ipynb)"),
        markdown("end", CLOSING),
    )


def header(k, extra=""):
    head = f"## ex05.{k}\n\n**What**: a cache. **Why**: speed. *10 minutes · difficulty 2 · 4 points*"
    return f"{head} {extra}\n\n{HINTS}"


def good_solution():
    return notebook(
        "solutions/ex05_cache.ipynb",
        markdown("title", "# Exercise 05"),
        markdown("head-1", header(1)),
        code("task-1", "# task: ex05.1\ndef put(x):\n    ### BEGIN SOLUTION\n    return x\n    ### END SOLUTION", 2),
        code("check-1", 'check("ex05.1", put)', 3),
        markdown("head-2", header(2, f"Find the bug: {THREAD}.")),
        code("task-2", "# task: ex05.2\ndef get(x):\n    return x", 4),
        code("check-2", 'check("ex05.2", get)', 5),
    )


def good_exercise():
    exercise = copy.deepcopy(good_solution())
    exercise["cells"][0]["source"] = addresses.badge_cell(REPO, "main", "exercises/ex05_cache.ipynb")
    exercise["cells"][2]["source"] = addresses.setup_cell(REPO, "main", "exercises/ex05_cache.ipynb")
    for cell in exercise["cells"]:
        if cell["cell_type"] == "code":
            cell["execution_count"] = None
            cell["source"] = "\n".join(line for line in cell["source"].splitlines() if "###" not in line)
    return exercise


KINDS = {
    "notebooks/05_cache": good_lesson,
    "solutions/ex05_cache": good_solution,
    "exercises/ex05_cache": good_exercise,
}

ELSEWHERE = {  # the rules whose offences stand in test_notebook_rules.py
    *("check_metadata", "check_ids", "check_counts", "check_outputs"),
    *("check_code", "check_nbval_marks", "check_words", "check_emoji"),
}


@pytest.fixture
def root(tmp_path):
    for folder in ("notebooks", "solutions", "exercises"):
        (tmp_path / folder).mkdir()
    (tmp_path / "pyproject.toml").write_text(f'[tool.minillm]\nREPO = "{REPO}"\n', encoding="utf-8")
    (tmp_path / "exercises" / "ex05_cache.ipynb").write_text("{}", encoding="utf-8")
    return tmp_path


def problems_of(root, kind, changed):
    path = root / f"{kind}.ipynb"
    path.write_text(json.dumps(changed), encoding="utf-8")
    return find_problems(path, root)


@pytest.mark.parametrize("kind", KINDS)
def test_a_good_one_of_each_kind_has_no_problems(root, kind):
    assert problems_of(root, kind, KINDS[kind]()) == []


def source(cell, old, new):
    """A change: in the cell of this id, `old` becomes `new`."""

    def change(cells, by_id):
        assert old in by_id[cell]["source"]
        by_id[cell]["source"] = by_id[cell]["source"].replace(old, new)

    return change


def without(*names):
    return lambda cells, by_id: [cells.remove(by_id[name]) for name in names]


def output(cell, *outputs):
    return lambda cells, by_id: by_id[cell].update(outputs=[{"metadata": {}, **one} for one in outputs])


LESSON = {
    "no title": (source("title", "# 05 · The", "# The"), "no title cell that starts with `# 05 · name`"),
    "another number": (source("title", "# 05 ·", "# 04 ·"), "no title cell that starts with `# 05 · name`"),
    "no minutes": (source("title", "40 minutes · ", ""), "gives the exercises 0 minutes"),
    "a long lesson": (source("title", "40 minutes", "50 minutes"), "gives the lesson 50 minutes"),
    "long exercises": (source("title", "50 minutes", "90 minutes"), "gives the exercises 90 minutes"),
    "no street": (output("street"), "the first picture is not the street"),
    "a street without a pin": (output("street", picture("A street.")), "the first picture is not the street"),
    "no guess": (source("guess", "guess_s", "seconds"), "no cell assigns a `guess`"),
    "an imported guess": (source("guess", "guess_s = 3", "from minillm.course import guess"), "assigns a `guess`"),
    "no ledger": (without("ledger"), "no line `where it loses` under a heading `Ledger`"),
    "no invariant": (source("ledger", "| invariant | the same tokens come out |", ""), "no line `invariant`"),
    "an empty line": (source("ledger", "it runs once", ""), "no line `how this benchmark could mislead`"),
    "a line elsewhere": (source("ledger", "| where it loses", "## Afterwards\n\n| where it loses"), "`where it loses`"),
    "no code of the engine": (without("own"), "no show_code"),
    "a method that is gone": (source("own", "Engine.step", "Engine.stride"), "minillm.engine.Engine.stride, which"),
    "a pasted class": (
        source("own", "from minillm.engine import Engine", "class Engine: step = 3"),
        "code of Engine.step",
    ),
    "compared code": (lambda c, by: by["own"].update(metadata={}), "calls show_code and is compared"),
    "two sentences": (source("end", "3. The third.", ""), "2 numbered sentences"),
    "a fourth sentence": (source("end", "\n\nNext", "\n4. The fourth.\n\nNext"), "4 numbered sentences"),
    "two in one": (source("end", "The third.", "The third. And one."), "this is not one sentence: The third. And"),
    "no full stop": (source("end", "The third.", "The third"), "this is not one sentence: The third"),
    "no exercises": (without("exercises"), "no link to its exercises"),
    "others' exercises": (source("exercises", "ex05", "ex06"), "no link to its exercises"),
    "a silent widget": (output("box"), "text_box leaves nothing to read"),
    "a widget without a twin": (output("measure", printed("~ 2 ms\n")), "no picture above text_box"),
}
EXERCISE = {
    "one task": (without("head-2", "task-2", "check-2"), "its tasks are ex05.1; wanted are two or three"),
    "another exercise's task": (source("task-1", "ex05.1", "ex06.1"), "its tasks are ex06.1, ex05.2"),
    "a task later in its cell": (source("task-2", "# task", "\n# task"), "cell task-2 does not start with `# task"),
    "a decorated mark": (source("task-2", "ex05.2", "ex05.2 (hard)"), "cell task-2 does not start with `# task"),
    "too long": (source("head-1", "10 minutes", "55 minutes"), "more than 60 minutes together"),
    "no header": (without("head-1"), "ex05.1: the text above the task does not say what"),
    "no what": (source("head-1", "What", "This"), "does not say what"),
    "no why": (source("head-1", "Why", "For"), "does not say why"),
    "no minutes": (source("head-1", "10 minutes", "quick"), "does not say minutes"),
    "difficulty 6": (source("head-1", "difficulty 2", "difficulty 6"), "does not say a difficulty of 1 to 5"),
    "no points": (source("head-1", "4 points", "marked"), "does not say points"),
    "two hints": (source("head-1", "<summary>Hint 3<", "<summary>More<"), "ex05.1: wanted are three fold-outs"),
    "an empty hint": (source("head-1", "think of 2", ""), "ex05.1: wanted are three fold-outs"),
    "no check": (without("check-1"), 'the task is not check("ex05.1", ...)'),
    "a check of another task": (source("check-2", "ex05.2", "ex05.1"), 'the task is not check("ex05.2", ...)'),
    "no bug": (source("head-2", "Find the bug", "Mend it"), "no task says `find the bug`"),
    "a bug of nobody": (source("head-2", "/issues/12", ""), "cites no public thread"),
}
GENERATED = {
    "a count": (lambda c, by: by["task-1"].update(execution_count=2), "cell task-1 has been run"),
    "an output": (output("check-1", printed("good")), "cell check-1 has been run"),
    "a mark of the source": (
        source("task-1", "return", "### END SOLUTION\n    return"),
        "cell task-1 holds a SOLUTION",
    ),
}
NAMES = {
    "a file that is gone": "`cache_kv.py`",
    "a path that is gone": "`minillm/attention/flush.py`",
    "a folder that is gone": "`minillm/attentions/`",
    "a method that is gone": "`BlockPool.alocate`",
    "a call that is gone": "`KVCache.writes(k, v)`",
    "a path of names that is gone": "`minillm.kv_cache.Cache`",
    "a function of a module": "`timing.turns`",
    "a class nobody knows": "`PageTable.allocate`",
}
PICTURES = {
    "in the text": (source("title", "# 05", "![ ](../pyproject.toml)\n\n# 05"), "a picture in the text has no alt"),
    "a tag in the text": (source("title", "# 05", '<IMG src="../pyproject.toml">\n\n# 05'), "a picture in the text"),
    "an output": (output("measure", picture(" ")), "cell measure shows image/png without alt"),
    "a tag in an output": (output("measure", text("text/html", "<p><img src='a'></p>")), "cell measure shows <img"),
    "markdown in an output": (output("measure", text("text/markdown", "![](a.png)")), "cell measure shows ![]("),
    "a drawing": (output("measure", text("text/html", "<svg width='3'><path/></svg>")), "cell measure shows <svg"),
}
OFFENCES = [
    *(("notebooks/05_cache", name, *offence) for name, offence in (LESSON | PICTURES).items()),
    *(("solutions/ex05_cache", name, *offence) for name, offence in EXERCISE.items()),
    *(("exercises/ex05_cache", name, *offence) for name, offence in (EXERCISE | GENERATED).items()),
    *(("notebooks/05_cache", name, source("title", "`KVCache`", span), span) for name, span in NAMES.items()),
]


def spoil(kind, change):
    spoilt = copy.deepcopy(KINDS[kind]())
    change(spoilt["cells"], {cell["id"]: cell for cell in spoilt["cells"]})
    for count, cell in enumerate((c for c in spoilt["cells"] if c.get("execution_count")), 1):
        cell["execution_count"] = count
    return spoilt


@pytest.mark.parametrize(
    "kind, name, change, message", OFFENCES, ids=[f"{o[0].split('/')[0]}-{o[1]}" for o in OFFENCES]
)
def test_each_rule_catches_its_offence(root, kind, name, change, message):
    problems = problems_of(root, kind, spoil(kind, change))
    assert any(message in problem for problem in problems), problems


def test_every_rule_has_an_offence(root):
    spoilt = [(root / f"{kind}.ipynb", spoil(kind, change)) for kind, _, change, _ in OFFENCES]
    silent = {name_of(rule) for path, _ in spoilt for rule in rules_of(path)}
    silent -= {name_of(rule) for path, changed in spoilt for rule in rules_of(path) if list(rule(changed))}
    assert silent == ELSEWHERE


def name_of(rule):
    return getattr(rule, "func", rule).__name__


@pytest.mark.parametrize("folder, name", [("notebooks", "cache.ipynb"), ("solutions", "05_cache.ipynb")])
def test_a_file_name_without_its_number_is_an_offence(root, folder, name):
    messages = [problem for rule in rules_of(root / folder / name)[-1:] for problem in rule({})]
    assert len(messages) == 1 and name in messages[0]


def test_the_points_in_the_text_of_a_task_are_those_of_its_check():
    for path in (path for path in committed() if path.parent.name == "solutions"):
        for name, _, header, _ in exercise_text.tasks(cells.read(path)):
            told = re.search(r"\b(\d+) points?\b", header)
            assert told and int(told[1]) == find_task(name).points, name


# What is allowed


def test_a_lesson_that_measures_nothing_needs_neither_guess_nor_ledger(root):
    lesson = spoil("notebooks/05_cache", without("guess", "ledger"))
    next(cell for cell in lesson["cells"] if cell["id"] == "measure")["outputs"][0]["text"] = "2 of 3\n"
    assert problems_of(root, "notebooks/05_cache", lesson) == []


def test_the_first_exercises_need_no_bug(root):
    spoilt = spoil("solutions/ex05_cache", source("head-2", "Find the bug", "Mend it"))
    assert list(exercise_text.check_bug(spoilt, "02")) == [] != list(exercise_text.check_bug(spoilt, "03"))


@pytest.mark.parametrize(
    "words",
    [
        "`x.y.z`, `torch.nn.Module`, `model.safetensors`, `q.shape`",  # not minillm's
        "`mine.step()` and `Mine.step`",  # the notebook's own
        "`engine.step()`, `llm.stream`",  # variables called like modules
        "`KVCache`, `LLM.generate(...)`, `minillm.LLM.stream`, `attention.naive`",
        "`attention/flash.py`, `minillm/tokenizer/`, `my_minillm/ex02_1.py`, `tests/unit/`",
        "`Tensor.view` of torch", "```\nNowhere.at_all\n```",
    ],
)  # fmt: skip
def test_what_is_not_minillms_is_not_judged(words):
    own = code("own", "class Mine: ...\nfrom torch import Tensor\nmine = Mine()", 1)
    assert list(prose.check_code_names({"cells": [markdown("a", words), own]})) == []


def test_code_in_the_text_counts_neither_as_words_nor_as_links():
    assert prose.count_words("one `two three` [four](five_six.md) $seven$ <b>eight</b>\n```\nnine\n```") == 3
    spans = {"cells": [markdown("a", "`[x](gone.md)` and [top](#here) and [mail](mailto:a@b.c)")]}
    assert list(prose.check_links(spans, addresses.ROOT)) == []


# Names


def test_symbols_are_found_as_python_finds_them():
    import minillm.block_pool
    import minillm.course.figures
    import minillm.engine

    for module in (minillm.block_pool, minillm.course.figures, minillm.engine):
        for name, thing in vars(module).items():
            if isinstance(thing, type) and thing.__module__.startswith("minillm"):
                members = [member for member in vars(thing) if not member.startswith("__")]
                assert all(has_symbol(f"{module.__name__}.{name}.{member}") for member in members)
                assert has_symbol(f"{module.__name__}.{name}") and has_symbol(name)


@pytest.mark.parametrize("name", ["BlockPool", "minillm.engine.Engine", "BlockPoolError", "figures", "minillm.LLM"])
def test_a_symbol_that_does_not_exist_is_not_found(name):
    assert has_symbol(name) and not has_symbol(f"{name}.no_such_thing") and not has_symbol(f"{name}s")


def test_a_name_that_is_imported_under_itself_ends_the_search():
    assert has_symbol("minillm.attention.naive.attention")
    assert not has_symbol("minillm.attention.naive.attention_of_nobody")


def test_files_may_be_named_briefly_and_not_by_a_part_of_their_name():
    assert has_file("flash.py") and has_file("attention/flash.py") and has_file("attention/")
    assert not has_file("lash.py") and not has_file("engine/flash.py")


def test_the_forms_of_a_minutes_line_and_of_a_ledger():
    cells = [markdown("a", "# 05 · x\n\nabout 40 minutes, and 30 minutes of exercises"), markdown("b", "## Ledger")]
    cells += [markdown("c", "\n".join(f"* **{line}:** yes" for line in lesson_text.LEDGER_LINES))]
    cells += [code("d", "run()", 1, printed("a\n~ 3 ms"))]
    assert list(lesson_text.check_header({"cells": cells}, "05")) == []
    assert list(lesson_text.check_ledger({"cells": cells})) == []
