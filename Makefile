# make demo | check | test                          what everybody needs
# make test-all | chaos | soak | simulate | fuzz | compat | browser | test-docker | test-kafka | test-streamparse   what takes longer
# make install | bench | docs | screenshots | dist-check | clean      (CONTRIBUTING.md says what each does)
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PYTEST = $(BIN)/python -m pytest
# Tests wait for servers, timeouts and processes: seven files at a time use a machine of two cores well.
CORES = $(shell nproc 2>/dev/null || getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)
JOBS ?= $(shell echo $$(( $(CORES) * 7 / 2 )))
PARALLEL = -n $(JOBS) --dist loadfile --no-loadscope-reorder
ROUNDS ?= 5
EXAMPLES ?= 1000
SEEDS ?= 20
export DAGSTER_DISABLE_TELEMETRY := yes
# The tests and the demo stay on this machine; a proxy would only break loopback.
export NO_PROXY := 127.0.0.1,localhost
export no_proxy := 127.0.0.1,localhost

# Who forbids to store bytecode pays for 600 test modules, compiled by every worker of pytest in every run.
unexport PYTHONDONTWRITEBYTECODE

# Installations into one environment come one after the other.
.NOTPARALLEL:
.PHONY: install java chromium promtool demo test test-all test-docker check bench chaos soak simulate fuzz compat browser docs screenshots dist-check clean test-kafka test-streamparse

# -- each target installs what it runs, and adds to what others have installed ---------------------------------------
RUNTIME := $(VENV)/.runtime
TEST := $(VENV)/.test
CHECK := $(VENV)/.check
DOCS := $(VENV)/.docs

install: $(TEST) $(CHECK)

$(RUNTIME): pyproject.toml
	@$(PYTHON) tools/install.py $(VENV)
	@touch $@

# What makes the first start of ZooKeeper and Spark twice as fast; without it they start as well.
CLASS_DATA := $(VENV)/.class-data
$(CLASS_DATA): | $(RUNTIME)
	@$(BIN)/storm-dagster dev --prepare && touch $@ || echo "the first start will be slower" >&2

# A test builds the site.
$(TEST): pyproject.toml | $(RUNTIME)
	@$(PYTHON) tools/install.py $(VENV) test docs
	@touch $@ $(DOCS)

$(CHECK): pyproject.toml | $(RUNTIME)
	@$(PYTHON) tools/install.py $(VENV) check
	@touch $@

$(DOCS): pyproject.toml | $(RUNTIME)
	@$(PYTHON) tools/install.py $(VENV) docs
	@touch $@

