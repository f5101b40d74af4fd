"""The cut of a shape, once a small model of its architecture has proven that the parts compute what the whole does."""

import json
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from harness.workloads.causal_lm import configs, resizing
from harness.workloads.causal_lm.cut import Anatomy, Cut, CutError, anatomy_of, in_a_line, made, pieces, without_values
from harness.workloads.causal_lm.proof import difference, tells_apart


def cut(shape: Any) -> Cut:
    """Cut the model of a shape. Raises CutError with the reason where that cannot be done."""
    return _cut(json.dumps(shape.values()))


@cache
def _cut(values: str) -> Cut:
    with _disable_current_modes():  # a prediction runs on tensors without numbers
        read = json.loads(values)
        anatomy = proven(json.dumps(_small(read)))
        with without_values():
            model = made(read)
        return pieces(model, anatomy)


def _small(values: configs.Values) -> configs.Values:
    changes = resizing.small(values, configs.of(values, "max_position_embeddings"))
    cap = float(values.get("final_logit_softcapping") or 0.0)
    return resizing.with_sizes({**values, **changes}, max(2, resizing.period(values)), 61, cap)


@cache
def proven(values: str) -> Anatomy:
    """Look at a small model and compare what its parts compute with what it computes; raise CutError if they differ."""
    read = json.loads(values)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = made(read, "eager")
    try:
        anatomy = anatomy_of(model)
        copy = made(read)
        copy.load_state_dict(model.state_dict())
        parts = pieces(copy, anatomy)
        fault = difference(model, parts)
    except CutError:
        raise
    except Exception as error:
        fault = f"in parts it fails with {type(error).__name__}: {in_a_line(error)}"
    if fault is not None:
        raise CutError(f"the architecture '{read['model_type']}' cannot be cut into layers: {fault}")
    return replace(anatomy, apart=tells_apart(model, parts))
