# Every target makes .venv first; that takes well under a second once it is there.
PYTHON ?= python3
VENV := .venv/bin/python
PYTEST := $(VENV) -m pytest
# Processes that run tests; those that share a server (or a file) stay on one of them.
WORKERS ?= 2
MINUTES ?= 30

.DEFAULT_GOAL := help
.PHONY: help setup demo demo-spec test test-full test-upstream soak lint format clean

help:
	@echo 'make setup      make .venv: dependencies once per machine, then this checkout (seconds)'
	@echo 'make demo       serve the embedded model on 2 attention ranks and 1 FFN rank, ask it, stop'
	@echo '                (ARGS="--attention-ranks 1 --ask ..." changes it; ARGS=--help tells how)'
	@echo 'make demo-spec  the same with the draft of the embedded model: says how much it gains'
	@echo 'make test       lint, types, unit and integration tests; report in reports/'
	@echo 'make test-full  all tests, full matrices included; dated record in tests/records/'
	@echo 'make test-upstream  with SGLANG_SRC=path of a checkout of SGLang: its CPU unit tests with this'
	@echo '                package and without; else the tests that its wheel ships, on both'
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

demo-spec: setup
	@$(VENV) -m sglang_afd.demo --draft $(ARGS)

lint: setup
	$(VENV) -m ruff check
	$(VENV) -m ruff format --check
	$(VENV) -m mypy

test: lint
	$(PYTEST) tests/unit tests/upstream -m 'not full' -n $(WORKERS) --durations=20 --junit-xml=reports/unit.xml
	$(PYTEST) tests/integration -m 'not full' -n $(WORKERS) --dist loadgroup --durations=30 --junit-xml=reports/integration.xml

# The record is written for a failed run too, and the run's exit code is kept.
test-full: lint
	$(PYTEST) tests -n $(WORKERS) --dist loadgroup --durations=50 --junit-xml=reports/full.xml; status=$$?; \
	$(VENV) tools/test_record.py reports/full.xml tests/records && exit $$status

# The record is written for failures too; without a checkout there is nothing to compare on.
test-upstream: setup
ifdef SGLANG_SRC
	$(VENV) tools/upstream_tests.py $(SGLANG_SRC) --records tests/records
else
	$(PYTEST) tests/upstream tests/integration/test_upstream_kits.py
endif

format: setup
	$(VENV) -m ruff check --fix
	$(VENV) -m ruff format

soak: setup
	SGLANG_AFD_SOAK_MINUTES=$(MINUTES) $(PYTEST) tests/integration/test_soak.py -rP

clean:
	rm -rf .venv build dist reports *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
