"""A decoder with learned positions is GPT-2's model, and strategies that touch the embedding leave it what it is."""

from functools import cache
from itertools import islice

import numpy as np
import pytest
import torch

from harness import Place, backends
from harness.contract import place, plugins
from harness.contract.assembly import assemble
from harness.contract.loop import training
from harness.contract.toolkit import trees
from harness.records import Applied, Case
from harness.workloads import decoder

transformers = pytest.importorskip("transformers", reason="needs the package transformers")

LOADED = plugins.load()
GPT2 = decoder.Shape(
    layers=2, width=24, heads=3, vocabulary=41, tokens=13, batch=2, positions="learned",
    tied=True, bias=True, norm="layer", feed="gelu",
)  # fmt: skip
SIZES = {"positions": "learned", "norm": "layer", "vocabulary": 67}


def in_transformers(shape, params):
    """Make GPT-2 with these parameters: its projections of queries, keys and values are one matrix."""
    config = transformers.GPT2Config(
        vocab_size=shape.vocabulary, n_positions=shape.tokens, n_embd=shape.width, n_layer=shape.layers,
        n_head=shape.heads, activation_function="gelu", attn_pdrop=0, embd_pdrop=0, resid_pdrop=0,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config).eval()
    values = {"wte.weight": params["embed"], "wpe.weight": params["position"]}
    values |= {"ln_f.weight": params["norm"], "ln_f.bias": params["norm_bias"]}
    for number, p in enumerate(params["layers"]):
        own = {
            "ln_1.weight": p["mix_norm"],
            "ln_1.bias": p["mix_norm_bias"],
            "ln_2.weight": p["feed_norm"],
            "ln_2.bias": p["feed_norm_bias"],
            "attn.c_attn.weight": torch.cat([p["wq"], p["wk"], p["wv"]], 1),
            "attn.c_attn.bias": torch.cat([p["bwq"], p["bwk"], p["bwv"]]),
            "attn.c_proj.weight": p["wo"],
            "attn.c_proj.bias": p["bwo"],
            "mlp.c_fc.weight": p["up"],
            "mlp.c_fc.bias": p["bup"],
            "mlp.c_proj.weight": p["down"],
            "mlp.c_proj.bias": p["bdown"],
        }
        values |= {f"h.{number}.{name}": value for name, value in own.items()}
    missing = model.transformer.load_state_dict({name: value.detach() for name, value in values.items()}, strict=False)
    assert not missing.unexpected_keys and not missing.missing_keys
    return model


def test_loss_and_gradients_are_those_of_gpt_2():
    parts = decoder.on_torch(GPT2, Place("torch", "cpu"), None)
    state = parts.init(parts)
    with torch.no_grad():
        for _, p in trees.leaves(state["params"]):
            p.add_(0.3 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())))
    model = in_transformers(GPT2, state["params"])
    x, y = parts.transfer(parts, *next(parts.batches(parts, parts.windows(parts, parts.source(parts)))))
    loss, grads = parts.grad(parts, state, x, y)
    due = torch.nn.functional.cross_entropy(model(x).logits.flatten(0, 1), y.flatten())
    due.backward()
    assert float(loss) == pytest.approx(float(due.detach()), rel=1e-5)
    for own, name in (("embed", "wte"), ("position", "wpe"), ("norm", "ln_f")):
        torch.testing.assert_close(grads[own], model.transformer.get_submodule(name).weight.grad, rtol=1e-4, atol=1e-6)
    wide = torch.cat([grads["layers"][0][name] for name in ("wq", "wk", "wv")], 1)
    torch.testing.assert_close(wide, model.transformer.h[0].attn.c_attn.weight.grad, rtol=1e-4, atol=1e-6)


@cache
def trained(workload, backend, *names, steps=4, **sizes):
    """Return losses and parameters after some steps of strategies with their probes' knobs; each is run once."""
    module, of = backends.load(backend), LOADED.workloads[workload]
    module.start(Place(backend, "cpu"))
    case = Case(
        workload=workload,
        shape=of.probe(of.shape(**SIZES)).model_dump() | sizes,
        place=f"{backend}/cpu",
        corpus="drawn",
        tokenizer="none",
        strategies=tuple(Applied(name=name, knobs=dict(LOADED.strategies[name].probe)) for name in names),
    )
    parts, last = assemble(LOADED, case), {}
    step = module.prepare(parts)

    def watched(state, x, y):
        last["state"], loss = step(state, x, y)
        return last["state"], loss

    losses = [float(loss) for loss, _ in islice(training(parts, watched, finish=module.wait), steps)]
    return losses, {name: array for name, (array, _) in module.arrays(last["state"]["params"]).items()}


ALIKE = {
    "decoder": [
        ("torch", "checkpoint"),
        ("torch", "sparse_embedding_gradient"),
        ("torch", "update_in_backward"),
        ("torch", "accumulate"),
        ("jax", "checkpoint"),
        ("jax", "update_in_backward"),
        ("jax", "accumulate"),
    ],
    "documents": [("torch", "packed"), ("jax", "packed")],
}


@pytest.mark.long_in_jax
@pytest.mark.parametrize(
    ("workload", "backend", "name"), [(workload, *each) for workload, cases in ALIKE.items() for each in cases]
)
def test_strategies_around_the_embedding_train_its_positions_as_well(workload, backend, name):
    losses, params = trained(workload, backend, name)
    due, reference = trained(workload, backend)
    assert losses == pytest.approx(due, rel=1e-5)
    np.testing.assert_allclose(params["position"], reference["position"], rtol=1e-4, atol=2e-6)
    rotary, _ = trained(workload, backend, positions="rotary")
    assert due != pytest.approx(rotary, rel=1e-5), "positions make a difference"


@pytest.mark.parametrize("backend", place.NAMES)
def test_positions_are_learned(backend):
    _, few = trained("decoder", backend, steps=1)
    _, more = trained("decoder", backend)
    assert few["position"].shape == (37, 48)
    assert (few["position"] != more["position"]).all()


@pytest.mark.parametrize("backend", place.NAMES)
@pytest.mark.parametrize("name", ["rope_cache", "rope_on_the_fly"])
def test_strategies_for_angles_are_refused(backend, name):
    with pytest.raises(ValueError, match="positions of this model are learned"):
        trained("decoder", backend, name)
