"""Strategies of the update: what each keeps in bytes, and that its steps are those of the optimizer it stands for."""

from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
import torch

from harness import Place, backends, optimizers, tree, update_rules
from harness.contract import place, plugins
from harness.contract.assembly import assemble
from harness.contract.loop import training
from harness.records import Applied, Case
from harness.workloads.causal_lm.cut import made
from harness.workloads.causal_lm.proof import named
from harness.workloads.causal_lm.proven import cut
from strategies.optimizers import _coded, adam_4bit, adam_8bit
from strategies.precision import bfloat16_stochastic

LOADED = plugins.load()
DECODER = LOADED.workloads["decoder"]
STEPS = 10


def parts_of(backend, *names, workload="decoder", **shape):
    """Parts at the probe, with the knobs that strategies have there."""
    compiled = LOADED.workloads[workload]
    case = Case(
        workload=workload,
        shape=compiled.probe(compiled.shape()).model_dump() | {"weight_decay": 0.1} | shape,
        place=f"{backend}/cpu",
        corpus="drawn",
        tokenizer="none",
        strategies=tuple(Applied(name=name, knobs=dict(LOADED.strategies[name].probe)) for name in names),
    )
    return assemble(LOADED, case)


def published(config, name, **knobs):
    """Parts of a small model of a published architecture, rewritten by a strategy."""
    pytest.importorskip("transformers", reason="needs the package transformers")
    workload = LOADED.workloads["causal_lm"]
    parts = workload.on["torch"](workload.probe(workload.shape(config=config)), Place("torch", "cpu"), None, 0)
    return LOADED.strategies[name].on["torch"](parts, **knobs)


def trained(backend, *names, steps=STEPS, parts=None, **shape):
    """Parameters by name after some steps, layers apart in both frameworks, and the last state."""
    module = backends.load(backend)
    module.start(Place(backend, "cpu"))
    parts = parts or parts_of(backend, *names, **shape)
    step = module.prepare(parts)
    last = {}

    def watched(state, x, y):
        last["state"], loss = step(state, x, y)
        return last["state"], loss

    losses = [float(loss) for loss, _ in islice(training(parts, watched, finish=module.wait), steps)]
    arrays = {name: array for name, (array, _) in module.arrays(last["state"]["params"]).items()}
    return apart(arrays) if backend == "jax" else arrays, losses, last["state"]


def apart(arrays):
    """Give layers that are stacked a name each."""
    actual = {}
    for name, array in arrays.items():
        if name.startswith("layers."):
            short = name.removeprefix("layers.")
            actual |= {f"layers.{at}.{short}": layer for at, layer in enumerate(array)}
        else:
            actual[name] = array
    return actual


def away(answer, reference):
    assert answer.keys() == reference.keys()
    off = sum(float(np.sum((answer[name].astype(np.float64) - reference[name]) ** 2)) for name in reference)
    return (off / sum(float(np.sum(reference[name].astype(np.float64) ** 2)) for name in reference)) ** 0.5


def bytes_of(held):
    """Bytes of all arrays among the leaves."""
    return sum(leaf.nbytes for _, leaf in tree.leaves(held) if hasattr(leaf, "nbytes"))


def by_torch(optimizers_of, **shape):
    """Train the untouched parts with optimizers of torch; return parameters by name."""
    parts = parts_of("torch", **shape)
    state = parts.init(parts, None)
    named = dict(tree.leaves(state["params"]))
    optimizers = optimizers_of(parts.shape, named)
    batches = parts.batches(parts, parts.windows(parts, parts.source(parts)))
    for x, y in islice(batches, STEPS):
        x, y = parts.transfer(parts, x, y)
        _, grads = parts.grad(parts, state, x, y)
        for name, g in tree.leaves(grads):
            named[name].grad = g
        for optimizer in optimizers:
            optimizer.step()
    return {name: p.detach().numpy() for name, p in named.items()}


def adafactor(shape, named):
    return [torch.optim.Adafactor(named.values(), lr=shape.learning_rate, weight_decay=shape.weight_decay)]


