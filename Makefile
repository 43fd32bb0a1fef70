# make help lists what there is. Every target works from a fresh clone.

CARGO ?= cargo
BINARY := target/release/talon
export PATH := $(HOME)/.cargo/bin:$(PATH)
# Where build/nvcc.rs looks last, and the release whose nvcc goes there.
CUDA := .toolchain/cuda
CUDA_RELEASE := 13.0.*
CUDA_PACKAGES := $(foreach part,cuda-nvcc nvvm cuda-crt cuda-runtime cuda-cccl,"nvidia-$(part)==$(CUDA_RELEASE)")

# One file for other boxes: zig links it against the symbols of an old glibc.
DIST_TARGET := x86_64-unknown-linux-gnu
DIST_GLIBC := 2.17
DIST := dist/talon-$(shell sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml)-x86_64-linux
ZIG := .toolchain/zig
ZIG_PACKAGES := cargo-zigbuild==0.24.1 ziglang==0.15.2
CARGO_HOME_PATH := $(if $(CARGO_HOME),$(CARGO_HOME),$(HOME)/.cargo)

.PHONY: help demo test build dist test-dist zig bench load load-rate emulator lint soak deny toolchain nextest clients clean

# The Python clients that tests/http_clients.rs runs.
CLIENTS := .toolchain/python

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

demo: build ## build, let the demo model answer, and measure this box with it
	$(BINARY) generate "What is 17 + 25?"
	$(BINARY) generate --no-think "What is a whale?"
	$(BINARY) generate --raw --max-tokens 40 "[gMASK]<sop>In the beginning God"
	$(BINARY) bench --html target/demo-report.html
	@echo "the report with plots: target/demo-report.html"

test: toolchain nextest clients ## the whole test suite
	$(CARGO) nextest run --locked

build: toolchain ## the binary, target/release/talon
	$(CARGO) build --release --locked

# No path of this machine may reach the file: the same commit gives the same bytes in every folder.
dist: toolchain zig ## one file for other boxes, dist/talon-VERSION-x86_64-linux, for glibc 2.17 or later
	TALON_REQUIRE_KERNELS=1 CARGO_ZIGBUILD_ZIG_PATH=$(CURDIR)/$(ZIG)/ziglang/zig \
	  RUSTFLAGS="--remap-path-prefix=$(CURDIR)=/talon --remap-path-prefix=$(CARGO_HOME_PATH)=/cargo" \
	  $(ZIG)/bin/cargo-zigbuild zigbuild --release --locked --target $(DIST_TARGET).$(DIST_GLIBC)
	@mkdir -p dist
	@cp target/$(DIST_TARGET)/release/talon $(DIST)
	@cd dist && sha256sum $(notdir $(DIST)) | tee $(notdir $(DIST)).sha256

test-dist: dist ## prove it: size, libraries, glibc version, a run in an old distribution (root, debootstrap)
	tests/dist.sh $(DIST)

zig:
	@if [ ! -x $(ZIG)/bin/cargo-zigbuild ]; then \
	  echo "installing $(ZIG_PACKAGES) into $(ZIG)"; \
	  rm -rf $(ZIG) $(ZIG).new; \
	  PIP_ROOT_USER_ACTION=ignore python3 -m pip install --quiet --disable-pip-version-check --no-deps \
	    --target $(ZIG).new $(ZIG_PACKAGES) && mv $(ZIG).new $(ZIG); \
	fi

bench: build ## the figures of docs/measurements.md: decode rates, speculation, start-up
	$(BINARY) bench --draft none --ignore-eos --tp 1
	$(BINARY) bench --draft none --ignore-eos --tp 2
	$(BINARY) bench --draft auto --draft-tokens 3
	$(BINARY) bench --draft mtp --draft-tokens 3 --sweep
	$(BINARY) bench --draft auto
	$(BINARY) bench --draft mtp
	tests/start_up.sh $(BINARY)

