# `make demo` and `make test` do everything from a fresh clone: venv, install, run.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# One more than the cores that the goal assumes: a file often waits for processes, sockets and screens.
JOBS ?= 3

.DEFAULT_GOAL := help
.PHONY: help install demo test soak check lint types contracts docs snapshots pictures clean

help:  ## What can be made
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

$(VENV)/.installed: pyproject.toml setup.py constraints.txt $(wildcard kernels/native/*.cpp kernels/native/*.h)
	@echo "1/3 making $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@echo "2/3 installing packages: 2.4 GB with the CPU build of torch, 7 GB with the CUDA build"
	@echo "3/3 follows as 'Building editable for tapscope': $(words $(wildcard kernels/native/*.cpp)) C++ files, on all cores"
	$(BIN)/pip install --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

install: $(VENV)/.installed  ## Make .venv with everything

demo: $(VENV)/.installed  ## Capture two runs, name the culprit, steer a live engine (2 minutes)
	$(BIN)/python examples/demo.py

test: $(VENV)/.installed  ## Run the tests, JOBS files at a time, the short files of the kernels last
	$(BIN)/pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder

soak: $(VENV)/.installed  ## Try every fault many times: kill, fill, cut off, damage files; more cases; properties on new examples
	$(BIN)/python tests/faults/soak.py
	$(BIN)/python tests/faults/fuzz_files.py --cases 2000 --seed $(shell date +%s)
	$(BIN)/pytest -n $(JOBS) --dist loadfile -m soak
	TAPSCOPE_EXAMPLES=20 $(BIN)/pytest -n $(JOBS) --dist loadfile -m "hypothesis and not soak" --timeout 3600 --hypothesis-seed=$(shell date +%s)

lint: $(VENV)/.installed  ## ruff: rules and format; retired words; clang-format: the C++
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python tests/support/check_words.py
	$(BIN)/clang-format --dry-run --Werror kernels/native/*.cpp kernels/native/*.h

types: $(VENV)/.installed  ## mypy --strict
	$(BIN)/mypy

contracts: $(VENV)/.installed  ## import-linter: arrows only point down
	$(BIN)/lint-imports --no-cache

docs: $(VENV)/.installed  ## The documentation as a site, in site/
	$(BIN)/python docs/_generate.py --check
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

check: lint types contracts docs test  ## The whole gate; kernels are compiled for every supported GPU and processor
	$(BIN)/pytest -m soak -k "(every_target and first) or portable_builds" tests/kernels

pictures: $(VENV)/.installed  ## Draw the pictures of docs/ in Chromium
	$(BIN)/python docs/_pictures.py

snapshots: $(VENV)/.installed  ## Redraw the screens that the tests compare with
	$(BIN)/pytest tests/dashboard/test_pictures.py tests/docs/test_picture.py --snapshot-update

clean:  ## Remove what make made
	rm -rf $(VENV) build dist site src/*.egg-info .cache