def muon(shape, named):
    hidden = [p for name, p in named.items() if p.dim() == 2 and name not in ("embed", "head")]
    rest = [p for name, p in named.items() if p.dim() < 2 or name in ("embed", "head")]
    settings = {"lr": shape.learning_rate, "weight_decay": shape.weight_decay}
    return [OfDecoder(hidden, **settings), torch.optim.AdamW(rest, **settings)]


class OfDecoder(torch.optim.Muon):
    """Muon of matrices [in, out], which it takes as views [out, in]; square ones are rounded as they are stored."""

    def __init__(self, matrices, **settings):
        self.stored = matrices
        views = [torch.nn.Parameter(self.turned(p.detach())) for p in matrices]
        super().__init__(views, **settings)

    def turned(self, p):
        return p if p.shape[0] == p.shape[1] else p.T

    def step(self):
        for view, p in zip(self.param_groups[0]["params"], self.stored, strict=True):
            view.grad = self.turned(p.grad)
        super().step()


# Against the optimizers of torch


@pytest.mark.long
@pytest.mark.parametrize("backend", place.NAMES)
@pytest.mark.parametrize("rate", [1e-3, 0.5])
def test_adafactor_makes_the_steps_of_torch(backend, rate):
    answer, _, _ = trained(backend, "adafactor", learning_rate=rate)
    assert away(answer, by_torch(adafactor, learning_rate=rate)) < 1e-4


@pytest.mark.long_in_jax
@pytest.mark.parametrize("backend", place.NAMES)
def test_muon_makes_the_steps_of_torch(backend):
    answer, _, _ = trained(backend, "muon")
    reference, before = by_torch(muon), by_torch(lambda *_: [])
    moved = away(reference, before)
    # Newton-Schulz is iterated in bfloat16, and differently rounded products part in its third digit.
    assert moved > 0.02 and away(answer, reference) < (1e-4 if backend == "torch" else 0.02) * moved


@pytest.mark.parametrize("config", ["smollm2-135m", "gpt2"])
def test_muon_moves_the_matrices_of_a_published_model_as_torch_does(config):
    """GPT-2 stores [in, out], all others [out, in]: a matrix that gives more than it takes moves further in both."""
    parts = published(config, "muon")
    state = parts.init(parts, None)
    before = {name: p.detach().clone() for name, p in tree.leaves(state["params"])}
    grads = tree.mapped(lambda p: torch.randn(p.shape, generator=torch.Generator().manual_seed(1)), state["params"])
    state = parts.update(parts, state, grads)
    after, gradients = dict(tree.leaves(state["params"])), dict(tree.leaves(grads))
    matrices = [name for name in after if name.endswith((".up_proj.weight", ".c_fc.weight", ".down_proj.weight"))]
    for name in matrices:
        turn = (lambda p: p.T) if config == "gpt2" else (lambda p: p)
        due = torch.nn.Parameter(turn(before[name]).contiguous())
        due.grad = turn(gradients[name]).contiguous()
        torch.optim.Muon([due], lr=parts.shape.learning_rate, weight_decay=parts.shape.weight_decay).step()
        step = turn(after[name].detach()) - turn(before[name])
        assert torch.allclose(step, due.detach() - turn(before[name]), rtol=0.02, atol=1e-6)
    assert matrices


@pytest.mark.parametrize(("name", "device"), [("foreach_adamw", "cpu"), ("fused_adamw", "meta")])
def test_steps_are_counted_where_the_kernel_reads_them(name, device):
    """`foreach` reads a count for each tensor, and on a GPU would wait for it."""
    parts, p = parts_of("torch", name), torch.zeros(3, 2, device="meta")
    state = parts.update(parts, {"params": {"head": p}, "moments": None, "steps": 0}, {"head": torch.ones_like(p)})
    assert [of.device.type for of in state["moments"]["head"]] == ["meta", "meta", device]


@pytest.mark.parametrize(("network", "due"), [("lstm", {"wx", "wh"}), ("mamba", {"conv"})])
@pytest.mark.parametrize("backend", place.NAMES)
def test_gates_and_taps_are_stored_outputs_by_inputs(backend, network, due):
    parts = parts_of(backend, workload="temporal", network=network)
    state = parts.init(parts, None)
    first = {name: parts.outputs_first(name) for name, _ in tree.leaves(state["params"]) if name.startswith("layers.")}
    assert {name.rpartition(".")[2] for name, outputs in first.items() if outputs} == due


