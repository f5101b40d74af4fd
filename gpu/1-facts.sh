#!/usr/bin/env bash
# Ten minutes: facts of the card, losses beside each other, the meters in torch.
source "$(dirname "$0")/stages.sh"
stage 140 probe $PYTHON gpu/probe.py "$OUT/probe.json" ${DRY:+--cpu}
stage 250 losses $PYTHON gpu/losses.py "$OUT/losses.json" ${DRY:+--cpu}
if [ -z "$DRY" ]; then
    stage 150 meters-torch $PYTHON -m pytest tests/harness/test_gpu.py -k torch -p no:cacheprovider -o filterwarnings=default
fi
finish
