"""One rank of `test_sharding.py`: train every combination at ragged sizes; print how far it is from one process.

Run by torch's launcher on each rank with a JSON list of [strategies, sizes]; the first rank prints, line by line, the
largest relative distance of the losses, that of the gradients, and what was raised.
"""

import json
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import numpy as np
import torch.distributed as dist

from harness.backends import torch as backend
from harness.contract import plugins
from harness.contract.assembly import never_called
from harness.contract.place import Place
from harness.records import Applied, Case
from harness.worker import numerics

LOADED = plugins.load((str(Path(__file__).parents[3] / "examples" / "own_torch_model.py"),))
UPDATES = 3


def applied(text):
    """Read a strategy, or one "without" one of its settings."""
    name, _, off = text.partition(" without ")
    return Applied(name=name, knobs={**LOADED.strategies[name].probe, **({off: False} if off else {})})


def case_of(names, sizes, ranks):
    """Make the case of the decoder, of a published one where the sizes name its `config`, or of a named `workload`."""
    sizes = dict(sizes)
    config = {"config": sizes.pop("config")} if "config" in sizes else {}
    workload = sizes.pop("workload", "causal_lm" if config else "decoder")
    made = LOADED.workloads[workload]
    shape = made.probe(made.shape(**config)).model_copy(update=sizes)
    strategies = tuple(map(applied, names))
    case = Case(workload=workload, shape=shape.model_dump(), place="torch/cpu", corpus="drawn", tokenizer="none")
    return case.model_copy(update={"strategies": strategies, "ranks": ranks})


@cache
def undivided(case):
    return numerics.observer(LOADED, Case.model_validate_json(case), backend, updates=UPDATES)(0)


def compared(names, sizes):
    case = case_of(names, sizes, dist.get_world_size())
    calls = Counter()
    divided = numerics.observer(LOADED, case, backend, calls=calls, updates=UPDATES)(0)
    own = tuple(applied for applied in case.strategies if LOADED.strategies[applied.name].own_baseline)
    plain = undivided(case.plain.model_copy(update={"strategies": own}).model_dump_json())
    losses = max(abs(a - b) / abs(b) for a, b in zip(divided.trajectory, plain.trajectory, strict=True))
    assert divided.gradients.keys() == plain.gradients.keys()
    assert all(divided.gradients[name].shape == plain.gradients[name].shape for name in plain.gradients)
    gaps = [(divided.gradients[name].astype(np.float64) - plain.gradients[name]).ravel() for name in plain.gradients]
    norm = np.linalg.norm(np.concatenate([g.ravel() for g in plain.gradients.values()]))
    return losses, float(np.linalg.norm(np.concatenate(gaps)) / norm), never_called(calls)


def main():
    dist.init_process_group("gloo")
    backend.start(Place("torch", "cpu"))
    for names, sizes in json.loads(sys.argv[1]):
        try:
            answer = compared(names, sizes)
        except ValueError as error:
            answer = None, None, str(error)
        if dist.get_rank() == 0:
            print(json.dumps(answer), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
