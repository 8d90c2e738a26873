"""The tiny random model that most tests run on."""

import os

import pytest

from minillm.checkpoint import load
from minillm.model import Transformer


@pytest.fixture(scope="module")
def tiny():
    """(checkpoint, fp32 model) of a two-layer Llama with random weights."""
    checkpoint = load("random:tiny")
    return checkpoint, Transformer(checkpoint.config, checkpoint.weights)


@pytest.fixture(scope="session")
def session_seed():
    """The seed of this session (see tests/conftest.py), for generators that outlive one test."""
    return int(os.environ["MINILLM_TEST_SEED"])
