"""Write each tensor of the state as it is, one after the other; keep no second copy, let nothing else run meanwhile.

Peak: the state, and on a GPU one tensor of it on the host, instead of a gathered copy of all of it. The file is the
same, in the format of safetensors.
"""

from dataclasses import replace
from typing import Any

from harness import Parts, Strategy, checkpoints, hookimpl


def on_torch(parts: Parts) -> Parts:
    def save(parts: Parts, state: Any, file: Any) -> None:
        file.begin(state)
        for name, leaf in checkpoints.tensors(state):
            file.put(name, leaf)

    return replace(parts, save=save)


@hookimpl
def harness_strategies() -> list[Strategy]:
    return [Strategy("streamed_save", rewrites=("save",), on={"torch": on_torch}, about=__doc__)]
