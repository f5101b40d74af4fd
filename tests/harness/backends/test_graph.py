"""The graph of autograd is predicted: its operators stand until the backward pass ends, whatever they save."""

import os
import subprocess
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from harness.backends.torch_graph import NODE
from harness.backends.torch_storage import LiveStorage
from harness.machine import environment

LAYERS = """
import torch
from torch.utils.checkpoint import checkpoint

def layers(x, weight):
    for _ in range(10):
        x = x + torch.nn.functional.gelu(torch.nn.functional.linear(torch.nn.functional.layer_norm(x, (16,)), weight))
    return x

def windows(number, checkpointed):
    weight, x = torch.ones(16, 16, requires_grad=True), torch.ones(1, 8, 16)
    for _ in range(number):
        x = checkpoint(layers, x, weight, use_reentrant=False) if checkpointed else layers(x, weight)
    return x, weight
"""
MEASURED = f"""{LAYERS}
import gc, sys

def resident():
    gc.collect()
    status = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return int(status["RssAnon"].split()[0]) << 10

number, checkpointed = int(sys.argv[1]), sys.argv[2] == "checkpoint"
x, weight = windows(1, checkpointed)
torch.autograd.grad(x.sum(), weight)
before = resident()
x, weight = windows(number, checkpointed)
print(resident() - before)
"""


def predicted(number: int, checkpointed: bool) -> int:
    """Return the bytes of the graph of so many windows of ten layers."""
    of_layers: dict[str, object] = {}
    exec(LAYERS, of_layers)
    with FakeTensorMode(), LiveStorage() as live:
        of_layers["windows"](number, checkpointed)  # type: ignore[operator]
    return live.graph.most * NODE


@pytest.mark.parametrize(
    "checkpointed", [pytest.param(False, id="plain"), pytest.param(True, id="checkpoint", marks=pytest.mark.long)]
)
def test_a_graph_takes_what_is_predicted(checkpointed: bool) -> None:
    number = 100
    command = [sys.executable, "-c", MEASURED, str(number), "checkpoint" if checkpointed else "plain"]
    done = subprocess.run(
        command, env={**os.environ, **environment.PINS}, capture_output=True, text=True, check=True, timeout=120
    )
    graph = predicted(number, checkpointed)
    assert graph == pytest.approx(number * predicted(1, checkpointed), rel=0.05), "each window stands in it"
    assert int(done.stdout) == pytest.approx(graph, rel=0.35)


def test_a_graph_ends_with_its_backward_pass_and_the_heap_stays() -> None:
    with FakeTensorMode(), LiveStorage() as live:
        weight = torch.empty(4, requires_grad=True)
        grown = []
        for operators in (8, 3, 20):
            before, y = live.live, weight
            for _ in range(operators):
                y = y.sin()
            grown.append(live.graph.most)
            torch.autograd.grad(y, weight, torch.empty(4))
            del y
            assert live.live - before >= 0
    assert grown == [8, 8, 20], "the second fits into what the first one left"


def test_what_needs_no_gradient_and_what_is_recomputed_is_in_no_graph() -> None:
    with FakeTensorMode(), LiveStorage() as live:
        weight = torch.empty(4, requires_grad=True)
        with torch.no_grad():
            weight.sin()
        torch.empty(4).sin()
        assert live.graph.most == 0
        y = checkpoint(torch.sin, weight, use_reentrant=False)
        torch.autograd.grad(y, weight, torch.empty(4))
        assert live.graph.most == 1
