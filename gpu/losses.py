"""Measure losses over a large vocabulary beside each other: `python gpu/losses.py OUT.json [n,D,V ...]`.

Of each loss with its backward pass: the median time of turns, the peak above the inputs, and the error of both
gradients against float64 on a small problem. Where a shape fails, as one that does not fit the card, the reason stands
in the place of its figures. With `--cpu` the small problem alone is looked at.
"""

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from harness import Parts, Place, plugins
from harness.workloads.decoder import Shape
from harness.workloads.decoder._torch import loss as plain

SHAPES = ("8192,4096,128256", "16384,2048,248320")
SMALL = {"cuda": (16_384, 1024, 32_000), "cpu": (48, 32, 500)}
TURNS = 7
ROWS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("fused_loss", {}),
    ("fused_loss", {"chunk": 1024}),
    ("fused_loss", {"chunk": 4096}),
    ("cut_loss", {}),
    ("chunked_loss", {"chunk": 2048, "recompute": True}),
    ("native_loss", {}),
    ("liger_loss", {}),
    ("cce_loss", {}),
)
Loss = Callable[[Any, Any, Any], Any]


def losses(device: str) -> Iterator[tuple[str, Loss | str]]:
    """Yield each loss by its name; in its place, where it cannot run here, the reason."""
    known = plugins.load().strategies
    untouched = Parts(Shape(), Place("torch", device), loss=plain)
    yield "plain", lambda x, w, y: plain(untouched, x, w, y)
    for name, knobs in ROWS:
        label = name + "".join(f" {knob}={value}" for knob, value in knobs.items())
        if (reason := known[name].obstacle(untouched.place)) is not None:
            yield label, reason
            continue
        try:
            parts = known[name].on["torch"](untouched, **knobs)
        except Exception as error:  # a package that does not import is a row as well
            yield label, f"{type(error).__name__}: {error}"
            continue
        yield label, lambda x, w, y, parts=parts: parts.loss(parts, x, w, y)  # type: ignore[misc]


def problem(device: str, n: int, D: int, V: int) -> tuple[Any, Any, Any]:
    """Draw hidden states, a weight and targets in bfloat16."""
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(n, D, device=device, generator=generator)
    w = torch.randn(V, D, device=device, generator=generator) / D**0.5
    y = torch.randint(V, (n,), device=device, generator=generator)
    return x.bfloat16().requires_grad_(), w.bfloat16().requires_grad_(), y


def gradients(loss: Loss, x: Any, w: Any, y: Any) -> tuple[Any, ...]:
    return torch.autograd.grad(loss(x, w, y), (x, w))


def products(x: Any, w: Any, y: Any) -> None:
    """Multiply as every loss of full logits must: the logits, and the gradients of both inputs."""
    with torch.no_grad():
        z = x @ w.t()
        z @ w, z.t() @ x


def errors(loss: Loss, device: str) -> list[float]:
    """Return the relative error of both gradients."""
    x, w, y = problem(device, *SMALL[device])
    wide = [each.detach().double().requires_grad_() for each in (x, w)]
    due = torch.autograd.grad(F.cross_entropy(wide[0] @ wide[1].t(), y), wide)
    return [float((g.double() - d).norm() / d.norm()) for g, d in zip(gradients(loss, x, w, y), due, strict=True)]


def figures(turn: Callable[[Any, Any, Any], Any], n: int, D: int, V: int) -> dict[str, float]:
    """Return the peak in bytes above the inputs, and the median milliseconds of a turn by the device's own clock."""
    x, w, y = problem("cuda", n, D, V)
    turn(x, w, y)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    turn(x, w, y)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    times = []
    for _ in range(TURNS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        turn(x, w, y)
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return {"peak_bytes": peak, "milliseconds": statistics.median(times)}


def by_shape(turn: Callable[[Any, Any, Any], Any], shapes: list[tuple[int, int, int]]) -> dict[str, dict[str, Any]]:
    """Return the figures of each shape; where it fails, the reason."""
    results: dict[str, dict[str, Any]] = {}
    for shape in shapes:
        name = ",".join(map(str, shape))
        try:
            results[name] = figures(turn, *shape)
        except Exception as error:
            results[name] = {"error": reason(error)}
    return results


def reason(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:200]}"


def row(label: str, loss: Loss | str, device: str, shapes: list[tuple[int, int, int]]) -> dict[str, Any]:
    """Measure one loss; an error stands in its place."""
    if isinstance(loss, str):
        return {"loss": label, "untested": loss}
    result: dict[str, Any] = {"loss": label}
    try:
        result["errors"] = errors(loss, device)
    except Exception as error:
        return result | {"error": reason(error)}
    return result | by_shape(partial(gradients, loss), shapes)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("shapes", nargs="*", default=SHAPES)
    parser.add_argument("--cpu", action="store_true")
    options = parser.parse_args()
    device = "cpu" if options.cpu else "cuda"
    shapes = [] if options.cpu else [tuple(map(int, text.split(","))) for text in options.shapes]
    rows: list[dict[str, Any]] = []
    alone = {"loss": "the three products alone"} | by_shape(products, shapes)  # type: ignore[arg-type]
    measured = (row(label, loss, device, shapes) for label, loss in losses(device))  # type: ignore[arg-type]
    for each in chain([alone], measured):
        rows.append(each)
        print(json.dumps(each), flush=True)
        options.out.write_text(json.dumps(rows, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
