# Two commands: `make run` measures the main suite, `make test` runs all but the longest tests. Both set up .venv first.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
# Without compiled files pytest rewrites every test again in each of its processes, whatever the environment prefers.
export PYTHONDONTWRITEBYTECODE :=
ALONE = $$(grep -rlw mark.alone tests --include='test_*.py')

.PHONY: run test test-long test-optional test-all check format results tables residuals gpu clean

run: $(READY)
	$(BIN)/harness run suites/long_context.yaml

test: $(READY)
	$(BIN)/python -m pytest -m "not long and not slow and not gpu and not alone" --numprocesses 4 --dist worksteal
	$(BIN)/python -m pytest -m "alone and not long and not slow and not gpu" $(ALONE)

# The tests that take longest: continuous integration runs them after `make test`.
test-long: $(READY)
	$(BIN)/python -m pytest -m "long and not slow and not gpu and not alone" --numprocesses 4 --dist worksteal
	$(BIN)/python -m pytest -m "long and alone and not slow and not gpu" $(ALONE)

# Tests that are skipped without compilers for GPUs and packages that strategies are compared with.
OPTIONAL = tests/harness/backends/test_jax_cuda.py tests/strategies/products tests/strategies/adapters \
	tests/strategies/data/test_peers.py $(addprefix tests/strategies/loss/test_,row_kernel.py pallas_rows.py gpu_losses.py)

test-optional: .venv/.optional
	$(BIN)/python -m pytest -m "not slow and not gpu" --numprocesses 4 --dist worksteal $(OPTIONAL)

test-all: $(READY)
	$(BIN)/python -m pytest

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# What `harness fit` alone answers.
FITTED := suites/ram_to_tokens.yaml suites/pythia_batch.yaml suites/batch_limits.yaml

# All suites on this machine and commit. It takes hours; interrupted, the same command goes on where it was.
results: $(READY)
	for suite in $(filter-out $(FITTED) suites/claims.yaml suites/advice.yaml,$(wildcard suites/*.yaml)); do $(BIN)/harness run $$suite --once || exit 1; done
	$(BIN)/harness fit suites/long_context.yaml --over tokens --budget 512MiB --place torch/cpu
	$(BIN)/harness fit suites/ram_to_tokens.yaml --over tokens --budget 8GiB --budget 16GiB --budget 32GiB \
		--budget 64GiB --budget 128GiB
	$(BIN)/harness fit suites/pythia_batch.yaml --over batch --budget 8GiB --budget 80GiB --predict-only
	$(BIN)/harness fit suites/batch_limits.yaml --over batch --budget 512MiB --budget 1GiB
	$(BIN)/harness advise suites/advice.yaml --allow lower_precision --allow approximate --predict-only --save

# From the results that git tracks: what a run of your own adds changes no table before `git add`.
tables: $(READY)
	rm -rf .venv/tracked
	.ci/tracked_results .venv/tracked
	$(BIN)/harness report .venv/tracked/results --documents suites/claims.yaml --pictures results/pictures \
		$(foreach document,README.md docs/tables.md docs/in_your_code.md RESULTS.md,--into $(document)) \
		$(foreach document,$(wildcard results/*/README.md),--into $(document))

# What bounds of predictions come from: after `make results`, by the predictor as it is, and GPU runs of others.
residuals: $(READY)
	rm -rf .venv/tracked
	.ci/tracked_results .venv/tracked
	$(BIN)/python tests/benchmarks/residual_figures.py .venv/tracked/results --predict \
		--published tests/benchmarks/published/rows.jsonl --write harness/verdicts/residuals.json

# The same .venv with torch and JAX for CUDA: builds for the CPU have the same versions, so all is installed anew.
gpu: $(READY)
	env -u PIP_EXTRA_INDEX_URL -u PIP_FIND_LINKS $(BIN)/pip install --quiet --disable-pip-version-check \
		--force-reinstall --no-deps -r requirements-gpu.lock

clean:
	rm -rf .venv

.venv/.optional: $(READY) requirements-optional.lock
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps -r requirements-optional.lock
	touch $@

$(READY): requirements.lock pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13) and "Python 3.11, 3.12 or 3.13 is needed: make PYTHON=python3.12")'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements.lock
	$(BIN)/pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps --editable .
	touch $@