# pytest rewrites the asserts of each module once and keeps the result. All its processes begin with all modules: without
# this each of them would rewrite all for itself.
REWRITTEN := $(VENV)/.rewritten
$(REWRITTEN): $(TEST) $(shell find tests -name '*.py')
	@ls -d tests/*/ | xargs -P $(CORES) -n 18 $(PYTEST) -q --collect-only >/dev/null 2>&1 || true
	@touch $@

# Java runs ZooKeeper and Spark. Where we may, we install it; elsewhere we say how.
# All that needs it runs supervisors and workers too.
java:
	@[ "$$(uname -s)" = Linux ] || { echo "supervisors and workers need Linux, and this is $$(uname -s): use a container or a virtual machine (docs/production.md, Which system)" >&2; exit 1; }
	@if java -version 2>&1 | grep -Eq 'version "(1[7-9]|[2-9][0-9])'; then exit 0; fi; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  echo "Java 17 or newer is missing: installing openjdk-17-jre-headless"; \
	  apt-get update -qq && { apt-get install -y -qq openjdk-17-jre-headless >/dev/null || apt-get install -y -qq default-jre-headless >/dev/null; }; \
	else \
	  echo "Java 17 or newer is missing. Debian, Ubuntu: sudo apt-get install openjdk-17-jre-headless; Fedora: sudo dnf install java-17-openjdk-headless. Then run make again." >&2; exit 1; \
	fi

# The browser tests look at Dagster's pages with it; without one they are skipped, saying the same as this.
chromium:
	@for name in chromium chromium-browser google-chrome google-chrome-stable; do command -v $$name >/dev/null && exit 0; done; \
	ls -d "$$HOME"/.cache/ms-playwright/chromium-* >/dev/null 2>&1 && exit 0; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  echo "no Chromium: installing Debian's"; \
	  apt-get update -qq && apt-get install -y -qq chromium >/dev/null || echo "it could not be installed: the browser tests are skipped" >&2; \
	else \
	  echo "no Chromium: the browser tests are skipped. Debian: sudo apt-get install chromium; Ubuntu: sudo snap install chromium; Fedora: sudo dnf install chromium; elsewhere: $(BIN)/python -m playwright install chromium" >&2; \
	fi

# The tests run the alert rules with it. Debian's, taken out of its package: installed, that would start a server.
promtool: | $(RUNTIME)
	@[ -x $(BIN)/promtool ] || command -v promtool >/dev/null && exit 0; \
	command -v apt-get >/dev/null && command -v dpkg-deb >/dev/null || exit 0; \
	folder=$$(mktemp -d) && { [ "$$(id -u)" != 0 ] || apt-get update -qq; } && (cd $$folder && apt-get download -qq prometheus) 2>/dev/null \
	  && dpkg-deb --fsys-tarfile $$folder/prometheus_*.deb | tar -xO ./usr/bin/promtool > $$folder/promtool \
	  && install -m 755 $$folder/promtool $(BIN)/promtool || echo "no promtool: the test of the alert rules is skipped" >&2; \
	rm -rf "$$folder"

demo: java $(RUNTIME) $(CLASS_DATA)
	@KEEP=$(KEEP) $(BIN)/python examples/demo.py

# -- tests: one small case of everything, then what takes longer -----------------------------------------------------
test: java chromium promtool $(TEST) $(CLASS_DATA) $(REWRITTEN)
	$(PYTEST) $(PARALLEL) -m "not long and not chaos and not browser" --ignore tests/layout --durations 15 $(ARGS)

# Everything, longer: random search instead of the same examples each time.
test-all: java chromium promtool $(TEST) compat
	HYPOTHESIS_PROFILE=fuzz FUZZ_EXAMPLES=$(EXAMPLES) $(PYTEST) $(PARALLEL) --durations 30 $(ARGS)
	$(BIN)/python tests/chaos/run.py --rounds $(ROUNDS)

# Kafka's connectors on a real broker, KAFKA_BOOTSTRAP=host:port; KAFKA_PID: its process, which may be stopped for a while;
# KAFKA_LONG=1: a million records and twenty kills.
test-kafka: java $(TEST)
	@[ -n "$$KAFKA_BOOTSTRAP" ] || { echo "name a broker that tests may use: KAFKA_BOOTSTRAP=host:port make test-kafka" >&2; exit 1; }
	$(PYTEST) -q -s tests/connectors -k "kafka or topic" $(if $(KAFKA_LONG),,-m "not long") $(ARGS)

# streamparse from PyPI, unchanged, against a whole cluster.
test-streamparse: java $(TEST)
	$(PYTEST) -q tests/cluster/test_streamparse.py $(ARGS)

# The containers of docker/ on a Docker engine: every kind of them killed, paused and cut off while a topology writes down
# every number. SHORT=1: up, a word count, one host killed, down. FAULTS as above (run.py --list names all), ROUNDS=3:
# so many samples of ten more.
test-docker: $(TEST)
	PYTHON=$(PYTHON) timeout -k 300 $(if $(SHORT),1200,10800) $(BIN)/python tests/docker/run.py \
	  $(if $(SHORT),--short,$(FAULTS) --rounds $(if $(filter file,$(origin ROUNDS)),0,$(ROUNDS)))

# Types of tests too: pyright reads what they import. tests/layout reads the sources. The site is built strictly: a broken
# link fails.
check: $(CHECK) $(TEST)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	cd / && PATH=$(CURDIR)/$(BIN):$$PATH pyright --verifytypes storm_dagster.api --ignoreexternal
	$(BIN)/dagster definitions validate -w workspace.yaml
	$(BIN)/dg check defs
	$(PYTEST) -q tests/layout tests/docs/test_site.py

bench: java $(TEST)
	$(BIN)/python benchmarks/run.py $(ARGS)

# What kills, freezes and cuts off: after every step of every operation, under a whole cluster, and at random.
# ROUNDS=20, or MINUTES=60; SEED=7 repeats one run;
# FAULTS='--faults "worker killed,leader killed"' (tests/chaos/run.py --help names all).
chaos: java $(TEST)
	HYPOTHESIS_PROFILE=fuzz FUZZ_EXAMPLES=$(EXAMPLES) $(PYTEST) $(PARALLEL) -m "chaos" --durations 15 $(ARGS)
	$(BIN)/python tests/chaos/run.py $(if $(MINUTES),--minutes $(MINUTES),--rounds $(ROUNDS)) $(if $(SEED),--seed $(SEED)) $(FAULTS)

# Hours of churn and faults on one cluster, and the slopes of memory, descriptors, threads, watches, nodes and rows.
# HOURS=2, or MINUTES=15; SEED=7 and FAULTS as above.
soak: java $(TEST)
	$(BIN)/python tests/chaos/soak.py $(if $(MINUTES),--minutes $(MINUTES),--hours $(or $(HOURS),2)) $(if $(SEED),--seed $(SEED)) $(FAULTS)

# The whole control plane in one process and in virtual time, under faults (tests/simulation). SEEDS=1000; one line of
# its output replays a failure: ARGS="--seed 7". ARGS="--mutants" plants bugs, which it must find. ARGS="--secs 240
# --faults 100000 --kept FILE" runs seeds until there are so many faults, and a hundredth of it of each kind.
simulate: java $(TEST)
	HYPOTHESIS_PROFILE=fuzz FUZZ_EXAMPLES=1000 $(PYTEST) -q --timeout 7200 tests/simulation/test_servers_alike.py
	cd tests/simulation && PYTHONHASHSEED=0 PYTHONPATH=$(CURDIR):$(CURDIR)/tests/rigs $(CURDIR)/$(BIN)/python -m storm_simulation --seeds $(SEEDS) $(ARGS)

# Everything that is generated: EXAMPLES for each property, drawn at random; what fails is repeated the next time.
fuzz: java $(TEST)
	HYPOTHESIS_PROFILE=fuzz FUZZ_EXAMPLES=$(EXAMPLES) $(PYTEST) $(PARALLEL) -m "fuzz" --durations 15 $(ARGS)

# The Dagster tests on the lowest and on the newest release of the index.
compat: java $(TEST)
	@if test -f tests/compat/run.py; then $(BIN)/python tests/compat/run.py $(ARGS); else $(PYTEST) $(PARALLEL) tests/dagster $(ARGS); fi

# A topology's whole life in the Dagster UI.
browser: java chromium $(TEST)
	$(PYTEST) tests/browser $(ARGS)

# The site, strictly: a broken link or a snippet that does not run fails.
docs: $(TEST)
	$(PYTEST) -q tests/docs -m "not cluster" $(ARGS)
	$(BIN)/python -m sphinx -W --keep-going -q -b dirhtml docs build/site
	@echo "open build/site/index.html"

# The pictures in README and documents, taken from the browser tests. Look at each before you commit it.
screenshots: java chromium $(TEST)
	SCREENSHOTS=docs/images $(PYTEST) -q tests/browser $(ARGS)

# Quickstart and tutorial, typed as they stand, with the wheel installed into a fresh environment from the package index.
dist-check: java $(TEST)
	rm -rf build/dist-check && mkdir -p build/dist-check
	$(BIN)/python -m build --outdir build/dist-check .
	$(PYTHON) -m venv build/dist-check/venv
	build/dist-check/venv/bin/pip install --quiet build/dist-check/*.whl
	build/dist-check/venv/bin/storm-dagster --version
	QUICKSTART_BIN=$(CURDIR)/build/dist-check/venv/bin $(PYTEST) -q tests/docs/test_quickstart.py $(ARGS)

clean:
	rm -rf $(VENV) .pytest_cache .hypothesis .ruff_cache build dist
