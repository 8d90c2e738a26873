"""The second cell of every lesson: seeds, quiet warnings, and one line that says that all is there.

What comes before it, the installation, is `make lab` on your machine and the generated first cell in Colab.
"""

from __future__ import annotations

import os
import platform
import random
import warnings

import numpy as np
import torch

from minillm.course.timing import report

SEED = 0


def start(number: str, name: str) -> None:
    """Make this kernel ready for lesson `number`. Running it again starts from the same state."""
    random.seed(SEED)
    np.random.seed(SEED)
    torch.manual_seed(SEED)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # a forked tokenizer warns in the middle of a lesson
    warnings.filterwarnings("ignore", category=FutureWarning)
    print(f"lesson {number}, {name}: ready")
    report(where())


def where() -> str:
    """Where this lesson runs, in one line."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    threads = torch.get_num_threads()
    return f"Python {platform.python_version()}, torch {torch.__version__}, {device}, {threads} CPU threads"
