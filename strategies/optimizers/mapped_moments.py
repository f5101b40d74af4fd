"""Keep the optimizer's moments in files that are mapped into memory; pay for reading and writing them at each step.

Peak: under AdamW 8 bytes of anonymous memory less for each parameter, and one slice of `elements`. The mapped pages
count as resident while they are touched, but the kernel writes them out and takes them back when memory is short. Files
have no name, so a run leaves none behind; a resumed run maps new ones at its first update. A `folder` in memory (tmpfs)
raises an error, since its files are the memory to be saved. The update is called slice by slice, so it must treat each
element by itself: SGD and Adam do, and another is refused where its moments show it.

torch only: a compiled JAX step owns its buffers and reaches a file only by a callback to the host for each slice, which
would be this loop in numpy outside of the step.
"""

from dataclasses import replace
from typing import Any

from harness import Parts, Strategy, hookimpl, knobs, mapped_files, optimizers, tree


def refuse_others(name: str, p: Any, moments: Any) -> None:
    """Refuse moments of a parameter, or of a slice of it, that are not of its sizes."""
    if any(of.shape != p.shape for of in moments):
        raise ValueError(
            f"'mapped_moments' updates slice by slice, but the update keeps something of '{name}' that is not one "
            "number for each parameter: combine it with SGD or Adam"
        )


def on_torch(parts: Parts, folder: str = mapped_files.FOLDER, elements: int = 1 << 20) -> Parts:
    import torch

    knobs.above_0("mapped_moments", elements=elements)
    inner = parts.update

    def update(parts: Parts, state: Any, grads: Any) -> Any:
        mapped = "mapped" in state  # until then the moments are those that `init` or `resume` made, if any
        if not mapped:
            mapped_files.check("mapped_moments", folder)
        alone = {}
        for (name, sub), (_, g) in zip(optimizers.one_by_one(state), tree.leaves(grads), strict=True):
            alone[name] = sliced(parts, name, sub, g, mapped)
        return {**optimizers.joined(state, alone), "mapped": folder}

    def sliced(parts: Parts, name: str, state: Any, g: Any, mapped: bool) -> Any:
        p, g = torch.atleast_1d(state["params"][name].detach(), g)
        moments = None if state["moments"] is None else [torch.atleast_1d(of) for of in state["moments"][name]]
        refuse_others(name, p, moments or ())
        files = moments if mapped else None
        rows = max(1, elements * len(p) // p.numel())
        after = state
        for start in range(0, len(p), rows):
            part = slice(start, start + rows)
            now = None if moments is None else {name: [of[part].to(p.device) for of in moments]}
            after = inner(parts, {**state, "params": {name: p[part]}, "moments": now}, {name: g[part]})
            p[part].copy_(after["params"][name])
            results = after["moments"]
            if results is None:
                continue
            refuse_others(name, p[part], results[name])
            if files is None:
                files = [mapped_files.in_torch("mapped_moments", folder, p.shape, of.dtype) for of in results[name]]
            for file, of in zip(files, results[name], strict=True):
                if file[part].data_ptr() != of.data_ptr():
                    file[part].copy_(of)
        return {**after, "params": {name: state["params"][name]}, "moments": None if files is None else {name: files}}

    return replace(parts, update=update)


@hookimpl
def harness_strategies() -> list[Strategy]:
    return [
        Strategy(
            "mapped_moments",
            rewrites=("update",),
            calls=("update",),
            on={"torch": on_torch},
            about=__doc__,
            probe={"elements": 1000},
            conflicts=dict.fromkeys(
                ("foreach_adamw", "fused_adamw"),
                "each tensor has a count of steps of its own there, which is not one number for each parameter",
            ),
        )
    ]
