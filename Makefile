# `make demo` and `make test` set up everything they need. Only Python 3.11+, make and git must be there.

PYTHON ?= python3
VENV ?= .venv
# Extra pip flags for torch. On Linux without a GPU, the CPU build saves a download of several GB:
#   make demo TORCH_FLAGS="--index-url https://download.pytorch.org/whl/cpu"
TORCH_FLAGS ?=
# Older TRL versions of `make test-compat`. Of the two minors before the pinned one, the GRPOTrainer of 1.15.0 itself
# runs on GPUs only (it needs Triton), so the suite can say nothing of it on a CPU.
OLDER_TRL ?= 1.14.2

BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check
OFFLINE := HF_HUB_OFFLINE=1 HF_HUB_DISABLE_TELEMETRY=1 TOKENIZERS_PARALLELISM=false

.PHONY: demo test test-compat quality style bench clean

demo: $(VENV)/.installed
	$(OFFLINE) $(BIN)/python train_bapo.py

test: $(VENV)/.installed
	$(OFFLINE) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

quality: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

style: $(VENV)/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.installed
	$(BIN)/python benchmarks/quickstart.py
	$(BIN)/python benchmarks/search_cost.py
	$(BIN)/python benchmarks/update_cost.py
	$(BIN)/python benchmarks/replay_queue.py
	$(BIN)/python benchmarks/replay_study.py --jobs 2
	$(BIN)/python benchmarks/render_results.py

test-compat: $(OLDER_TRL:%=test-with-trl-%)

test-with-trl-%: constraints.txt
	grep -v '^trl==' constraints.txt > .constraints-trl-$*.txt
	echo 'trl==$*' >> .constraints-trl-$*.txt
	$(MAKE) test VENV=.venv-trl-$* CONSTRAINTS=.constraints-trl-$*.txt

CONSTRAINTS ?= constraints.txt
$(VENV)/.installed: setup.cfg pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11 ...")'
	@echo "Installing into $(VENV), once: this takes a minute or more ..."
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --constraint $(CONSTRAINTS) $(TORCH_FLAGS) torch
	$(PIP) install --quiet --constraint $(CONSTRAINTS) --config-settings editable_mode=compat --editable '.[dev]'
	touch $@

clean:
	rm -rf .venv .venv-trl-* .constraints-trl-*.txt outputs
