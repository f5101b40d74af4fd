#!/usr/bin/env bash
# Eight minutes: losses beside each other as strategies, one round of times. On an H200 their memory took 130 s.
source "$(dirname "$0")/stages.sh"
if [ -z "$DRY" ]; then
    stage 470 losses-torch $PYTHON -m harness run --results "$OUT/results" --once suites/gpu_losses.yaml --rounds 1
fi
finish
