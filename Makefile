# Everything a person needs: make demo, make serve, make test.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: help demo serve test test-slow test-chaos test-cluster bench bench-serve lint proto chart clean

help: ## what can be made
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 16

$(VENV)/.ready: pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) is missing: install Python 3.11 or newer (with its venv module), or say make PYTHON=..."; exit 1; }
	@echo "Setting up $(VENV) (once; PyTorch and UCX are large, this takes a minute or two)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	@touch $@

$(VENV)/.ready-dev: $(VENV)/.ready
	@$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(VENV)/.ready ## one prompt through prefill, decode and router on this machine, with its timeline
	@$(BIN)/python -m demo.run

serve: $(VENV)/.ready ## the same three processes, left running until Ctrl-C
	@$(BIN)/python -m demo.run --serve

test: lint ## all tests
	@$(BIN)/python -m pytest
	@$(BIN)/python -m pytest -m nixl tests/transport
	@$(BIN)/python -m pytest -m mooncake tests/transport

test-slow: $(VENV)/.ready-dev ## more systems of real processes, sound and ill, and pdctl and /ui on them; takes minutes
	@$(BIN)/python -m pytest -m slow

test-chaos: $(VENV)/.ready-dev ## faults by the hundred: kills, stops and restarts under load; takes minutes
	@$(BIN)/python -m pytest -m chaos

test-cluster: $(VENV)/.ready-dev ## the chart on a real Kubernetes, built for it the first time: root on Debian 12; takes minutes
	@$(BIN)/python -m tests.cluster.build
	@$(BIN)/python -m tests.cluster.image
	@$(BIN)/python -m pytest -m cluster -rs tests/cluster

bench: $(VENV)/.ready ## how fast pages move between two processes of this machine, and what a room costs the control plane
	@$(BIN)/pdctl bench transfer
	@$(BIN)/pdctl bench control

bench-serve: $(VENV)/.ready ## a pair beside one engine alone on the same two cores: how fast requests are answered; a quarter of an hour
	@$(BIN)/pdctl bench compare

lint: $(VENV)/.ready-dev ## style, types, layers, the Dockerfile, protos
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/hadolint deploy/docker/Dockerfile
	@$(BIN)/python proto/generate.py --image build/pd.binpb && $(BIN)/buf lint build/pd.binpb --config proto/buf.yaml

proto: $(VENV)/.ready-dev ## regenerate the stubs beside the protos
	@$(BIN)/python proto/generate.py

chart: $(VENV)/.ready-dev ## regenerate the chart's schema and README, and what it makes of the values that are tested
	@$(BIN)/python -m deploy.helm.generate
	@UPDATE_GOLDENS=1 $(BIN)/python -m pytest tests/deploy/test_chart.py

clean: ## forget the virtual environment
	rm -rf $(VENV)
