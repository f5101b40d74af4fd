#!/usr/bin/env bash
# Ten minutes: facts of the card, losses beside each other, the meters in torch.
source "$(dirname "$0")/stages.sh"
stage 140 probe $PYTHON gpu/probe.py "$OUT/probe.json" ${DRY:+--cpu}
stage 250 losses $PYTHON gpu/losses.py "$OUT/losses.json" ${DRY:+--cpu}
if [ -z "$DRY" ]; then
    stage 150 meters-torch $PYTHON -m pytest tests/harness/test_gpu.py tests/strategies/data/test_batches.py \
        tests/strategies/cache/test_caches.py -m gpu -k "torch or streams or on_cuda" \
        -p no:cacheprovider -o filterwarnings=default
fi
finish
