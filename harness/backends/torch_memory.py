"""Predict the memory of a torch run: the same loop on fake tensors, whose storages are followed.

Nothing is computed and nothing large is allocated (`FakeTensorMode`), so a model of any size takes about a second.
Scratch inside one operator is seen where `torch_storage` counts it. Where a step asks for the value of a number (is all
of it finite? which step is this?) it gets that of an ordinary first step.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)

from harness.backends import Batch, Incomplete
from harness.backends.torch_flops import Work
from harness.backends.torch_kernels import CAPACITY, VARIABLE
from harness.backends.torch_operators import Operators
from harness.backends.torch_storage import LiveStorage
from harness.backends.torch_turns import Turns
from harness.contract import kinds
from harness.contract.instruments import located, metered
from harness.contract.loop import Ending, training
from harness.contract.parts import ABSENT, Parts
from harness.contract.stages import Profile
from harness.contract.toolkit.checkpoints import NoFile
from harness.contract.toolkit.turns import recorded
from harness.records.forecast import Forecast

ENOUGH = 2
"""Steps after which nothing more is taken: the moments appear in the first update, and the second has everything.

The kernels of a mixture of experts are the exception: see `torch_kernels`.
"""


VALUES = "asks for values, which a prediction does not have: take a form whose sizes are fixed, such as a mask"
NO_FORM = "has no form for tensors without data: give it one by torch.library.register_fake"
HELP: dict[type[Exception], str] = {
    DynamicOutputShapeException: VALUES,
    DataDependentOutputException: VALUES,
    UnsupportedOperatorException: NO_FORM,
}
"""What ends a run on fake tensors, in words, with what would help."""


def run(
    build: Callable[[], Parts], batch: Batch, source_bytes: int, steps: int, environment: Mapping[str, str]
) -> Forecast:
    """Return the peak bytes of each phase of so many steps, those of the source included, and the last one's work."""
    kernels = int(environment.get(VARIABLE, CAPACITY))
    return traced(build, batch, steps, LiveStorage(source_bytes, kernels))


def traced(
    build: Callable[[], Parts],
    batch: Batch,
    steps: int,
    live: LiveStorage,
    pretence: AbstractContextManager[Any] | None = None,
) -> Forecast:
    """Run steps on fake tensors, whose storages `live` follows; return their peaks and the last one's work.

    Of `steps` those are run that take more than the ones before.
    `build` makes the parts inside the fake mode, and inside of `pretence`. Raises Incomplete for what a fake
    tensor cannot pass, and whatever the parts raise. A batch of numpy stays real: a step can ask for its values.
    """
    work = Work()
    real = [torch.from_numpy(each.astype("int64")) for each in batch if not isinstance(each, tuple)]
    with (
        FakeTensorMode(allow_non_fake_inputs=True) as fake,
        live,
        recorded(Turns(live, work)),
        pretence or nullcontext(),
    ):
        live.run_operator = Operators(fake, work)
        profile = Profile(live.now, partial(_most_of_loss, live), torch.compiler.is_compiling)
        parts = metered(located(profile.of(_named(build(), live)), live.called), live)
        device = parts.place.device

        def batches(parts: Parts, windows: Any) -> Iterator[tuple[Any, Any]]:
            while True:
                yield tuple(real or (_ids(size, dtype, device) for size, dtype in batch))  # type: ignore[misc]

        without_data = replace(parts, source=_no_data, windows=_no_data, batches=batches)
        least, before = min(steps, ENOUGH), 0
        ending = Ending(least, NoFile()) if getattr(parts.shape, "evaluations", 0) else None
        loop = training(without_data, _step(without_data), live.phase, partial(_name_state, live), ending)
        try:
            for done, _ in enumerate(islice(loop, steps if ending is None else least), start=1):
                last = work.taken()
                if done >= least and live.kernels.bytes == before:
                    break
                before = live.kernels.bytes
            if ending is not None:
                next(loop)
        except tuple(HELP) as error:
            operator = str(getattr(error, "func", error))
            raise Incomplete(f"'{operator}' {HELP[type(error)]}", dict(live.peaks)) from error
        loop.close()
        return Forecast(
            dict(live.peaks),
            last,
            live.supposed,
            profile.stages,
            live.ledger.most(),
            standing=live.standing(),
            base_bytes=live.base,
        )


def _most_of_loss(live: LiveStorage) -> int:
    """Return the peak since the loss of the first step began."""
    return max(live.peaks.get(f"first_step/{name}", 0) for name in ("loss", "backward"))


def _name_state(live: LiveStorage, outputs: Any) -> None:
    """Name what the state keeps, at the end of `init` and of each step."""
    live.name(kinds.of_state(outputs[0] if isinstance(outputs, tuple) else outputs))


def _named(parts: Parts, live: LiveStorage) -> Parts:
    """Name the gradients that reach the update."""
    inner = parts.update
    if inner is ABSENT:
        return parts

    def update(parts: Parts, state: Any, grads: Any) -> Any:
        live.name({"gradients": kinds.arrays(grads)})
        return inner(parts, state, grads)

    return replace(parts, update=update)


def _no_data(*_: Any) -> Any:
    """Stand for the source and its windows, which no step sees."""


def _step(parts: Parts) -> Callable[..., Any]:
    return lambda state, x, y: parts.step(parts, state, x, y)


def _ids(size: tuple[int, ...], dtype: str, device: str) -> torch.Tensor:
    integer = dtype.startswith(("int", "uint"))
    return torch.zeros(size, dtype=torch.int64 if integer else getattr(torch, dtype), device=device)
