"""Tricks that earn nothing and accidents that cost one task: each runs in the grader's process, as a real file does.

Three tasks share a notebook, and so a process, since starting one takes seconds.
"""

import random
import subprocess
import sys

import psutil
import pytest

from minillm.course.build.addresses import ROOT
from minillm.course.grader.cells import Cell
from minillm.course.grader.exercises import find_task
from minillm.course.grader.grade import Options, grade
from minillm.course.grader.hide import resolve
from minillm.course.grader.marks import Failure
from minillm.course.grader.parent import Learner
from tests.grader.examples import COUNTER, IMPORTS, MASK, MERGE, PACKAGE, write_notebook

SECONDS = 5.0
MASK_HEAD = "# task: ex90.1\n"
COUNTER_HEAD = "# task: ex90.2\n"
MERGE_HEAD = "# task: ex90.3\n"


@pytest.fixture
def marks(tmp_path):
    """marks(cell, ...) -> task id -> (share of its points, its first sentence)."""

    def run(*sources, seconds=SECONDS):
        path = write_notebook(tmp_path / "ex90_mine.ipynb", *sources)
        report = grade(path, Options(package=PACKAGE, seconds=seconds))
        assert [result.task.id for result in report.results] == ["ex90.1", "ex90.2", "ex90.3"]
        return {
            result.task.id: (result.passed / len(result.items), next(iter(result.lost.values()), ""))
            for result in report.results
        }

    return run


def function(name, body, head=""):
    """A task's cell: a function of any arguments with this body."""
    marks = {"causal_mask": MASK_HEAD, "merge_two": MERGE_HEAD}
    return f"{marks[name]}{head}\ndef {name}(*a, **k):\n    {body}"


def test_a_learners_own_wrong_assert_behind_a_right_definition_costs_nothing(marks):
    assert marks(IMPORTS, COUNTER + "\nassert 1 == 2, 'a slip in the test, not in the task'")["ex90.2"] == (1, "")


def test_importing_the_reference_is_refused_by_name(marks):
    got = marks(
        IMPORTS,
        function("causal_mask", "return visible_keys(*a)", "from minillm.attention.mask import visible_keys"),
        COUNTER,
        function("merge_two", "import minillm.attention.merge as m; return m.merge(a[0], a[1], None, 1)[0]"),
    )
    assert got["ex90.1"] == (
        0,
        "raises HiddenError: minillm.attention.mask.visible_keys is out of reach while this task is graded: it is "
        "what you are to write (line 2 of the cell)",
    )
    assert got["ex90.2"] == (1, "")
    assert got["ex90.3"][0] == 0 and "minillm.attention.merge is out of reach" in got["ex90.3"][1]


def test_a_reference_reached_another_way_raises_when_it_is_called(marks):
    got = marks(
        IMPORTS + "\nimport importlib, sys\nimport minillm.attention.mask as kept\nimport minillm.attention.naive as n",
        function("causal_mask", "return kept.visible_keys(*a)"),
        COUNTER,
        function(
            "merge_two",
            "m = importlib.import_module('minillm.attention.merge')\n    return m.merge(torch.stack(a[::2]), "
            "torch.stack(a[1::2]), torch.arange(2), 2)[0]",
        ),
    )
    assert got["ex90.1"][0] == 0 and "visible_keys is out of reach" in got["ex90.1"][1]
    assert got["ex90.3"][0] == 0 and "minillm.attention.merge is out of reach" in got["ex90.3"][1]


STREAM = """
class TextStream:
    def __init__(self):
        self.decoder = {}

    def push(self, data):
        return self.decoder.decode(data)

    def flush(self):
        return self.decoder.decode(b"", final=True)
"""
READY_MADE = {
    "ex01.3": [
        STREAM.format("codecs.getincrementaldecoder('utf-8')(errors='replace')"),
        STREAM.format("codecs.lookup('utf-8').incrementaldecoder(errors='replace')"),
        "class TextStream(codecs.lookup('utf-8').incrementaldecoder):\n    push = lambda self, data: self.decode(data)",
        "class TextStream:\n    push = lambda self, data: ''.join(codecs.iterdecode([data], 'utf-8', 'replace'))",
    ],
    "ex03.1": [
        "def rms_norm(x, weight, eps):\n    return torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps)",
        "def rms_norm(x, weight, eps):\n    return functional.rms_norm(x, x.shape[-1:], weight, eps)",
        "def rms_norm(x, weight, eps):\n    return torch.nn.RMSNorm(x.shape[-1], eps)(x) * weight",
    ],
}


@pytest.mark.parametrize("task_id", READY_MADE)
def test_what_a_library_has_ready_made_is_refused_as_an_attribute_too(task_id):
    task = find_task(task_id)
    with Learner(task_id[:4], "minillm.course.checks") as learner:
        learner.run(Cell(1, "import codecs, torch\nimport torch.nn.functional as functional"), SECONDS)
        for number, code in enumerate(READY_MADE[task_id], 2):
            assert learner.run(Cell(number, code, task.id), SECONDS) == ""
            outcomes = [learner.drive(task, case, SECONDS) for case in task.cases(random.randrange(2**31))]
            assert all(isinstance(outcome, Failure) for outcome in outcomes), code
            assert all("is out of reach while this task is graded" in outcome.sentence for outcome in outcomes), code


