# quantkit: every target sets up what it needs and can be run again.
#   make demo            quantize the embedded default model and compare it with the original
#   make test            the test suite (CI runs this)
#   make test-slow       the slower checks: real models, sanitizers
#   make test-runtimes   exported checkpoints in vLLM and llama.cpp, each in an environment of its own
#   make lint            ruff and mypy
VENV   ?= .venv
PYTHON ?= python3
PY     := $(VENV)/bin/python
# The CPU build of torch where there is no GPU: a CUDA build is several GB of files that nothing would use.
TORCH  ?= $(shell if command -v nvidia-smi >/dev/null 2>&1; then echo "torch>=2.6"; else echo "torch==2.13.0"; fi)
EXTRAS ?= eval,gguf,interop
STAMP  := $(VENV)/.installed
DEVSTAMP := $(VENV)/.installed-dev
# set where models and results of the demo go
OUT    ?= out

.PHONY: demo test test-slow test-runtimes lint clean
.DELETE_ON_ERROR:

$(PY):
	@echo "== creating a virtual environment in $(VENV)"
	$(PYTHON) -m venv $(VENV)

# The native kernels are compiled by this step (a C++ compiler is used when there is one).
$(STAMP): pyproject.toml CMakeLists.txt $(wildcard csrc/*.cpp csrc/*.h) | $(PY)
	@echo "== installing quantkit with $(TORCH) (once; some minutes)"
	$(PY) -m pip install -q "$(TORCH)"
	$(PY) -m pip install -q -e ".[$(EXTRAS)]"
	@touch $@

$(DEVSTAMP): $(STAMP)
	@echo "== installing the test tools"
	$(PY) -m pip install -q -e ".[$(EXTRAS),dev]"
	@touch $@

demo: $(STAMP)
	@echo "== quantizing the default model (SmolLM2-135M-Instruct) to 4 bits and comparing it with the original"
	$(PY) -m quantkit.cli demo --out $(OUT)/demo

test: $(DEVSTAMP)
	@echo "== running the tests"
	$(PY) -m pytest -m "not slow and not runtime"

test-slow: $(DEVSTAMP)
	$(PY) -m pytest -m "slow and not runtime"

test-runtimes: $(DEVSTAMP)
	tests/runtimes/setup.sh vllm
	tests/runtimes/setup.sh llama.cpp
	$(PY) -m pytest -m runtime

lint: $(DEVSTAMP)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

clean:
	rm -rf build $(OUT)
