# Every way to work on this repository, one target each; `make` alone lists them.
# All that they need is installed into .venv by .ci/setup_venv.py, and nothing anywhere else.

# The first of these that runs and is new enough. If none is, the set-up says so. `make setup PYTHON=...` names another.
PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo $$python && exit; \
	done; echo python3)

.PHONY: help setup demo test test-slow check format bench-serving bench-draft-length profile-cycle bench-kernels kernel-report soak clean

help: ## List the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1|\2/p' Makefile | while IFS='|' read -r target text; do \
		printf 'make %-14s %s\n' "$$target" "$$text"; done

setup: ## Make or update .venv (minutes the first time, then a moment)
	@$(PYTHON) .ci/setup_venv.py

demo: setup ## See DFlash at work on a small model
	.venv/bin/vllm-dflash demo

test: setup ## Run the tests that are quick and need no GPU
	.venv/bin/python -m pytest -n 2 --dist loadfile --durations 30 -m "not slow and not gpu"

test-slow: setup ## Run the tests that take minutes
	.venv/bin/python -m pytest -m "slow and not gpu"

check: setup ## Check style and types, changing nothing
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/mypy

format: setup ## Format the code and fix what ruff can fix
	.venv/bin/ruff check --fix
	.venv/bin/ruff format

bench-serving: setup ## Measure serving with and without DFlash
	.venv/bin/python bench/bench_serving.py

bench-draft-length: setup ## Measure draft length decided in every step, at several loads
	.venv/bin/python bench/bench_draft_length.py

profile-cycle: setup ## Say where the time of one draft-verify cycle goes
	.venv/bin/python bench/profile_cycle.py

bench-kernels: setup ## Time the kernels on a GPU; without one, run each once in Triton's interpreter
	.venv/bin/python bench/bench_kernels.py
	.venv/bin/python bench/floors.py

kernel-report: setup ## Compile the kernels for four GPUs that need not be here; registers, spills, shared memory
	.venv/bin/python tests/kernels/ahead_of_time.py --csv bench/results/compiled_kernels.csv

soak: setup ## Hold 10,000 random requests against plain vLLM (tens of minutes)
	.venv/bin/python tests/faults/soak.py

clean: ## Remove .venv, caches and build output
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .benchmarks build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
