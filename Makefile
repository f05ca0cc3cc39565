# What a person types. `make demo` and `make test` each work alone on a fresh clone with Python 3.11.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
INSTALLED := .venv/.installed
HARNESS := .venv/.installed-harness
PARITY_DATA := corpus/parity/report.json
DEMO_DATA := corpus/stdlib/report.json

# The text that every machine has: the standard library of the Python in use.
STDLIB = $$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_paths()["stdlib"])')
# Two processes for two stages: on devices where there are two, else on the CPU, a core each.
ON_THIS_MACHINE = if [ "$$(nvidia-smi -L 2>/dev/null | grep -c '^GPU')" -lt 2 ]; then export DS_ACCELERATOR=cpu OMP_NUM_THREADS=1; fi

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup demo test test-full check format parity parity-full reference

help:
	@echo 'make demo         set up, then text -> tokenizer -> tokens -> 2-stage training on this machine'
	@echo 'make test         set up, then every test that CI runs'
	@echo 'make test-full    the same and the slow tests'
	@echo 'make check        lint, format, types, import directions'
	@echo 'make parity       write docs/parity.md: every layout against one process (parity-full: every cell)'
	@echo 'make setup        what the others begin with: .venv, the project editable in it, corpus/parity'

setup: $(INSTALLED) $(PARITY_DATA)

$(BIN)/python:
	@test -n '$(PYTHON)' || { echo 'error: no Python found: name one of version 3.11 or newer, as in  make setup PYTHON=/usr/bin/python3.11' >&2; exit 1; }
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(None if v >= (3, 11) else "error: %s is Python %d.%d, but 3.11 or newer is needed: name one, as in  make setup PYTHON=/usr/bin/python3.11" % (sys.executable, v[0], v[1]))'
	$(PYTHON) -m venv .venv

$(INSTALLED): requirements.txt requirements-test.txt pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --disable-pip-version-check -r requirements.txt -r requirements-test.txt
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --no-deps --no-build-isolation -e .
	@touch $@

$(PARITY_DATA): | $(INSTALLED)
	stdlib="$(STDLIB)"; $(BIN)/python launcher/prepare_data.py --include '*.py' --output corpus/parity --vocab-size 512 \
	    --validation-fraction 0.1 --input "$$stdlib/json" "$$stdlib/email" "$$stdlib/http" "$$stdlib/logging"

$(DEMO_DATA): | $(INSTALLED)
	$(BIN)/python launcher/prepare_data.py --input "$(STDLIB)" --include '*.py' \
	    --exclude test idlelib lib2to3 site-packages \
	    --output corpus/stdlib --vocab-size 4096 --validation-fraction 0.01

demo: setup $(DEMO_DATA)
	@$(ON_THIS_MACHINE); set -x; \
	$(BIN)/deepspeed --num_gpus 2 launcher/train.py configs/tiny.yaml parallel.pipeline=2 && \
	$(BIN)/python launcher/evaluate.py runs/tiny --data corpus/stdlib/validation && \
	$(BIN)/python launcher/generate.py runs/tiny --prompt 'def read('
	@echo
	@echo 'To see the run, type  $(BIN)/tensorboard --logdir runs  and open the address that it prints.'

test test-full parity parity-full: export OMP_NUM_THREADS = 1

test: setup
	@mkdir -p build && rm -f build/tests.xml
	$(BIN)/python -m pytest --junitxml=build/tests.xml

$(HARNESS): requirements-harness.txt $(INSTALLED)
	$(BIN)/python -m pip install --disable-pip-version-check -r requirements.txt -r requirements-test.txt -r $<
	@touch $@

test-full: setup $(HARNESS)
	@mkdir -p build && rm -f build/tests.xml
	$(BIN)/python -m pytest --junitxml=build/tests.xml -m ''

check: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_import_directions.py

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

parity: setup
	$(BIN)/python -m tests.parity.report

parity-full: setup
	$(BIN)/python -m tests.parity.report --full

reference: $(INSTALLED)
	$(BIN)/python -m training.reference > docs/configuration.md
