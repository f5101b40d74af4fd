#!/usr/bin/env bash
# Ten minutes: a suite with ratios in torch, the two products of claim B6, then memory in JAX. On an H200 the first had its
# answers and peaks after 90 s and its first round after 157 s; seven of the eight rows of JAX had peaks after 186 s.
source "$(dirname "$0")/stages.sh"
run=($PYTHON -m harness run --results "$OUT/results" --once)
if [ -n "$DRY" ]; then
    stage 150 smoke "${run[@]}" gpu/dry.yaml
else
    stage 280 suite-torch "${run[@]}" suites/gpu.yaml --rounds 2
    stage 60 products "${run[@]}" suites/products.yaml --place torch/cuda --rounds 3
    stage 200 suite-jax "${run[@]}" suites/gpu_jax.yaml --rounds 0
fi
finish