load: build ## the load figures of docs/measurements.md: requests/s and time to the first token of talon serve
	python3 tests/clients/load.py $(BINARY)

load-rate: build ## how fast a checkpoint of 10 GB is loaded beside dd, on the disk of target/; takes 10 GB there for a while
	python3 tests/load_rate.py $(BINARY) target/load-rate

emulator: toolchain ## a libcuda that runs the kernels on the CPU (tests/emulator/README.md)
	tests/emulator/build.sh target/emulator

lint: toolchain ## format and lints, as CI checks them
	$(CARGO) fmt --all --check
	$(CARGO) clippy --locked --all-targets -- -D warnings

soak: toolchain nextest ## property tests with a hundred times the cases, lossless and load tests at full length
	PROPTEST_CASES=25600 TALON_SOAK=14 $(CARGO) nextest run --locked --no-fail-fast -E 'binary(hostile_input) + binary(text) + binary(row_invariance) + binary(lossless) + binary(adversarial_drafters) + binary(chain_ends) + binary(sampling_law) + binary(scheduler) + binary(http_errors) + binary(http_load) + test(tool_calls)'

deny: toolchain ## licences and sources of the dependencies (installs cargo-deny)
	@command -v cargo-deny >/dev/null || $(CARGO) install --locked cargo-deny
	$(CARGO) deny check licenses bans sources

# nvcc is installed aside and moved, so that a download cut short leaves nothing that looks whole. Cargo learns of it
# from the build script's date. pip's options that old releases lack go through the environment.
toolchain: ## Rust and nvcc, if they are not there
	@command -v cargo >/dev/null || { \
	  echo "installing Rust with rustup into ~/.cargo"; \
	  curl --proto '=https' --tlsv1.2 -fsS https://sh.rustup.rs | \
	    sh -s -- -y --profile minimal --component clippy --component rustfmt; }
	@cargo --version | awk '{ split($$2, v, "."); exit !(v[1] > 1 || v[2] >= 88) }' || { \
	  echo "cargo is too old, talon needs Rust 1.88 or later: rustup update"; exit 1; }
	@command -v cc >/dev/null || { \
	  echo "no C compiler to link with; install one, for example: apt-get install gcc"; exit 1; }
	@if [ -n "$$NVCC" ] || [ -x "$$CUDA_HOME/bin/nvcc" ] || command -v nvcc >/dev/null || \
	  [ -x $(CUDA)/nvidia/cu13/bin/nvcc ]; then :; \
	elif ! command -v g++ >/dev/null || ! python3 -m pip --version >/dev/null 2>&1; then \
	  echo "no nvcc, and no g++ and python3 with pip to install and use one: the build will be CPU only"; \
	else \
	  echo "installing nvcc $(CUDA_RELEASE) into $(CUDA)"; \
	  rm -rf $(CUDA) $(CUDA).new; \
	  if PIP_ROOT_USER_ACTION=ignore python3 -m pip install --quiet --disable-pip-version-check --no-deps \
	    --target $(CUDA).new $(CUDA_PACKAGES); \
	  then mv $(CUDA).new $(CUDA) && touch build.rs; \
	  else echo "nvcc was not installed: the build will be CPU only"; fi; \
	fi

nextest: toolchain
	@command -v cargo-nextest >/dev/null || $(CARGO) install --locked cargo-nextest

clients: ## the Python clients that the tests of talon serve run, if pip can have them
	@if [ -x $(CLIENTS)/bin/python ] && cmp -s tests/clients/requirements.txt $(CLIENTS)/requirements.txt; then :; \
	elif rm -rf $(CLIENTS) && python3 -m venv $(CLIENTS) && \
	  $(CLIENTS)/bin/python -m pip install --quiet --disable-pip-version-check -r tests/clients/requirements.txt; \
	then cp tests/clients/requirements.txt $(CLIENTS)/requirements.txt; \
	else rm -rf $(CLIENTS); echo "no Python clients: their tests will be left out"; fi

clean: ## remove what was built
	$(CARGO) clean
