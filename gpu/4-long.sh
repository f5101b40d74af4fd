#!/usr/bin/env bash
# Ten minutes: a model of 4B parameters at 131,072 tokens as a document trained it, then what takes less.
source "$(dirname "$0")/stages.sh"
if [ -z "$DRY" ]; then
    run=($PYTHON -m harness run --results "$OUT/results" --once --place torch/cuda)
    stage 220 document "${run[@]}" suites/model_4b_131k.yaml
    stage 330 offload "${run[@]}" suites/long_context_gpu.yaml -k offload_boundary
fi
finish
