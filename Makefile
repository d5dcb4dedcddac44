# make           lists the targets
# make demo      sets up what is missing and runs the demonstration
# make test      sets up what is missing and runs every test

SHELL := /bin/bash
VENV ?= .venv
PYTHON ?= python3
JOBS ?= $(shell nproc)
BIN := $(VENV)/bin
DEBIAN := g++ cmake ninja-build pkg-config libabsl-dev libhwy-dev libssl-dev libgtest-dev libgmock-dev \
          python3-dev python3-venv iproute2 iputils-ping iperf3 nftables openssl
SOURCES := $(shell find csrc cuda -type f 2>/dev/null) CMakeLists.txt setup.py pyproject.toml

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-cpp test-python lint asan tsan fuzz clean

help: ## list the targets
	@echo "torch_geomesh: targets of make"
	@sed -nE 's/^([a-z -]+):.*## (.*)/  \1|\2/p' $(firstword $(MAKEFILE_LIST)) | column -t -s '|'

setup: build/.installed ## install what is missing: Debian packages, .venv, PyTorch, the extension

build/.debian: Makefile
	@mkdir -p build
	@missing=$$(for p in $(DEBIAN); do dpkg -s $$p >/dev/null 2>&1 || echo -n "$$p "; done); \
	if [ -z "$$missing" ]; then echo "Debian packages: all there"; \
	else \
	  echo "Debian packages: installing $$missing"; \
	  if [ $$(id -u) = 0 ]; then sudo=; elif sudo -n true 2>/dev/null; then sudo=sudo; \
	  else echo "Run this, then try again: sudo apt-get install -y $$missing"; exit 1; fi; \
	  $$sudo apt-get update -qq && $$sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq $$missing >build/apt.log 2>&1 \
	  || { tail -5 build/apt.log; echo "Installing Debian packages failed (build/apt.log). Run this, then try again: $$sudo apt-get install -y $$missing"; exit 1; }; \
	fi
	@touch $@

$(BIN)/python: | build/.debian
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed; say which with: make PYTHON=/path/to/python3.11"; exit 1; }
	@echo "virtual environment: making $(VENV)"
	@$(PYTHON) -m venv $(VENV) || { echo "Making $(VENV) failed; remove it and try again."; exit 1; }

build/.installed: $(SOURCES) $(BIN)/python build/.debian
	@if $(BIN)/python -c 'import importlib.util as u, sys; sys.exit(u.find_spec("torch") is None)'; \
	then echo "PyTorch: already there"; \
	else echo "PyTorch: installing (a few minutes, about 6 GB)"; \
	  $(BIN)/pip install -q 'torch>=2.11,<2.16' numpy || { echo "Installing PyTorch failed; is there a way to the package index?"; exit 1; }; fi
	@if [ -n "$$GEOMESH_UCX_ROOT" ] || $(BIN)/python -c 'import importlib.util as u, sys; sys.exit(u.find_spec("libucx") is None)'; \
	then echo "UCX: already there"; \
	else echo "UCX: installing its wheel"; \
	  $(BIN)/pip install -q 'libucx-cu13>=1.18,<1.23' || { echo "Installing UCX's wheel failed; set GEOMESH_UCX_ROOT to a system UCX instead."; exit 1; }; fi
	@echo "torch_geomesh: building and installing (build/install.log)"
	@$(BIN)/pip install -q 'setuptools>=68,<82' wheel && MAX_JOBS=$(JOBS) $(BIN)/pip install -v --no-build-isolation -e '.[dev]' >build/install.log 2>&1 \
	  || { grep -E "error|torch_geomesh:" build/install.log | head -20; echo "Building torch_geomesh failed; the whole output is in build/install.log."; exit 1; }
	@grep -oE "cuda(:|/ is) (built|left out).*" build/install.log | head -1 || true
	@touch $@

demo: setup ## train across four emulated regions, three ways (under 6 minutes)
	@$(BIN)/geomesh demo $(ARGS)

test: test-cpp test-python ## run every test

test-cpp: setup
	@echo "C++ tests: building"
	@cmake --build build -j $(JOBS) >build/cpp.log 2>&1 || { grep -E "error" -A3 build/cpp.log | head -30; echo "Building the C++ tests failed (build/cpp.log)."; exit 1; }
	@ctest --test-dir build -j $(JOBS) --output-on-failure --no-tests=error

test-python: setup
	@$(BIN)/python -m pytest -q -ra

lint: setup ## ruff, mypy and clang-format
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy
	@find csrc cuda tests benchmarks -name '*.h' -o -name '*.cc' -o -name '*.cu' | xargs clang-format --dry-run -Werror

# Not wire/ucx under ThreadSanitizer: it would have to be built in UCX too.
UCX_DIR = $(or $(GEOMESH_UCX_ROOT),$(abspath $(firstword $(wildcard $(VENV)/lib/python3*/site-packages/libucx))))
asan: SANITIZE = -DGEOMESH_SANITIZE=address -DGEOMESH_UCX_DIR=$(UCX_DIR)
tsan: SANITIZE = -DGEOMESH_SANITIZE=thread
asan tsan: setup ## the C++ tests under AddressSanitizer or ThreadSanitizer
	@cmake -S . -B build/$@ -G Ninja -DCMAKE_BUILD_TYPE=RelWithDebInfo $(SANITIZE) >/dev/null
	@cmake --build build/$@ -j $(JOBS)
	@TSAN_OPTIONS=suppressions=$(CURDIR)/tests/tsan.supp ctest --test-dir build/$@ --output-on-failure --no-tests=error

FUZZ_SECONDS ?= 60
FUZZ_TARGETS := header hello record address tls peer code
CLANG ?= $(firstword $(foreach c,clang clang-19 clang-18 clang-17 clang-16 clang-15 clang-14,$(shell command -v $(c))))

fuzz: build/.debian ## search for bytes that break what parses them (clang; FUZZ_SECONDS=60 each)
	@[ -n "$(CLANG)" ] || { echo "make fuzz needs clang with libFuzzer: apt-get install clang, or make fuzz CLANG=/path/to/clang"; exit 1; }
	@cmake -S . -B build/fuzz -G Ninja -DCMAKE_BUILD_TYPE=RelWithDebInfo -DCMAKE_C_COMPILER=$(CLANG) -DCMAKE_CXX_COMPILER=$(subst clang,clang++,$(CLANG)) \
	  -DGEOMESH_BUILD_CUDA=OFF -DGEOMESH_SANITIZE=address -DGEOMESH_FUZZ=ON >/dev/null
	@cmake --build build/fuzz -j $(JOBS) --target $(FUZZ_TARGETS:%=%_fuzz)
	@cd build/fuzz && for t in $(FUZZ_TARGETS); do echo "$$t: $(FUZZ_SECONDS) s"; \
	  GEOMESH_FUZZ_SEEDS=corpus/$$t tests/fuzz/$${t}_fuzz && \
	  tests/fuzz/$${t}_fuzz -max_total_time=$(FUZZ_SECONDS) -max_len=8192 -timeout=10 -print_final_stats=1 -artifact_prefix=$$t- corpus/$$t >$$t.log 2>&1 \
	    && grep -E "cov:" $$t.log | tail -1 || { tail -30 $$t.log; echo "the input is in build/fuzz/$$t-*"; exit 1; }; done

clean: ## remove what was built; the virtual environment stays
	@rm -rf build torch_geomesh/*.so torch_geomesh/bin
