"""A rank above 0 as a child process: `python -m minillm.parallel.worker`, started by processes.py only.

Its standard input holds one line of JSON, the task, and then nothing until the parent ends: the system closes it
even if the parent is killed, and this process ends with it.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading

import torch.distributed as dist

from minillm.checkpoint import load
from minillm.config import EngineConfig
from minillm.parallel.processes import Others
from minillm.parallel.start import run_rank
from minillm.resources import choose_device, choose_dtype


def main() -> int:
    task = json.loads(sys.stdin.readline())
    threading.Thread(target=end_with_parent, args=[task["folder"]], daemon=True).start()

    store = dist.FileStore(os.path.join(task["folder"], "store"), -1)
    others = Others(store, task["rank"], task["size"], local_rank=task["rank"])
    others.local = True
    config = EngineConfig.from_options(**task["config"])
    try:
        with others.noting_failure():
            device, _ = choose_device(config)
            dtype, _ = choose_dtype(config, device)
            run_rank(others, config, load(config.model, seed=config.seed), dtype, device)
    except Exception:
        return 1  # rank 0 tells why
    return 0


def end_with_parent(folder: str) -> None:
    sys.stdin.read()
    shutil.rmtree(folder, ignore_errors=True)  # the parent may have had no time for it
    os._exit(1)


if __name__ == "__main__":
    os._exit(main())  # threads of the collectives would wait for ranks that may be gone
