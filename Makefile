# All of the project's commands. `make help` lists them; each does its own set-up and is quick the second time.
# Paths are relative and tools run as `python -m`, so that a folder with a space in its name works: the start scripts
# that pip writes do not.

PYTHON ?= $(shell for p in python3 python3.12 python3.13 python3.11; do \
	"$$p" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' \
	2>/dev/null && echo "$$p" && break; done)
REF ?= main
WORKERS ?= 4

PY := .venv/bin/python
READY := .venv/.ready
PYTEST := $(PY) -m pytest -n logical --maxprocesses $(WORKERS) --dist loadfile

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help setup lab demo test test-all browser test-slow lint format notebooks exercises gpu-check

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*##  *\(.*\)/\1|\2/p' Makefile | while IFS='|' read -r name text; do \
	printf '  make %-10s %s\n' "$$name" "$$text"; done

setup: $(READY)  ## a .venv with all packages and the model; needs Python 3.11-3.13

$(READY): pyproject.toml constraints.txt minillm/course/build/bootstrap.py
	@[ -n "$(PYTHON)" ] || { echo "make: found no Python 3.11, 3.12 or 3.13 with venv and pip." \
	"Install one (Debian, Ubuntu: apt install python3-venv) or name it: make setup PYTHON=/path/to/python3.12" >&2; exit 1; }
	@[ -x $(PY) ] || { echo "setup: a new environment in .venv with $$("$(PYTHON)" --version)"; "$(PYTHON)" -m venv .venv; }
	@$(PY) -P minillm/course/build/bootstrap.py
	@touch $(READY)

lab: $(READY)  ## JupyterLab on the first lesson (BROWSER=none opens no browser)
	@echo "lab: JupyterLab starts; open the address below that begins with http://127.0.0.1. Ctrl-C twice ends it."
	@set --; [ "$${BROWSER:-}" != none ] || set -- --no-browser; \
	[ "$$(id -u)" != 0 ] || set -- "$$@" --allow-root; \
	JUPYTER_PREFER_ENV_PATH=1 exec $(PY) -m jupyterlab --ServerApp.ip=127.0.0.1 \
	--LabApp.default_url=/lab/tree/notebooks/00_the_wait.ipynb "$$@"

demo: $(READY)  ## the model answers a question and shows where the wait for its first token went
	@$(PY) -m minillm demo

test: $(READY) lint  ## lint, unit tests, and every notebook run again and compared
	@for part in unit kernels grader; do [ ! -d "tests/$$part" ] || { echo "test: tests/$$part"; \
	$(PYTEST) "tests/$$part" || exit $$?; }; done
	@echo "test: notebooks"
	@$(PY) -m minillm.course.build.nbval_run notebooks solutions

test-all: test browser test-slow  ## test, then the slow tests

browser:  # Debian's Chromium, for the tests that move widgets; it is installed only where root asks for it
	@command -v chromium >/dev/null || if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	echo "browser: installing chromium"; apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install \
	-y -qq --no-install-recommends -o DPkg::Lock::Timeout=120 chromium >/dev/null; \
	else echo "browser: no chromium here, and only root installs it; tests that need it are skipped"; fi

test-slow: $(READY)
	@echo "test: slow tests"
	@$(PYTEST) -m slow tests

# Works where nothing is installed but PyTorch and Triton: it takes .venv where there is one, else the machine's python3.
gpu-check:  ## what kernels and engine reach on this machine's NVIDIA GPU, in six minutes (OUT=file.json)
	@py=$(PY); [ -x "$$py" ] || py=python3; "$$py" -m benchmarks.gpu_check --out "$(or $(OUT),gpu_check.json)"

lint: $(READY)  ## ruff: rules and formatting
	@echo "lint: ruff"
	@$(PY) -m ruff check --quiet .
	@$(PY) -m ruff format --quiet --check . || { echo "lint: files above need \`make format\`" >&2; exit 1; }

format: $(READY)  ## let ruff mend what it can
	@$(PY) -m ruff check --fix .
	@$(PY) -m ruff format .

notebooks: $(READY)  ## run, clean and rewrite the notebooks (REPO=owner/name REF=tag)
	@$(PY) -m minillm.course.build.notebooks --ref "$(REF)" $(if $(REPO),--repo "$(REPO)")

exercises: $(READY)  ## make exercises/ from solutions/, and run each with nothing solved
	@$(PY) -m minillm.course.build.exercises
