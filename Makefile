# Each target prepares what it needs: a virtual environment, filled once and again when
# pyproject.toml changes. Two choices on the command line:
#   PYTHON=python3.12   the interpreter the environment is made with (3.11 or newer)
#   VENV=system         no environment and no installs: use PYTHON and its packages as they are

PYTHON ?= python3
VENV ?= .venv
ARGS ?=

# What the driver offers: the CUDA version's major number, empty without a GPU, and the extra for it.
DRIVER_CUDA := $(shell nvidia-smi 2>/dev/null | sed -n 's/.*CUDA[A-Za-z ]*Version: *\([0-9][0-9]*\).*/\1/p' | head -n 1)
GPU_EXTRA := $(if $(filter 12,$(DRIVER_CUDA)),cuda12,$(if $(filter 13 14 15,$(DRIVER_CUDA)),cuda13))

# dev compiles with the CUDA 13 toolkit, which cannot share an environment with cuda12.
GPU_VENV := $(if $(filter cuda12,$(GPU_EXTRA)),$(VENV)-cuda12,$(VENV))

ifeq ($(VENV),system)
PY := $(PYTHON)
GPU_PY := $(PYTHON)
FA2 := $(PYTHON) -c 'import sys; from fa2_numba.cli import main; sys.exit(main())'
else
PY := $(VENV)/bin/python
GPU_PY := $(GPU_VENV)/bin/python
FA2 := $(GPU_VENV)/bin/fa2-numba
BASE := $(VENV)/.installed-base
DEV := $(VENV)/.installed-dev
GPU := $(if $(GPU_EXTRA),$(GPU_VENV)/.installed-$(GPU_EXTRA) $(GPU_VENV)/.installed-test,no-gpu)
REPORT := $(if $(GPU_EXTRA),$(GPU_VENV)/.installed-$(GPU_EXTRA),$(BASE))
STAMPS := $(sort $(BASE) $(DEV) $(REPORT) $(filter-out no-gpu,$(GPU)))
endif

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help report test test-gpu bench figures lint clean no-gpu

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1 \2/p' $(MAKEFILE_LIST) | awk '{ printf "  make %-9s", $$2; $$1 = $$2 = ""; print }'

report: $(REPORT) ## the IO report: on the GPU if there is one, else on the simulator (ARGS="...")
	NUMBA_ENABLE_CUDASIM=$(if $(GPU_EXTRA),0,1) $(FA2) report $(ARGS)

# Numba reads NUMBA_ENABLE_CUDASIM once, when it is imported: simulator and compiler need a process each.
test: $(DEV) ## all tests that need no GPU
	NUMBA_ENABLE_CUDASIM=1 $(PY) -m pytest tests -m "not gpu and not codegen" -n 2
	NUMBA_ENABLE_CUDASIM=0 $(PY) -m pytest tests -m codegen -n 2
	@echo "GPU tests: $(if $(GPU_EXTRA),not part of this target. A CUDA GPU was found: run make test-gpu,not run here (no CUDA GPU). On a machine with one: make test-gpu)"

test-gpu: $(GPU) ## the tests on a GPU, recorded as JSON (ARGS="...")
	NUMBA_ENABLE_CUDASIM=0 $(GPU_PY) -m benchmarks.test_gpu $(ARGS)

bench: $(GPU) ## time the readable kernels, the tensor-core ones (ARGS="..."), a training; as JSON
	NUMBA_ENABLE_CUDASIM=0 $(GPU_PY) -m benchmarks.readable
	NUMBA_ENABLE_CUDASIM=0 $(GPU_PY) -m benchmarks.forward $(ARGS)
	NUMBA_ENABLE_CUDASIM=0 $(GPU_PY) -m benchmarks.backward
	NUMBA_ENABLE_CUDASIM=0 $(GPU_PY) -m benchmarks.training

figures: $(BASE) ## the tables and figures of README and docs, from the recorded JSON
	$(PY) -m benchmarks.figures $(ARGS)

lint: $(DEV) ## ruff and mypy
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

clean: ## remove environments, caches, builds and reports
	rm -rf .venv .venv-cuda12 build dist *.egg-info fa2_report .hypothesis .pytest_cache .ruff_cache .mypy_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

no-gpu:
	@echo "This target needs a CUDA GPU: nvidia-smi shows none with CUDA 12 or newer." >&2; exit 1

# VENV/.installed-EXTRA: the environment has the package with that extra. Where Python came without
# ensurepip, venv alone fails and the interpreter's own pip fills the environment.
$(STAMPS): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit("fa2_numba needs Python 3.11 or newer; choose one with: make PYTHON=python3.12 ..." if sys.version_info < (3, 11) else 0)'
	@$(@D)/bin/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(@D) || \
		{ $(PYTHON) -m venv --without-pip $(@D) && $(PYTHON) -m pip --python $(@D)/bin/python install --quiet pip; }
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --editable ".$(patsubst %,[%],$(filter-out base,$(patsubst .installed-%,%,$(@F))))"
	@touch $@
