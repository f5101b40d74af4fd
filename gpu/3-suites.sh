#!/usr/bin/env bash
# Ten minutes: a suite with ratios in torch, its memory in JAX, the losses in torch.
source "$(dirname "$0")/stages.sh"
run=($PYTHON -m harness run --results "$OUT/results" --once)
if [ -n "$DRY" ]; then
    stage 150 smoke "${run[@]}" gpu/dry.yaml
else
    stage 260 suite-torch "${run[@]}" suites/gpu.yaml --place torch/cuda --rounds 4
    stage 120 suite-jax "${run[@]}" suites/gpu.yaml --place jax/cuda --rounds 0
    stage 160 losses-torch "${run[@]}" suites/gpu_losses.yaml --place torch/cuda --rounds 2
fi
finish
