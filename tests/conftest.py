"""Random inputs that are fresh in every session and can be repeated; threads that fit the workers.

Each test starts with random, numpy and torch seeded from the session's seed and the test's own name, so a test
draws the same numbers alone and in the whole suite. A failure prints the seed: MINILLM_TEST_SEED=... repeats it.
`.ci/run` takes the seed from the commit's tree, so that a check that failed fails again.
"""

import os
import random
import secrets
import zlib

import hypothesis
import numpy as np
import pytest
import torch

VARIABLE = "MINILLM_TEST_SEED"

# Time limits fail on a busy machine; a failing example is printed so that it can be run again.
hypothesis.settings.register_profile("minillm", deadline=None, print_blob=True)
hypothesis.settings.load_profile("minillm")


def pytest_configure(config):
    """What workers and child processes inherit; they load PyTorch after this."""
    os.environ.setdefault(VARIABLE, str(secrets.randbelow(2**31)))
    # Threads that wait by spinning take the cores from those that work: on a busy machine the tests take ten times
    # as long. One thread per worker, since there are as many workers as cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    if config.getoption("numprocesses", None):
        os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_report_header(config):
    return f"{VARIABLE}={os.environ[VARIABLE]}"


def pytest_runtest_setup(item):
    name = item.nodeid.encode()
    seed = (int(os.environ[VARIABLE]) + zlib.crc32(name)) % 2**31
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


@pytest.fixture(autouse=True)
def nothing_solved(request, tmp_path_factory, monkeypatch):
    """No test sees, or adds to, the tasks that a learner has solved on this machine."""
    folder = tmp_path_factory.getbasetemp() / "mine" / str(zlib.crc32(request.node.nodeid.encode()))
    monkeypatch.setenv("MINILLM_MINE", str(folder))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.failed:
        report.sections.append(("to repeat", f"{VARIABLE}={os.environ[VARIABLE]} pytest '{item.nodeid}'"))
    return report
