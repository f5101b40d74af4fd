#!/usr/bin/env bash
# Ten minutes: the meters in JAX, then the tests that need no GPU, on this machine's Python and versions.
source "$(dirname "$0")/stages.sh"
if [ -z "$DRY" ]; then
    stage 240 meters-jax $PYTHON -m pytest tests/harness/test_gpu.py -k jax -v -p no:cacheprovider -o filterwarnings=default
    export CUDA_VISIBLE_DEVICES=
    unset GIT_DIR  # tests make repositories of their own
    stage 310 tests $PYTHON -m pytest -m "not slow and not long and not gpu and not alone" --numprocesses 14 \
        -p no:cacheprovider -o filterwarnings=default --maxfail 40 --session-timeout=290
fi
finish
