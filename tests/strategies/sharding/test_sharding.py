"""What divides a run among ranks in torch trains the same model: at ragged sizes, alone and together, on 2 and 4.

Each number of ranks is started once, by torch's own launcher, for all combinations: see `ranks_of_torch.py`.
"""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from harness import IGNORED, Parts, Place, backends, of_torch
from harness.contract import plugins
from harness.records import Applied, Case
from harness.run.schedule import conflict
from harness.worker import numerics
from strategies.sharding.shares import folded, in_order

torch = pytest.importorskip("torch", reason="the ranks are torch's")
from torch import nn  # noqa: E402

LOADED = plugins.load()
ALONE = [[name] for name, strategy in LOADED.strategies.items() if strategy.ranks and "torch" in strategy.on]
TOGETHER = [
    ["fsdp", "checkpoint"],
    ["checkpoint", "fsdp"],
    ["fsdp", "fused_loss"],
    ["fused_loss", "fsdp"],
    ["accumulate", "fsdp"],
    ["fsdp", "accumulate"],
    ["fsdp", "ring_attention"],
    ["ring_attention", "fsdp"],
    ["ring_attention without zigzag"],
    ["zero1", "megatron_sequence_parallel"],
    ["zero1", "ulysses"],
    ["ulysses", "zero1"],
    ["fsdp", "vocabulary_parallel_loss"],
    ["vocabulary_parallel_loss", "fsdp"],
    ["ring_attention", "vocabulary_parallel_loss", "fsdp"],
    ["tensor_parallel", "vocabulary_parallel_loss"],
    ["ulysses", "chunked_attention"],
    ["chunked_attention", "ulysses"],
    ["checkpoint", "ring_attention"],
]
ADAPTERS = [
    ["lora", "ddp"],
    ["zero1", "lora"],
    ["lora", "zero2"],
    ["fsdp", "lora", "checkpoint"],
    ["lora", "fsdp"],
    ["qlora", "fsdp"],
    ["qlora", "checkpoint", "fsdp"],
    ["ulysses", "lora"],
    ["lora", "ring_attention", "vocabulary_parallel_loss"],
]
TIED = {"tied": True, "kv_heads": 2, "positions": "learned"}
EVERY_TERM = {
    "feed": "gelu", "norm": "layer", "bias": True, "parallel": True,
    "label_smoothing": 0.1, "z_loss": 1e-3, "soft_cap": 5.0,
}  # fmt: skip
ONE_ROW = {"batch": 1}
BY_ROWS = [["ddp"], ["zero1"], ["zero2"], ["fsdp"]]
OPT = {
    "model_type": "opt", "hidden_size": 64, "word_embed_proj_dim": 48, "num_hidden_layers": 2, "ffn_dim": 80,
    "num_attention_heads": 4, "vocab_size": 96, "max_position_embeddings": 512, "do_layer_norm_before": False,
}  # fmt: skip
PUBLISHED = [
    *[(names, {"config": "smollm2-135m"}) for names in [*BY_ROWS, *TOGETHER[:6], *ADAPTERS[:6]]],
    *[(names, {"config": config}) for config in ("gpt2", "phi-2", "qwen3-30b-a3b") for names in BY_ROWS],
    (["qlora", "checkpoint", "fsdp"], {"config": "qwen3-30b-a3b"}),
    *[(names, {"config": OPT}) for names in BY_ROWS],
    *[(names, {"workload": "gated_convolutions"}) for names in [*BY_ROWS, ["fsdp", "checkpoint", "fused_loss"]]],
]
"""A tied head, positions among the embedding and matrices stored the other way, a head with a bias, experts, a matrix
behind the layers, and a model of one's own."""
CASES = {
    2: [
        *[(names, {}) for names in ALONE + TOGETHER + ADAPTERS],
        *[(names, sizes) for sizes in (TIED, EVERY_TERM) for names in [*ALONE, TOGETHER[-5]]],
        *[(names, ONE_ROW) for names in (["ddp"], ["fsdp"])],
        *PUBLISHED,
    ],
    4: [(names, {}) for names in [*ALONE, ["ring_attention without zigzag"], TOGETHER[-5], *ADAPTERS]],
}
REFUSED = [
    (["fsdp", "tensor_parallel"], {}, "leave out one of the two"),
    (["tensor_parallel", "fsdp"], {}, "leave out what divides the batch"),
    (["tensor_parallel"], {"heads": 3, "kv_heads": 3}, "take a divisor of both"),
    (["megatron_sequence_parallel"], {"heads": 3, "kv_heads": 3}, "megatron_sequence_parallel gives each of 2 ranks"),
    (["fsdp", "megatron_sequence_parallel"], {}, "megatron_sequence_parallel parts what another strategy has parted"),
    (["float32_master", "zero2"], {}, "name it after zero2"),
    (["ulysses"], {"heads": 3, "kv_heads": 3}, "ring_attention"),
    (["tensor_parallel", "lora"], {}, "take fsdp, or leave out the adapters"),
    (["fsdp", "qlora"], {}, "name it before fsdp"),
    (["qlora", "tensor_parallel"], {}, "take fsdp, or leave out the adapters"),
    (["qlora", "megatron_sequence_parallel"], {}, "take fsdp, or leave out the adapters"),
    (["tensor_parallel", "qlora"], {}, "leave out whatever else divides them"),
]
WITHIN = 2e-6


