"""Read each tensor of a checkpoint straight to where it stays; make no model before it.

Peak: the state, and on a GPU one tensor of it on the host, instead of the parameters twice: those of a model that was
made first, and those that are copied into it.
"""

from dataclasses import replace
from typing import Any

from harness import Parts, Strategy, checkpoints, hookimpl


def on_torch(parts: Parts) -> Parts:
    def resume(parts: Parts, source: Any, file: Any) -> Any:
        device = parts.place.device
        return checkpoints.restored(file, {name: checkpoints.read_one(file, name, device) for name in file.described})

    return replace(parts, resume=resume)


@hookimpl
def harness_strategies() -> list[Strategy]:
    return [Strategy("streamed_resume", rewrites=("resume",), on={"torch": on_torch}, about=__doc__)]