def test_a_reference_in_disguise_is_found_out(marks):
    got = marks(
        IMPORTS + "\nimport functools\nimport minillm.attention.mask as kept\nimport minillm.attention.naive as naive",
        MASK_HEAD + "causal_mask = functools.partial(kept.visible_keys)",
        COUNTER_HEAD + "class Yes:\n    def __eq__(self, other): return True\n"
        "class Counter:\n    def add(self, w): pass\n    def count(self, w): return Yes()",
        function("merge_two", "return torch.full_like(a[0], float('nan'))"),
    )
    assert got["ex90.1"] == (0, "causal_mask is the reference itself")
    assert got["ex90.2"][0] == 0 and got["ex90.3"][0] == 0
    through_the_engine = function("causal_mask", "x = torch.zeros(a[0], 1, 2); y = torch.zeros(a[1], 1, 2); "
                                  "return naive.scores(x, y)[0].isfinite()")  # fmt: skip
    got = marks(IMPORTS + "\nimport minillm.attention.naive as naive", through_the_engine)
    assert got["ex90.1"][0] == 0 and "visible_keys is out of reach" in got["ex90.1"][1]


def test_the_oracle_and_the_grader_are_out_of_reach(marks):
    checks = f"{PACKAGE}.ex90"
    got = marks(
        IMPORTS + "\nimport sys",
        function("causal_mask", "return mask_judge({'queries': a[0], 'keys': a[1], 'items': []}, {})",
                 f"from {checks} import mask_judge"),
        COUNTER_HEAD + f"sys.modules['{checks}'].counter_judge = lambda *a: {{'counts': '', 'unseen word': ''}}\n"
        "class Counter:\n    def add(self, w): pass\n    def count(self, w): return -1",
        function("merge_two", f"return sys.modules['{checks}'].merge_judge(*a)"),
    )  # fmt: skip
    assert "is out of reach" in got["ex90.1"][1] and "is out of reach" in got["ex90.3"][1]
    assert {task: share for task, (share, _) in got.items()} == dict.fromkeys(got, 0)


def test_patched_comparisons_prints_and_edited_check_cells_change_nothing(marks):
    got = marks(
        IMPORTS,
        "def check(*a): print('6 of 6')\ntorch.allclose = torch.equal = lambda *a: True\n"
        "torch.Tensor.eq = torch.Tensor.__eq__ = lambda *a: torch.ones(3, dtype=torch.bool)\n"
        "import minillm.course.grader.task as t\nt.difference = lambda *a, **k: ''",
        function("causal_mask", "print('ex90.1: passed, score 6'); return torch.zeros(a, dtype=torch.bool)"),
        "check('ex90.1', causal_mask)",
        COUNTER_HEAD + 'class Counter:\n    def add(self, w): print(\'{"record": {}, "score": 2}\')\n'
        "    def count(self, w): return -1",
        function("merge_two", "return a[0] * 0 + 7"),
    )
    assert {task: share for task, (share, _) in got.items()} == dict.fromkeys(got, 0)


FORGER = """
import os, stat, sys

wire = sys.modules["minillm.course.grader.wire"]

def sockets():
    return [fd for fd in range(3, 100) if os.path.exists(f"/dev/fd/{fd}") and stat.S_ISSOCK(os.fstat(fd).st_mode)]

def forge(*values):
    for fd in sockets():
        for value in values:
            os.write(fd, value if isinstance(value, bytes) else wire.pack(value))
"""


def test_forged_answers_are_wrong_records_and_never_more(marks):
    got = marks(
        IMPORTS,
        FORGER,
        function("causal_mask", "forge({'token': '0' * 16, 'record': {'mask': torch.ones(9, 9)}}); return 1"),
        COUNTER_HEAD + "class Counter:\n    def __init__(self): forge(b'\\xff' * 64)",
        function("merge_two", "forge({'token': '', 'error': ''}, b'{}'); os._exit(0)"),
    )  # fmt: skip
    assert {task: share for task, (share, _) in got.items()} == dict.fromkeys(got, 0)
    assert all("sent no valid answer" in sentence for _, sentence in got.values()), got


def test_a_process_that_ends_itself_costs_its_task_only(marks):
    got = marks(
        IMPORTS,
        MASK_HEAD + "import os\nx = os._exit(0)\n" + MASK,
        COUNTER,
        function("merge_two", "import os; os.kill(os.getpid(), 9); os._exit(7)"),
    )
    assert got["ex90.1"] == (0, "the cell ended its process (exit status 0)")
    assert got["ex90.2"] == (1, "")
    assert got["ex90.3"][0] == 0 and "it ended its process (" in got["ex90.3"][1]