def on_ranks(ranks, cases):
    """Run cases on so many ranks of one thread; give what the first one printed of each."""
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--local-addr", "localhost"]
    program = str(Path(__file__).with_name("ranks_of_torch.py"))
    asked = json.dumps([list(case) for case in cases])
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *launcher, program, asked], capture_output=True, text=True, env=env, timeout=500
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_train_as_one_process(ranks):
    answers = on_ranks(ranks, CASES[ranks])
    wrong = {}
    for (names, sizes), (losses, gradients, fault) in zip(CASES[ranks], answers, strict=True):
        if fault is not None or not (losses < WITHIN and gradients < WITHIN):
            wrong["+".join([*names, *sizes, *map(str, sizes.values())])[:99]] = losses, gradients, fault
    assert not wrong


@pytest.mark.parametrize(
    ("names", "sizes", "sentence"), [pytest.param(*case, id="+".join([*case[0], *case[1]])) for case in REFUSED]
)
def test_what_does_not_go_together_is_refused_in_a_sentence(names, sizes, sentence):
    """On the first of two ranks, whose other one is pretended."""
    backend, decoder = backends.load("torch"), LOADED.workloads["decoder"]
    case = Case(
        workload="decoder",
        shape=decoder.probe(decoder.shape()).model_copy(update=sizes).model_dump(),
        place="torch/cpu",
        corpus="drawn",
        tokenizer="none",
        strategies=tuple(Applied(name=name, knobs=dict(LOADED.strategies[name].probe)) for name in names),
        ranks=2,
    )
    with backend.pretended(2), pytest.raises(ValueError, match=re.escape(sentence)):
        numerics.observer(LOADED, case, backend, updates=1)(0)


def test_a_tied_head_of_more_rows_than_ids_is_made_whole():
    """On the first of two ranks, beside positions that have as many rows or more."""

    class Embedding(nn.Module):
        def __init__(self, shape):
            super().__init__()
            self.positions, self.ids = nn.Embedding(2 * shape.vocabulary, 16), nn.Embedding(shape.vocabulary + 5, 16)

        def forward(self, x_BT):
            return self.ids(x_BT) + self.positions(torch.arange(x_BT.shape[1]))

    def make(shape):
        embed = Embedding(shape)
        return embed, [nn.Linear(16, 16)], nn.LayerNorm(16), embed.ids.weight

    workload, seen = of_torch("padded", make), []
    shape = workload.tiny(workload.shape())
    plain = replace(workload.on["torch"](shape, Place("torch", "cpu"), None), ranks=2)

    def loss(parts, x_BTD, w_VD, y_BT):
        seen.append(tuple(w_VD.shape))
        return plain.loss(parts, x_BTD, w_VD, y_BT)

    with backends.load("torch").pretended(2):
        parts = LOADED.strategies["fsdp"].on["torch"](replace(plain, loss=loss))
        ids = torch.zeros(2, 4, dtype=torch.int64)
        parts.grad(parts, parts.init(parts), ids, ids)
    assert seen == [(shape.vocabulary + 5, 16)]


