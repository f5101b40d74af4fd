#!/usr/bin/env bash
# Ten minutes: a suite with ratios in torch, the two products of claim B6, then memory in JAX and that of the losses.
source "$(dirname "$0")/stages.sh"
run=($PYTHON -m harness run --results "$OUT/results" --once)
if [ -n "$DRY" ]; then
    stage 150 smoke "${run[@]}" gpu/dry.yaml
else
    stage 230 suite-torch "${run[@]}" suites/gpu.yaml --rounds 3
    stage 60 products "${run[@]}" suites/products.yaml --place torch/cuda --rounds 3
    stage 140 suite-jax "${run[@]}" suites/gpu_jax.yaml --rounds 0
    stage 100 losses-torch "${run[@]}" suites/gpu_losses.yaml --rounds 0
fi
finish
