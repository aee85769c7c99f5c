# make install | demo | test | check | bench | chaos | docs | screenshots | dist-check      (docs/architecture.md says what each stands on)
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Tests mostly wait: for servers, timeouts, processes. Two files at a time use a machine of two cores well.
JOBS ?= 2
ROUNDS ?= 5
EXAMPLES ?= 300
export DAGSTER_DISABLE_TELEMETRY := yes
# The tests and the demo stay on this machine; a proxy would only break loopback.
export NO_PROXY := 127.0.0.1,localhost
export no_proxy := 127.0.0.1,localhost

.PHONY: install java browser demo test check bench chaos docs screenshots dist-check clean

install: $(STAMP)

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(not ((3, 10) <= sys.version_info[:2] < (3, 15)))' \
	  || { echo "storm_dagster needs Python 3.10 to 3.14, $(PYTHON) is $$($(PYTHON) --version 2>&1): set PYTHON=/path/to/python3.x" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) \
	  || { echo "cannot make a virtual environment: apt-get install python3-venv, then again" >&2; exit 1; }
	@$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'
	@echo "installing storm_dagster and everything it needs into $(VENV) (a few minutes the first time)"
	@$(BIN)/python -m pip install --quiet --editable . --group test --group check --group docs
	@touch $@

# Java runs ZooKeeper and Spark. Where we may, we install it; elsewhere we say how.
java:
	@if java -version 2>&1 | grep -Eq 'version "(1[7-9]|[2-9][0-9])'; then exit 0; fi; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  echo "Java 17 or newer is missing: installing openjdk-17-jre-headless"; \
	  apt-get update -qq && { apt-get install -y -qq openjdk-17-jre-headless >/dev/null || apt-get install -y -qq default-jre-headless >/dev/null; }; \
	else \
	  echo "Java 17 or newer is missing. Debian, Ubuntu: sudo apt-get install openjdk-17-jre-headless; Fedora: sudo dnf install java-17-openjdk-headless; macOS: brew install openjdk@17. Then run make again." >&2; exit 1; \
	fi

# The browser tests look at Dagster's pages with it; without one they are skipped, saying the same as this.
browser:
	@for name in chromium chromium-browser google-chrome google-chrome-stable; do command -v $$name >/dev/null && exit 0; done; \
	ls -d "$$HOME"/.cache/ms-playwright/chromium-* >/dev/null 2>&1 && exit 0; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  echo "no Chromium: installing Debian's"; \
	  apt-get update -qq && apt-get install -y -qq chromium >/dev/null || echo "it could not be installed: the browser tests are skipped" >&2; \
	else \
	  echo "no Chromium: the browser tests are skipped. Debian: sudo apt-get install chromium; Ubuntu: sudo snap install chromium; Fedora: sudo dnf install chromium; elsewhere: $(BIN)/python -m playwright install chromium" >&2; \
	fi

demo: java install
	@KEEP=$(KEEP) $(BIN)/python examples/demo.py

test: java browser install
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile -m "not long" --durations 15 $(ARGS)

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	cd / && PATH=$(CURDIR)/$(BIN):$$PATH pyright --verifytypes storm_dagster.api --ignoreexternal
	$(BIN)/dagster definitions validate -w workspace.yaml
	$(BIN)/dg check defs

bench: java install
	$(BIN)/python benchmarks/run.py $(ARGS)

# ROUNDS=20, or MINUTES=60; SEED=7 repeats one programme; EXAMPLES=1000 interleavings of two actors;
# ARGS='--faults "worker killed,leader killed"' (tests/chaos/run.py --help names all).
chaos: java install
	CHAOS_EXAMPLES=$(EXAMPLES) $(BIN)/python -m pytest -q tests/operations/test_crash_points.py tests/operations/test_interleavings.py
	$(BIN)/python -m pytest -q tests/cluster tests/worker
	$(BIN)/python tests/chaos/run.py $(if $(MINUTES),--minutes $(MINUTES),--rounds $(ROUNDS)) $(if $(SEED),--seed $(SEED)) $(ARGS)

# The site, strictly: a broken link or a snippet that does not run fails.
docs: install
	$(BIN)/python -m pytest -q tests/docs $(ARGS)
	$(BIN)/python -m sphinx -W --keep-going -q -b dirhtml docs build/site
	@echo "open build/site/index.html"

# The pictures in README and documents, taken from the browser tests. Look at each before you commit it.
screenshots: java browser install
	SCREENSHOTS=docs/images $(BIN)/python -m pytest -q tests/browser $(ARGS)

# The quickstart, typed as it stands, with the wheel installed into a fresh environment from the package index.
dist-check: java install
	rm -rf build/dist-check && mkdir -p build/dist-check
	$(BIN)/python -m build --outdir build/dist-check .
	$(PYTHON) -m venv build/dist-check/venv
	build/dist-check/venv/bin/pip install --quiet build/dist-check/*.whl
	build/dist-check/venv/bin/storm-dagster --version
	QUICKSTART_BIN=$(CURDIR)/build/dist-check/venv/bin $(BIN)/python -m pytest -q tests/docs/test_quickstart.py $(ARGS)

clean:
	rm -rf $(VENV) .pytest_cache .hypothesis .ruff_cache build dist