def test_taps_and_decays_are_no_matrices_of_a_layer():
    parts = parts_of("torch", workload="temporal", network="mamba")
    leaves = [(name, p) for name, p in tree.leaves(parts.init(parts, None)["params"]) if name.startswith("layers.")]
    two = {name.rpartition(".")[2] for name, p in leaves if p.dim() == 2}
    hidden = {name.rpartition(".")[2] for name, p in leaves if update_rules.is_hidden(name, p.dim())}
    assert hidden and two - hidden == {"conv", "a_log"}


@pytest.mark.parametrize("workload", ["decoder", "causal_lm"])
def test_adapters_are_stored_outputs_by_inputs(workload):
    pytest.importorskip("transformers" if workload == "causal_lm" else "torch")
    parts = parts_of("torch", "lora", "muon", workload=workload)
    matrices = [(name, p) for name, p in tree.leaves(parts.init(parts, None)["params"]) if name.endswith(".b")]
    assert matrices and all(parts.outputs_first(name) and p.shape[1] == 4 for name, p in matrices)


# What is kept


@pytest.mark.parametrize("config", ["smollm2-135m", "gpt2", "opt-125m", "pythia-70m", "mixtral-8x7b"])
@pytest.mark.parametrize("rule", ["muon", "soap", "galore", "apollo"])
def test_the_matrices_of_a_published_model_are_those_of_its_layers(rule, config):
    """Embeddings, positions and the classifier keep two moments of AdamW, by whatever names they have."""
    knobs = {"rank": 3} if rule in ("galore", "apollo") else {}
    parts = published(config, rule, **knobs)
    state = parts.init(parts, None)
    model = made(parts.shape.values(), "eager")
    whole = named(model, cut(parts.shape), lambda p: p)
    tables = [module for module in model.modules() if isinstance(module, torch.nn.Embedding)]
    rows = {id(module.weight) for module in [*tables, model.get_output_embeddings()]}
    assert rows <= {id(p) for p in whole.values()}
    for name, alone in optimizers.one_by_one(state):
        p, moments = whole[name], alone["moments"][name]
        is_matrix = p.dim() == 2 and id(p) not in rows
        assert ([of.shape for of in moments] == [p.shape] * 2) != is_matrix, name


@pytest.mark.long_in_jax
@pytest.mark.parametrize("backend", place.NAMES)
def test_adafactor_keeps_rows_and_columns(backend):
    parts = parts_of(backend, "adafactor")
    wanted = sum(
        (1 if name == "embed" or name == "head" or not name.startswith("layers.") else parts.shape.layers)
        * 4
        * (sum(shape) if len(shape) == 2 else shape[0])
        for name, (shape, _) in parts.shape.parameter_shapes().items()
    )
    assert bytes_of(moments(parts, backend)) == wanted


@pytest.mark.long_in_jax
@pytest.mark.parametrize("backend", place.NAMES)
def test_muon_keeps_four_bytes_of_a_matrix(backend):
    parts = parts_of(backend, "muon", width=64, hidden=160)
    shapes = parts.shape.parameter_shapes()
    hidden = sum(
        parts.shape.layers * shape[0] * shape[1]
        for name, (shape, _) in shapes.items()
        if name.startswith("layers.") and len(shape) == 2
    )
    rest = parts.shape.parameters() - hidden
    assert bytes_of(moments(parts, backend)) == 4 * hidden + 8 * rest


@pytest.mark.long_in_jax
@pytest.mark.parametrize("backend", place.NAMES)
def test_8_bit_moments_take_two_bytes_and_their_scales(backend):
    parts = parts_of(backend, "adam_8bit", width=64, hidden=128, vocabulary=500)
    per_parameter = bytes_of(moments(parts, backend)) / parts.shape.parameters()
    assert 2 + 8 / 256 <= per_parameter < 2.1


@pytest.mark.parametrize("backend", place.NAMES)
def test_small_tensors_keep_float32(backend):
    parts = LOADED.strategies["adam_8bit"].on[backend](parts_of(backend), least=4096)
    dtypes = {str(leaf.dtype).removeprefix("torch.") for _, leaf in tree.leaves(moments(parts, backend))}
    assert dtypes == {"float32"}, "no tensor of the probe has 4096 elements"


