"""`minillm kernels` in a process without the interpreter, and what has to hold for its rows and its Triton IR."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
HALF = ("float16", "bfloat16")
ATTENTION = ("flash", "paged_attention")


def compile_report(*only, dump=None, packages=None):
    """The report's JSON. packages: a folder that stands first on the import path."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    if packages is not None:
        env["PYTHONPATH"] = os.pathsep.join([str(packages), str(ROOT)])
    command = [sys.executable, "-m", "minillm", "kernels", "--json"]
    for condition in only:
        command += ["--only", condition]
    command += ["--dump", str(dump)] if dump else []
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", env=env, cwd=ROOT, timeout=1500)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def broken_promises(row, half_spill_limit=0):
    """What a row of the report does not keep, as sentences."""
    wrong = []
    if row["shared_bytes"] > row["shared_limit"]:
        wrong.append("does not fit shared memory")
    if row["dtype"] != "float32":  # there for exactness, not for speed
        if row["spill_bytes"] > (half_spill_limit if row["dtype"] in HALF else 64):
            wrong.append("spills registers")
        for name in ("mma", "wgmma", "tcgen05"):
            if (row[name] > 0) != (row["expected"] == name):
                wrong.append(f"{row[name]} {name} where {row['expected']} is expected")
    if row["kernel"] in ATTENTION and row["dtype"] in HALF and row["phase"] == "prefill":
        small = row["head_size"] <= 128 and row["compute_capability"] != "7.5"
        if small and min(row["block_m"], row["block_n"]) < 64:
            wrong.append("tile below 64x64")
    return wrong


def all_broken_promises(report, half_spill_limit=0):
    found = [(row, broken_promises(row, half_spill_limit)) for row in report["rows"]]
    assert found
    return [f"{wrong}: {row}" for row, wrong in found if wrong]


SAME_VALUE = ("arith.extsi", "tt.splat", "tt.broadcast", "tt.expand_dims", "tt.reshape", "ttg.convert_layout")


def narrow_products(ttir):
    """Lines of a Triton IR in which a stride is multiplied in 32 bits by something that is not a constant.

    Such a product wraps once a tensor holds 2^31 values, which a long context's cache does.
    """
    strides = set(re.findall(r"(%\w*stride\w*): i(?:32|64)", ttir))
    constants, narrow = set(), []
    for line in ttir.splitlines():
        match = re.match(r"\s*(%[\w#]+) = (\S+) (.*)", line)
        if not match:
            continue
        name, operation, rest = match.groups()
        operands = set(re.findall(r"%[\w#]+", rest))
        if operation == "arith.constant":
            constants.add(name)
        elif operation in SAME_VALUE:
            if operands & strides:
                strides.add(name)
            if operands and operands <= constants:
                constants.add(name)
        elif operation == "arith.muli" and operands & strides and not operands & constants:
            if re.search(r": (?:tensor<[\dx]+x)?i32\b", line):
                narrow.append(line.strip())
    return narrow
