# Every target makes .venv first; that takes well under a second once it is there.
PYTHON ?= python3
VENV := .venv/bin/python
PYTEST := $(VENV) -m pytest
# Unit tests are independent processes' work; integration tests start ranks that fill the cores.
WORKERS ?= 2
MINUTES ?= 30

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-full soak lint format clean

help:
	@echo 'make setup      make .venv: dependencies once per machine, then this checkout (seconds)'
	@echo 'make demo       serve the embedded model on 2 attention ranks and 1 FFN rank, ask it, stop'
	@echo '                (ARGS="--attention-ranks 1 --ask ..." changes it; ARGS=--help tells how)'
	@echo 'make test       lint, types, unit and integration tests; report in reports/'
	@echo 'make test-full  all tests, full matrices included; dated record in tests/records/'
	@echo 'make soak       random load for MINUTES=30 minutes: right answers, no leak'
	@echo 'make lint       ruff and mypy alone'
	@echo 'make format     let ruff reformat and mend what it can'
	@echo 'make clean      remove .venv, build products, caches and reports'
	@echo
	@echo 'Needs Python 3.11 or 3.12: PYTHON=/path/to/python3.11 names one. The dependencies (several GB)'
	@echo 'are shared by all checkouts under $${SGLANG_AFD_CACHE:-~/.cache/sglang_afd}; delete that folder'
	@echo 'to free the space.'

setup:
	@$(PYTHON) tools/setup_env.py

demo: setup
	@$(VENV) -m sglang_afd.demo $(ARGS)

lint: setup
	$(VENV) -m ruff check
	$(VENV) -m ruff format --check
	$(VENV) -m mypy

test: lint
	$(PYTEST) tests/unit tests/upstream -m 'not full' -n $(WORKERS) --durations=20 --junit-xml=reports/unit.xml
	$(PYTEST) tests/integration -m 'not full' --durations=30 --junit-xml=reports/integration.xml

# The record is written for a failed run too, and the run's exit code is kept.
test-full: lint
	$(PYTEST) tests --durations=50 --junit-xml=reports/full.xml; status=$$?; \
	$(VENV) tools/test_record.py reports/full.xml tests/records && exit $$status

format: setup
	$(VENV) -m ruff check --fix
	$(VENV) -m ruff format

soak: setup
	SGLANG_AFD_SOAK_MINUTES=$(MINUTES) $(PYTEST) tests/integration/test_soak.py -rP

clean:
	rm -rf .venv build dist reports *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