def test_momentum_keeps_one_moment_in_jax():
    parts = parts_of("jax", "sgd_momentum")
    assert bytes_of(moments(parts, "jax")) == 4 * parts.shape.parameters()


def moments(parts, backend):
    """What the state holds beside parameters and the count of steps, after one update."""
    _, _, state = trained(backend, parts=parts, steps=1)
    return {key: value for key, value in state.items() if key not in ("params", "steps")}


# 8 bit


@pytest.mark.parametrize("signed", [True, False])
def test_levels_are_those_of_the_paper(signed):
    levels = adam_8bit.levels(signed)
    assert len(set(levels.tolist())) == 256 and (np.diff(levels) > 0).all()
    assert levels[-1] == 1 and 0 in levels
    positive = levels[levels > 0]
    # Each decade below 1 has half as many levels as the one above it; the values are means of even parts.
    counts = [int(((positive > 10.0**-at / 10) & (positive < 10.0**-at)).sum()) for at in range(7)]
    assert counts == [(64 if signed else 128) >> at for at in range(7)]
    assert positive[0] == pytest.approx(0.55e-6 if signed else 0.325e-6)
    assert levels[0] == pytest.approx(-0.99296875 if signed else 0)


@pytest.mark.parametrize("backend", place.NAMES)
@pytest.mark.parametrize(("rule", "block"), [(adam_8bit, 256), (adam_4bit, 128)], ids=["8 bit", "4 bit"])
def test_the_moments_are_those_of_adam_rounded_to_the_nearest_level(rule, block, backend):
    """One update from nothing, against every level tried for every element."""
    import jax.numpy as jnp

    parts = parts_of(backend, rule.__name__.rpartition(".")[2], vocabulary=70)  # 70 x 48 is no multiple of a block
    whole = parts.init(parts, None)
    state = {key: {"embed": of["embed"]} if isinstance(of, dict) else of for key, of in whole.items()}
    drawn = np.random.default_rng(3).standard_normal((70, 48)).astype(np.float32) ** 5
    state = parts.update(parts, state, {"embed": torch.tensor(drawn) if backend == "torch" else jnp.asarray(drawn)})
    g = np.zeros((-(-70 * 48 // block), block))
    g.reshape(-1)[: 70 * 48] = drawn.ravel()
    first, second = coded(state, "embed", rule.CODES.bits)
    for exact, (codes, scale), signed in ((0.1 * g, first, True), (0.001 * g * g, second, False)):
        of_one = exact / np.abs(exact).max(1, keepdims=True)
        levels = rule.levels(signed).astype(np.float64)
        if not signed:
            levels[levels == 0] = np.inf  # what is not zero stays above it
        nearest = np.abs(of_one[..., None] - levels).min(-1)
        chosen = np.abs(of_one - levels[codes])
        assert np.allclose(scale, np.abs(exact).max(1), rtol=1e-5)
        assert np.abs(chosen - nearest).max() < 1e-6


def coded(state, name, bits):
    """The codes of a tensor, a row for each block, and their scales, of both moments."""
    if "first" in state:
        pairs = [[np.asarray(state[key][name][part]) for part in ("codes", "scale")] for key in ("first", "second")]
    else:
        arrays = [each.numpy() for each in state["moments"][name]]
        pairs = [arrays[:2], arrays[2:]]
    apart = [[np.stack([codes & 15, codes >> 4], -1).reshape(len(codes), -1), scale] for codes, scale in pairs]
    return pairs if bits == 8 else apart


@pytest.mark.long_in_jax
@pytest.mark.parametrize("backend", place.NAMES)
def test_8_bit_stays_near_adam_where_most_gradients_vanish(backend):
    shape = {"vocabulary": 500, "ignored": 0.0}
    answer, losses, _ = trained(backend, "adam_8bit", **shape)
    reference, plain, _ = trained(backend, **shape)
    assert losses == pytest.approx(plain, rel=1e-3) and losses != plain
    farthest = max(float(np.abs(answer[name] - reference[name]).max()) for name in reference)
    assert farthest < 5 * 1e-3, "a step of more than a few learning rates: a second moment became zero"


@pytest.mark.long
def test_8_bit_is_the_same_in_both_frameworks():
    (answer, _, _), (reference, _, _) = trained("torch", "adam_8bit"), trained("jax", "adam_8bit")
    assert away(answer, reference) < 2e-4  # a value at the edge of two levels may go either way


@pytest.mark.long
@pytest.mark.parametrize("backend", place.NAMES)
def test_slices_do_not_change_8_bit_steps(backend, monkeypatch):
    whole, _, _ = trained(backend, "adam_8bit", steps=4)
    monkeypatch.setattr(_coded, "SLICE", 512)
    parts, _, _ = trained(backend, "adam_8bit", steps=4)
    assert away(parts, whole) < 1e-6


# Moments elsewhere


def test_mapped_moments_train_bit_for_bit_and_leave_no_file(tmp_path, monkeypatch):
    opened = []
    inner = torch.from_file
    monkeypatch.setattr(torch, "from_file", lambda path, **k: opened.append(k["size"]) or inner(path, **k))
    wrap = LOADED.strategies["mapped_moments"].on["torch"]
    answer, _, state = trained("torch", parts=wrap(parts_of("torch"), folder=str(tmp_path), elements=1000))
    reference, _, _ = trained("torch")
    assert all(np.array_equal(answer[name], reference[name]) for name in reference)
    assert sum(opened) == 2 * sum(p.numel() for _, p in tree.leaves(state["params"]))
    assert list(tmp_path.iterdir()) == []


def test_mapped_moments_update_slice_by_slice():
    sizes = []

    def watching(parts):
        inner = parts.update

        def update(parts, state, grads):
            sizes.extend(g.numel() for _, g in tree.leaves(grads))
            return inner(parts, state, grads)

        return replace(parts, update=update)

    wrap = LOADED.strategies["mapped_moments"].on["torch"]
    trained("torch", parts=wrap(watching(parts_of("torch")), elements=1000), steps=1)
    assert max(sizes) <= 1000 and len(sizes) > 60


def test_mapped_moments_take_what_another_optimizer_made_at_the_start():
    answer, _, _ = trained("torch", "sgd_momentum", "mapped_moments")
    reference, _, _ = trained("torch", "sgd_momentum")
    assert all(np.array_equal(answer[name], reference[name]) for name in reference)


@pytest.mark.parametrize("rule", ["adafactor", "apollo"])
def test_mapped_moments_refuse_an_optimizer_of_whole_matrices(rule):
    with pytest.raises(ValueError, match="not one number for each parameter"):
        trained("torch", rule, "mapped_moments", steps=1)


def test_mapped_moments_leave_a_rule_that_keeps_none_as_it_is():
    answer, _, _ = trained("torch", "lomo", "mapped_moments", steps=3)
    reference, _, _ = trained("torch", "lomo", steps=3)
    assert all(np.array_equal(answer[name], reference[name]) for name in reference)


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        *(("mapped_moments", "torch"), ("adam_mini", "torch"), ("adam_mini", "jax")),
        *(("bfloat16_stochastic", "torch"), ("bfloat16_stochastic", "jax")),
    ],
)
def test_a_parameter_without_dimensions_moves_by_the_rate_while_its_gradient_stays(name, backend):
    import jax.numpy as jnp

    def init(parts, source=None):
        if backend == "torch":
            return {"params": {"scale": torch.ones(())}, "moments": None, "steps": 0}
        zeros = {key: {"scale": jnp.zeros(())} for key in parts.moments}
        return {"params": {"scale": jnp.ones(())}, "steps": jnp.zeros((), jnp.int32), **zeros}

    parts = replace(parts_of(backend, learning_rate=0.125, weight_decay=0.0), init=init)
    parts = LOADED.strategies[name].on[backend](parts)
    state = parts.init(parts, None)
    for _ in range(2):
        state = parts.update(parts, state, {"scale": torch.ones(()) if backend == "torch" else jnp.ones(())})
    moved = state["params"]["scale"]
    assert moved.shape == () and float(moved) == pytest.approx(0.75, abs=0.02)


@pytest.mark.long_in_jax
@pytest.mark.parametrize("backend", place.NAMES)
def test_offloaded_moments_leave_the_steps_as_they_are(backend):
    answer, _, _ = trained(backend, "offloaded_moments")
    reference, _, _ = trained(backend)
    assert all(np.allclose(answer[name], reference[name], rtol=0 if backend == "torch" else 1e-6) for name in reference)


# Updates within the backward pass


@pytest.mark.long_in_jax
@pytest.mark.parametrize("backend", place.NAMES)
@pytest.mark.parametrize("tied", [False, True])
def test_updates_in_the_backward_pass_are_the_updates(backend, tied):
    answer, losses, state = trained(backend, "update_in_backward", tied=tied)
    reference, plain, other = trained(backend, tied=tied)
    assert losses == pytest.approx(plain, rel=1e-6)
    assert away(answer, reference) < 1e-6
    assert int(state["steps"]) == int(other["steps"]) == STEPS


@pytest.mark.long_in_jax
@pytest.mark.parametrize("network", ["lstm", "mamba"])
@pytest.mark.parametrize("backend", place.NAMES)
def test_updates_in_the_backward_pass_of_another_workload(backend, network):
    shape = {"workload": "temporal", "network": network}
    answer, _, _ = trained(backend, parts=parts_of(backend, "update_in_backward", **shape), steps=3)
    reference, _, _ = trained(backend, parts=parts_of(backend, **shape), steps=3)
    assert away(answer, reference) < 1e-5


APART = ["adafactor", "bfloat16_stochastic", "adam_8bit", "muon", "sgd_momentum"]
IN_BOTH = [("torch", name) for name in APART] + [("jax", name) for name in APART[:2]]
MORE = [pytest.param("jax", name, marks=pytest.mark.slow) for name in APART[2:]]


@pytest.mark.long
@pytest.mark.parametrize(("backend", "optimizer"), IN_BOTH + MORE)
def test_they_go_with_every_optimizer_that_treats_tensors_apart(backend, optimizer):
    answer, _, _ = trained(backend, optimizer, "update_in_backward", steps=3)
    reference, _, _ = trained(backend, optimizer, steps=3)
    # The random bits of stacked layers are drawn for the layers that an update gets.
    assert away(answer, reference) < (1e-2 if (backend, optimizer) == ("jax", "bfloat16_stochastic") else 1e-4)


@pytest.mark.parametrize("optimizer", ["fused_adamw", "foreach_adamw", "mapped_moments"])
def test_they_go_with_the_kernels_of_torch(optimizer):
    answer, _, _ = trained("torch", optimizer, "update_in_backward")
    reference, _, _ = trained("torch", optimizer)
    assert away(answer, reference) < 1e-7


@pytest.mark.parametrize("backend", place.NAMES)
@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("other", ["accumulate", "float16_scaled", "float16_master", "float32_master"])
def test_they_refuse_gradients_that_are_not_final(backend, order, other):
    names = ("update_in_backward", other) if order == "before" else (other, "update_in_backward")
    with pytest.raises(ValueError, match=f"'lomo'\\) applies each gradient at once.*{other}"):
        trained(backend, *names, steps=1)


def test_one_gradient_is_alive_at_a_time():
    """The update of a leaf comes before the gradient of the one below exists, and nothing keeps it."""
    import weakref

    parts = parts_of("torch", "update_in_backward")
    inner, alive, most = parts.update, [], []

    def update(parts, state, grads):
        alive.extend(weakref.ref(g) for _, g in tree.leaves(grads))
        most.append(sum(ref() is not None for ref in alive))
        return inner(parts, state, grads)

    trained("torch", parts=replace(parts, update=update), steps=1)
    assert len(most) > 20 and max(most) <= 3


def test_the_loop_of_jax_changes_parameters_in_their_place():
    import jax

    shape = {"layers": 8, "width": 64, "hidden": 256, "vocabulary": 67, "batch": 1, "tokens": 8}

    def scratch(*names):
        module = backends.load("jax")
        parts = parts_of("jax", *names, **shape)
        x = jax.ShapeDtypeStruct((1, 8), "int32")
        compiled = module.lowered(parts, (x, x), parts).compile().memory_analysis()
        return compiled.temp_size_in_bytes, 4 * parts.shape.parameters()

    answer, size = scratch("update_in_backward")
    reference, _ = scratch()
    assert reference > size and answer < 0.45 * reference


# Stochastic rounding


@pytest.mark.long_in_jax
@pytest.mark.parametrize("backend", place.NAMES)
def test_small_updates_move_weights_by_the_mean_they_should(backend):
    """Twenty updates of 1/2560 of a weight: rounding to nearest loses every one of them."""
    rate, steps = 1 / 2560, 20

    def moved(name):
        parts = parts_of(backend, name, learning_rate=rate, weight_decay=0.0)
        parts = replace(parts, draw=constant(parts.draw))
        state = parts.init(parts, None)
        first = {key: array for key, (array, _) in backends.load(backend).arrays(state["params"]).items()}
        update = parts.update
        if backend == "jax":
            import jax

            update = jax.jit(lambda state, grads: parts.update(parts, state, grads))
        for _ in range(steps):
            grads = tree.mapped(lambda p: p * 0 + 1, state["params"])
            state = update(state, grads) if backend == "jax" else parts.update(parts, state, grads)
        last = {key: array for key, (array, _) in backends.load(backend).arrays(state["params"]).items()}
        return np.concatenate([(last[key] - first[key]).ravel() for key in first]).astype(np.float64)

    away_from_one = moved("bfloat16_stochastic")
    # A weight at 1 goes down by `rate` at each step; bfloat16 has a number every 1/256 there.
    standard_error = (steps * rate / 256) ** 0.5 / len(away_from_one) ** 0.5
    assert abs(away_from_one.mean() + steps * rate) < 6 * standard_error
    assert abs(moved("bfloat16").mean()) < 0.1 * steps * rate


def constant(inner):
    """Let every weight start at 1."""

    def draw(parts, name, shape, deviation):
        return inner(parts, name, shape, deviation) * 0 + 1

    return draw


@pytest.mark.long
@pytest.mark.parametrize("backend", place.NAMES)
def test_the_same_seed_rounds_the_same(backend):
    wrap = LOADED.strategies["bfloat16_stochastic"].on[backend]
    first, again, other = (trained(backend, parts=wrap(parts_of(backend), seed=n), steps=2)[0] for n in (1, 1, 2))
    assert all(np.array_equal(first[name], again[name]) for name in first)
    assert any(not np.array_equal(first[name], other[name]) for name in first)


@pytest.mark.long_in_jax
@pytest.mark.parametrize("backend", place.NAMES)
def test_everything_of_it_is_bfloat16(backend):
    _, _, state = trained(backend, "bfloat16_stochastic", steps=1)
    held = {key: value for key, value in state.items() if key != "steps"}
    assert {str(leaf.dtype).removeprefix("torch.") for _, leaf in tree.leaves(held)} == {"bfloat16"}


@pytest.mark.parametrize("backend", place.NAMES)
def test_what_is_not_a_number_stays_so(backend):
    """The bits of this one are all set but the sign: with random ones on top they would begin again at zero."""
    import jax.numpy as jnp

    g = np.full((2, 3), 0x7FFFFFFF, np.int32).view(np.float32)
    assert np.isnan(g).all()
    if backend == "torch":
        g, state = torch.from_numpy(g), {"moments": None, "steps": 0}
        state["params"] = {"head": torch.ones(2, 3, dtype=torch.bfloat16)}
    else:
        zeros = {key: {"head": jnp.zeros((2, 3), jnp.bfloat16)} for key in ("first", "second")}
        g, state = jnp.asarray(g), {**zeros, "steps": jnp.zeros((), jnp.int32)}
        state["params"] = {"head": jnp.ones((2, 3), jnp.bfloat16)}
    parts = parts_of(backend, "bfloat16_stochastic")
    state = parts.update(parts, state, {"head": g})
    arrays = backends.load(backend).arrays({key: value for key, value in state.items() if key != "steps"})
    assert len(arrays) == 3 and all(np.isnan(array).all() for array, _ in arrays.values())


@pytest.mark.parametrize("backend", place.NAMES)
def test_what_is_wider_than_bfloat16_as_adapters_are_is_not_rounded(backend):
    import jax.numpy as jnp

    g = np.random.Generator(np.random.Philox(key=5)).standard_normal((4, 8), np.float32)
    if backend == "torch":
        state, gradient = {"params": {"head": torch.ones(4, 8)}, "moments": None, "steps": 0}, torch.from_numpy(g)
    else:
        zeros = {key: {"head": jnp.zeros((4, 8))} for key in ("first", "second")}
        state = {"params": {"head": jnp.ones((4, 8))}, **zeros, "steps": jnp.zeros((), jnp.int32)}
        gradient = jnp.asarray(g)
    parts = parts_of(backend, "bfloat16_stochastic")
    state = parts.update(parts, state, {"head": gradient})
    first = state["moments"]["head"][0] if backend == "torch" else state["first"]["head"]
    np.testing.assert_allclose(np.asarray(first), 0.1 * g, rtol=1e-5)


@pytest.mark.parametrize("backend", place.NAMES)
def test_of_a_tensor_in_slices_every_row_is_updated_once(backend, monkeypatch):
    """Three rows at a time, and the tenth alone: the first step of Adam is the rate, whatever the gradient."""
    import jax.numpy as jnp

    monkeypatch.setattr(bfloat16_stochastic, "SLICE", 48)
    draws = torch.randn(2, 10, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    p, g = draws.float().numpy()
    if backend == "torch":
        state, gradient = {"params": {"head": draws[0].clone()}, "moments": None, "steps": 0}, draws[1]
    else:
        zeros = {key: {"head": jnp.zeros((10, 16), jnp.bfloat16)} for key in ("first", "second")}
        state = {"params": {"head": jnp.asarray(p, jnp.bfloat16)}, **zeros, "steps": jnp.zeros((), jnp.int32)}
        gradient = jnp.asarray(g, jnp.bfloat16)
    parts = parts_of(backend, "bfloat16_stochastic", learning_rate=0.25, weight_decay=0.0)
    state = parts.update(parts, state, {"head": gradient})
    moments = state["moments"]["head"] if backend == "torch" else [state[key]["head"] for key in ("first", "second")]
    arrays = backends.load(backend).arrays([state["params"]["head"], *moments])
    for (result, _), exact in zip(arrays.values(), (p - 0.25 * np.sign(g), 0.1 * g, 0.001 * g * g), strict=True):
        assert (np.abs(result - exact) <= 1.01 * 2.0**-7 * np.abs(exact) + 1e-4).all()


@pytest.mark.parametrize("elements, slices", [(512, 8), (2048, 16), (8192, 32)])
def test_a_large_parameter_is_updated_in_larger_slices_up_to_a_size(elements, slices, monkeypatch):
    """Of 64 elements, of a sixteenth, and of 256 at most: millions of small slices would take a GPU minutes."""
    monkeypatch.setattr(bfloat16_stochastic, "SLICE", 64)
    monkeypatch.setattr(bfloat16_stochastic, "LARGEST", 256)
    drawn, randint = [], torch.randint

    def counted(*rest, **settings):
        drawn.append(rest)
        return randint(*rest, **settings)

    monkeypatch.setattr(torch, "randint", counted)
    rows = torch.ones(elements // 8, 8, dtype=torch.bfloat16)
    parts = parts_of("torch", "bfloat16_stochastic")
    parts.update(parts, {"params": {"head": rows.clone()}, "moments": None, "steps": 0}, {"head": rows})
    assert len(drawn) == 3 * slices, "of the parameter and of two moments"


def test_slices_of_a_tensor_are_rounded_by_bits_of_their_own(tmp_path):
    parts = parts_of("torch", "bfloat16_stochastic", learning_rate=1 / 2560, weight_decay=0.0)
    parts = LOADED.strategies["mapped_moments"].on["torch"](parts, folder=str(tmp_path), elements=512)
    rows = torch.ones(2, 512, dtype=torch.bfloat16)
    state = parts.update(parts, {"params": {"head": rows.clone()}, "moments": None, "steps": 0}, {"head": rows})
    one, other = state["params"]["head"]
    assert not torch.equal(one, other)
