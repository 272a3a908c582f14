# Each target does all of its own set-up; started again, it sets up nothing twice.
#
#   make train    a first training run on real text (configs/quickstart.yaml)
#   make test     what a change breaks first
#   make test-all  the tests that `make test` leaves out
#   make fuzz     random models, data and layouts against one process: make fuzz SEED=1 CELLS=200
#   make families a tiny model of every causal language model of transformers on several layouts; goes on where it stopped
#   make witness  one run undisturbed and one through twelve disturbances, compared: 75 minutes; goes on where it stopped
#   make test-cluster  the tests that make several hosts or a SLURM cluster out of this machine: as root, ~15 minutes
#   make test-integrations  the tests that talk to W&B, Prometheus, object storage and others, whose packages it installs
#   make check    style, types and import contracts
#   make docs     the documentation as a site, in build/site; a broken link or anchor ends it
#   make test-versions  a part of the suite with each Python from 3.11 to 3.13 and torch 2.11 to 2.14 that can be had
#
# PYTHON=python3.12 picks another interpreter, VENV=folder another place for the environment, and
# ARGS="train.steps=50" is handed to the training.

PYTHON ?= python3
VENV ?= .venv
ARGS ?=

# torch 2.14 brings CUDA's packages, 3.5 GB.
VERSIONS ?= 3.11-2.11 3.12-2.12 3.13-2.13 3.13-2.14
VERSION_TESTS ?= tests/test_train.py tests/test_mesh.py tests/test_packaging.py tests/parity tests/parallel tests/optim \
	tests/pipeline tests/test_attention.py tests/foresight/test_trace.py

BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install -c constraints.txt

.PHONY: help train test test-all fuzz families witness test-cluster test-integrations test-versions check docs interpreter

help:
	@sed -n '/^#   make/s/^#   //p' Makefile

# As many processes as there are GPUs; on a machine without GPUs, 4 that share its cores.
train: $(VENV)/train.stamp
	@processes=$$($(BIN)/python -c 'import torch; print(torch.cuda.device_count() or 4)') && set -x && \
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/torchrun --standalone --nproc-per-node=$$processes \
		-m meshtrain.train configs/quickstart.yaml $(ARGS)

# Three files at a time on two cores, the longest first (tests/conftest.py): a test whose ranks wait leaves a core idle.
# The longest tests are listed, and CI keeps the times of all in build/. Compiled tests are kept, or each process that
# collects tests would compile all of them.
SUITE = PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder --durations=25

test: $(VENV)/dev.stamp
	$(SUITE) --junitxml=build/test.xml

# A -m of the command line takes the place of the one in pyproject.toml, which leaves these tests out.
test-all: $(VENV)/dev.stamp
	$(SUITE) --junitxml=build/test-all.xml -m slow

fuzz: $(VENV)/dev.stamp
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python -m tests.fuzz $(if $(SEED),--seed $(SEED)) $(if $(CELLS),--cells $(CELLS))

families: $(VENV)/dev.stamp
	OMP_NUM_THREADS=1 $(BIN)/python -m tools.families $(FAMILIES)

witness: $(VENV)/dev.stamp
	$(BIN)/python -m tools.witness

# They mostly wait: two at a time.
test-cluster: $(VENV)/dev.stamp
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python -m pytest -m cluster -n 2 --dist worksteal

test-integrations: $(VENV)/integrations.stamp
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python -m pytest -m integrations

check: $(VENV)/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(VENV)/docs.stamp
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet

# Each has an environment of its own beside VENV; an interpreter that is not there is passed over, and said.
test-versions:
	@for version in $(VERSIONS); do \
		python=python$${version%%-*} torch=$${version##*-} venv=$(VENV)-$$version; \
		$$python -c 'import venv, ensurepip' 2> /dev/null || { echo "== no $$python here"; continue; }; \
		echo "== Python $${version%%-*}, torch $$torch"; \
		{ test -x $$venv/bin/pip || $$python -m venv $$venv; } && \
		sed '/^torch==/d; /^setuptools==/d' constraints.txt > $$venv/constraints.txt && \
		$$venv/bin/python -m pip install --quiet -c $$venv/constraints.txt torch==$$torch.* -e '.[dev]' && \
		OMP_NUM_THREADS=1 $$venv/bin/python -m pytest -q -x -p no:cacheprovider $(VERSION_TESTS) || exit 1; \
	done

# The stamps say what was installed last: a change of the dependencies installs again.
$(VENV)/train.stamp: pyproject.toml constraints.txt | $(BIN)/pip
	$(INSTALL) -e '.[plot]'
	@touch $@

$(VENV)/dev.stamp: pyproject.toml constraints.txt | $(BIN)/pip
	$(INSTALL) -e '.[dev]'
	@touch $@ $(VENV)/train.stamp

$(VENV)/docs.stamp: pyproject.toml constraints.txt | $(BIN)/pip
	$(INSTALL) -e '.[docs]'
	@touch $@

$(VENV)/integrations.stamp: pyproject.toml constraints.txt | $(BIN)/pip
	$(INSTALL) -e '.[integrations]'
	@touch $@ $(VENV)/dev.stamp $(VENV)/train.stamp

$(BIN)/pip: | interpreter
	$(PYTHON) -m venv $(VENV)

interpreter:
	@test -x $(BIN)/pip || $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "meshtrain needs Python 3.11 or newer, and $(PYTHON) is $$($(PYTHON) --version 2>&1)." \
			"Name another one, for instance: make train PYTHON=python3.12" >&2; exit 1; }
	@test -x $(BIN)/pip || $(PYTHON) -c 'import venv, ensurepip' || { \
		echo "$(PYTHON) cannot make virtual environments. On Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