def test_a_crash_and_an_exit_cost_their_task_only(marks):
    got = marks(
        IMPORTS,
        function("causal_mask", "import ctypes; ctypes.string_at(0)"),
        COUNTER_HEAD + "class Counter:\n    def __init__(self): raise SystemExit(0)",
        MERGE,
    )
    assert got["ex90.1"] == (0, "it ended its process (signal 11)")
    assert got["ex90.2"][0] == 0 and got["ex90.2"][1].startswith("raises SystemExit")
    assert got["ex90.3"] == (1, "")


def test_endless_loops_cost_their_task_only(marks):
    got = marks(
        IMPORTS,
        MASK + "\nwhile True:\n    pass",
        COUNTER_HEAD + "class Counter:\n    def __init__(self):\n        while True: pass",
        MERGE,
        seconds=2.0,
    )
    assert got["ex90.1"] == (0, "the cell did not end within 2 s")
    assert got["ex90.2"] == (0, "it did not end within 2 s")
    assert got["ex90.3"] == (1, "")


def test_memory_syntax_errors_and_exceptions_cost_their_task_only(marks):
    got = marks(
        IMPORTS + "\nundefined_name.x = 1",
        function("causal_mask", "return torch.ones(2**31)"),
        COUNTER_HEAD + "class Counter\n    pass",
        MERGE,
    )
    assert got["ex90.1"] == (0, "it needs more memory than the limit allows")
    assert got["ex90.2"] == (0, "raises SyntaxError: expected ':' (line 2 of the cell)")
    assert got["ex90.3"] == (1, "")
    got = marks(
        IMPORTS,
        "x = [0] * 10**10",
        MASK,
        COUNTER_HEAD + "class Counter:\n    def add(self, w):\n        return self.add(w)",
        function("merge_two", "return a[0] / 'x'"),
    )
    assert got["ex90.1"] == (1, ""), "a cell that fails is noted, and the rest runs"
    assert "raises RecursionError" in got["ex90.2"][1] and "(line 4 of the cell)" in got["ex90.2"][1]
    assert got["ex90.3"][1].startswith("raises TypeError: unsupported operand")


def test_input_floods_of_output_and_files_cost_nothing_else(marks):
    got = marks(
        IMPORTS + "\nimport sys\nsys.setrecursionlimit(5000)\nanswer = input()",
        function("causal_mask", "open('big', 'wb').write(b'0' * 2**27)"),
        COUNTER_HEAD + "class Counter:\n    def __init__(self):\n        while True: print('x' * 2**20)",
        MERGE,
    )
    assert got["ex90.1"][0] == 0 and "File too large" in got["ex90.1"][1]
    assert got["ex90.2"][0] == 0
    assert got["ex90.3"] == (1, "")


def test_the_network_and_the_caller_s_secrets_are_not_there(marks, monkeypatch):
    monkeypatch.setenv("MY_SECRET_TOKEN", "x")
    got = marks(
        IMPORTS + "\nimport os, socket",
        function("causal_mask", "socket.create_connection(('127.0.0.1', 9), 1)"),
        COUNTER,
        function("merge_two", "raise ValueError(str(sorted(k for k in os.environ if 'SECRET' in k)) + os.getcwd())"),
    )
    assert got["ex90.1"][1].startswith(("raises OSError", "raises PermissionError", "raises ConnectionRefusedError"))
    assert "[]" in got["ex90.3"][1] and "minillm-grade-" in got["ex90.3"][1]


def test_what_a_learner_started_ends_with_the_grading(marks):
    sleeper = f"sleep 6{random.randint(10_000, 99_999)}"  # seconds, and a name that no other process has
    start = f"import subprocess; subprocess.Popen({sleeper.split()}, start_new_session=True)"
    marks(IMPORTS, function("causal_mask", start), MERGE)
    assert not any(sleeper in " ".join(process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"]))


def test_without_namespaces_sockets_are_refused_in_python(tmp_path):
    program = (
        "import minillm.course.grader.limits as limits, socket\n"
        "limits._unshare = lambda flags: False\n"
        "assert 'Python only' in limits.isolate()\n"
        "for act in (lambda: socket.create_connection(('127.0.0.1', 9)), lambda: socket.socket().connect(('', 9))):\n"
        "    try:\n        act()\n    except PermissionError:\n        print('refused')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, encoding="utf-8", cwd=ROOT)
    assert done.stdout == "refused\nrefused\n", done.stderr


def test_hiding_what_does_not_exist_is_an_error_of_the_check():
    assert resolve("minillm.attention.mask.visible")[2] == "visible"
    for name in ("minillm.attention.gone", "minillm.gone.mask", "gone"):
        with pytest.raises(ImportError, match=f"a check hides {name}, which does not exist"):
            resolve(name)


def test_an_empty_file_and_missing_tasks_are_named(marks):
    got = marks(IMPORTS, "def causal_mask(*a): pass", "x = '# task: ex90.1'", COUNTER_HEAD + "count = 1")
    assert got["ex90.1"] == (0, "no cell starts with `# task: ex90.1`")
    assert got["ex90.2"] == (0, "the cell does not define Counter")