@pytest.mark.parametrize(
    "later", ["badam", "lisa", "bfloat16_stochastic", "foreach_adamw", "fused_adamw", "mapped_moments"]
)
@pytest.mark.parametrize("name", ["zero1", "zero2"])
def test_an_update_of_whole_parameters_is_not_put_around_one_of_parts(name, later):
    pair = [LOADED.strategies[each] for each in (name, later)]
    assert "name it after" in str(conflict(pair)) and conflict(pair[::-1]) is None


@pytest.mark.parametrize("backend", ["torch", "jax"])
@pytest.mark.parametrize(("first", "second", "stays"), [
    ("ring_attention", "ddp", True),
    ("ddp", "vocabulary_parallel_loss", True),
    ("ddp", "zero1", True),
    ("ddp", "ring_attention", False),
    ("tensor_parallel", "fsdp", False),
])  # fmt: skip
def test_a_wrapped_division_stays_where_it_is_the_finer_one(backend, first, second, stays):
    pytest.importorskip(backend)
    decoder = LOADED.workloads["decoder"]
    plain = decoder.on[backend](decoder.tiny(decoder.shape()), Place(backend, "cpu"), None)
    divided = LOADED.strategies[first].on[backend](plain)

    def wrapped(*arguments):
        return divided.shard_batch(*arguments)

    parts = LOADED.strategies[second].on[backend](replace(divided, shard_batch=wrapped))
    assert (parts.shard_batch is wrapped) == stays
    assert parts.division.granularity == max(
        LOADED.strategies[name].on[backend](plain).division.granularity for name in (first, second)
    )


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_zigzag_gives_every_rank_the_same_work(ranks):
    work = [sum(block + 1 for block in folded(rank, ranks)) for rank in range(ranks)]
    assert len(set(work)) == 1
    every = sorted(block for rank in range(ranks) for block in folded(rank, ranks))
    assert every == list(range(2 * ranks))
    assert [in_order(rank, ranks) for rank in range(ranks)] == [(rank,) for rank in range(ranks)]


@pytest.mark.parametrize(
    ("rows", "note"),
    [
        (4, None),
        (5, "5 rows leaves 1 of 4"),
        (1, "1 row leaves 3 of 4"),
    ],
)
def test_ranks_that_get_no_row_are_noted(rows, note):
    parts = LOADED.strategies["ddp"].on["torch"](Parts(None, Place("torch", "cpu")))
    ids = torch.zeros(rows, 3, dtype=torch.int64)
    with backends.load("torch").pretended(4):
        x, y, _ = parts.shard_batch(parts, ids, ids)
    whole = None if note is None else f"a batch of {note} ranks without any"
    assert len(x) == len(y) == -(-rows // 4) and parts.notes.get("ranks") == whole


@pytest.mark.parametrize("backend", ["torch", "jax"])
@pytest.mark.parametrize("name", ["ddp", "ulysses"])
def test_a_batch_without_a_target_has_no_weight_and_so_no_gradient(name, backend):
    parts = LOADED.strategies[name].on[backend](Parts(None, Place(backend, "cpu"), ranks=1))
    library = torch if backend == "torch" else pytest.importorskip("jax.numpy")
    x, none = (library.full((2, 4), value) for value in (1, IGNORED))
    with backends.load("torch").pretended(2):
        _, y, weight = parts.shard_batch(parts, x, none)
    assert weight == 0 and (y != IGNORED).sum() == 1, "one target, so that its loss is a number"


def test_a_row_on_ranks_fits_the_decoder_and_one_by_rows_a_published_decoder():
    place = Place("torch", "cpu")
    for (name,) in ALONE:
        strategy = LOADED.strategies[name]
        assert strategy.obstacle(place, LOADED.workloads["decoder"]) is None
        assert "does not have" in (strategy.obstacle(place, LOADED.workloads["temporal"]) or "")
        published = strategy.obstacle(place, LOADED.workloads["causal_lm"])
        assert (published is None) == ([name] in BY_ROWS), published
