#!/usr/bin/env bash
# Ten minutes: the meters in JAX, then the tests that need no GPU, on this machine's Python and versions.
source "$(dirname "$0")/stages.sh"
if [ -z "$DRY" ]; then
    stage 190 meters-jax $PYTHON -m pytest tests/harness/test_gpu.py -k jax -p no:cacheprovider -o filterwarnings=default
    stage 360 tests $PYTHON -m pytest -m "not slow and not long and not gpu and not alone" --numprocesses 14 \
        -p no:cacheprovider -o filterwarnings=default --maxfail 40
fi
finish
