"""A model of your own, in torch: `harness run examples/own_torch_model.yaml --plugin examples/own_torch_model.py`."""

from harness import Sizes, hookimpl, of_torch


class MySizes(Sizes):
    width: int = 64


def make(shape):
    import torch
    from torch import nn

    class Block(nn.Module):
        """A gated causal convolution: anything from [B, T, D] to [B, T, D] will do."""

        def __init__(self):
            super().__init__()
            self.norm, self.mix = nn.LayerNorm(shape.width), nn.Conv1d(shape.width, 2 * shape.width, 4)

        def forward(self, x):
            gate, value = self.mix(nn.functional.pad(self.norm(x).mT, (3, 0))).mT.chunk(2, -1)
            return x + torch.sigmoid(gate) * value

    embed, head = nn.Embedding(shape.vocabulary, shape.width), nn.Linear(shape.width, shape.vocabulary, bias=False)
    return embed, [Block() for _ in range(shape.layers)], nn.LayerNorm(shape.width), head.weight


@hookimpl
def harness_workloads():
    return [of_torch("gated_convolutions", make, MySizes, small={"width": 32})]
