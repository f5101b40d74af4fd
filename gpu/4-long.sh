#!/usr/bin/env bash
# Ten minutes: a model of 4B parameters at 131,072 tokens, the leanest rows first, then one of 8B.
source "$(dirname "$0")/stages.sh"
if [ -z "$DRY" ]; then
    run=($PYTHON -m harness run --results "$OUT/results" --once --place torch/cuda)
    stage 320 offload "${run[@]}" suites/long_context_gpu.yaml -k offload_boundary
    stage 230 long "${run[@]}" suites/long_context_gpu.yaml -k update_in_backward
fi
finish
