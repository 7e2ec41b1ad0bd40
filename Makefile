# Two commands for a fresh machine: `make demo` and `make test`.
BIN := .venv/bin
export PYTHONSAFEPATH := 1

.PHONY: help venv demo test test-fast lint lock clean

help: ## Show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

venv: ## Make the virtual environment with the locked dependencies
	@requirements/install.sh cpu

demo: venv ## Serve a small model, send it traffic, run one loop, show what became faster (under 30 minutes on 2 cores)
	@$(BIN)/strop demo $(DEMO)

test: test-fast lint ## All checks and all tests
	@$(BIN)/pytest -m slow

test-fast: venv ## The tests that start no server (under 3 minutes)
	@$(BIN)/pytest -n auto -m "not slow"

lint: venv ## ruff and pyright
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/pyright

lock: venv ## Resolve requirements/*.in into the lock files anew
	$(BIN)/uv pip compile --quiet requirements/cpu.in --override requirements/cpu.overrides.txt --python-version 3.11 \
		--python-platform x86_64-manylinux_2_28 --no-emit-index-url --no-emit-find-links \
		$(if $(PIP_FIND_LINKS),--find-links $(PIP_FIND_LINKS),--extra-index-url https://download.pytorch.org/whl/cpu --index-strategy unsafe-best-match) \
		--custom-compile-command "make lock" -o requirements/cpu.lock
	$(BIN)/uv pip compile --quiet requirements/gpu.in --override requirements/gpu.overrides.txt --python-version 3.11 \
		--python-platform x86_64-manylinux_2_28 --no-emit-index-url --no-emit-find-links \
		--custom-compile-command "make lock" -o requirements/gpu.lock

clean: ## Remove what strop wrote here: the environment and .strop
	rm -rf .venv .strop build *.egg-info
