# make help lists what there is. Every target works from a fresh clone.

CARGO ?= cargo
BINARY := target/release/talon
export PATH := $(HOME)/.cargo/bin:$(PATH)

.PHONY: help demo test build bench lint soak deny toolchain nextest clean

help: ## list the targets
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

demo: build ## build, let the demo model answer, and measure this box with it
	$(BINARY) generate "What is 17 + 25?"
	$(BINARY) generate --no-think "What is a whale?"
	$(BINARY) generate --raw --max-tokens 40 "[gMASK]<sop>In the beginning God"
	$(BINARY) bench --html target/demo-report.html
	@echo "the report with plots: target/demo-report.html"

test: toolchain nextest ## the whole test suite
	$(CARGO) nextest run --locked

build: toolchain ## the binary, target/release/talon
	$(CARGO) build --release --locked

bench: build ## the figures of docs/measurements.md: decode rates, speculation, start-up
	$(BINARY) bench --draft none --ignore-eos --tp 1
	$(BINARY) bench --draft none --ignore-eos --tp 2
	$(BINARY) bench --draft auto --draft-tokens 3
	$(BINARY) bench --draft mtp --draft-tokens 3 --sweep
	$(BINARY) bench --draft auto
	$(BINARY) bench --draft mtp
	tests/start_up.sh $(BINARY)

lint: toolchain ## format and lints, as CI checks them
	$(CARGO) fmt --all --check
	$(CARGO) clippy --locked --all-targets -- -D warnings

soak: toolchain nextest ## property tests with a hundred times the cases, lossless tests at full length
	PROPTEST_CASES=25600 TALON_SOAK=14 $(CARGO) nextest run --locked --no-fail-fast -E 'binary(hostile_input) + binary(text) + binary(row_invariance) + binary(lossless) + binary(adversarial_drafters) + binary(chain_ends) + binary(sampling_law)'

deny: toolchain ## licences and sources of the dependencies (installs cargo-deny)
	@command -v cargo-deny >/dev/null || $(CARGO) install --locked cargo-deny
	$(CARGO) deny check licenses bans sources

toolchain: ## Rust, if it is not there
	@command -v cargo >/dev/null || { \
	  echo "installing Rust with rustup into ~/.cargo"; \
	  curl --proto '=https' --tlsv1.2 -fsS https://sh.rustup.rs | \
	    sh -s -- -y --profile minimal --component clippy --component rustfmt; }
	@cargo --version | awk '{ split($$2, v, "."); exit !(v[1] > 1 || v[2] >= 88) }' || { \
	  echo "cargo is too old, talon needs Rust 1.88 or later: rustup update"; exit 1; }
	@command -v cc >/dev/null || { \
	  echo "no C compiler to link with; install one, for example: apt-get install gcc"; exit 1; }

nextest: toolchain
	@command -v cargo-nextest >/dev/null || $(CARGO) install --locked cargo-nextest

clean: ## remove what was built
	$(CARGO) clean
