"""Rules of update that are not Adam's: their steps against the papers' formulas, what they keep, and their traps."""

from dataclasses import replace
from itertools import islice, pairwise

import numpy as np
import pytest
import torch

from harness import Parts, Place, backends, tree
from harness.contract import place, plugins
from harness.contract.assembly import assemble
from harness.contract.loop import training
from harness.records import Applied, Case
from harness.run.schedule import conflict
from strategies.optimizers import adam_4bit, adam_mini, badam, lisa
from strategies.optimizers._in_turn import block_of

LOADED = plugins.load()
DECODER = LOADED.workloads["decoder"]
RULES = ["adam_4bit", "adam_mini", "apollo", "galore", "lion", "lomo", "soap"]


def parts_of(backend, *names, **shape):
    applied = tuple(Applied(name=name, knobs=dict(LOADED.strategies[name].probe)) for name in names)
    case = Case(
        workload="decoder",
        shape=DECODER.probe(DECODER.shape()).model_dump() | {"weight_decay": 0.1} | shape,
        place=f"{backend}/cpu",
        corpus="drawn",
        tokenizer="none",
        strategies=applied,
    )
    return assemble(LOADED, case)


def trained(backend, *names, steps=6, parts=None, **shape):
    """Parameters by name, those of layers stacked in both frameworks, the losses and the last state."""
    module = backends.load(backend)
    module.start(Place(backend, "cpu"))
    parts = parts or parts_of(backend, *names, **shape)
    step, last = module.prepare(parts), {}

    def watched(state, x, y):
        last["state"], loss = step(state, x, y)
        return last["state"], loss

    losses = [float(loss) for loss, _ in islice(training(parts, watched, finish=module.wait), steps)]
    return named(module, last["state"]["params"]), losses, last["state"]


def named(module, params):
    arrays = {name: array for name, (array, _) in module.arrays(params).items()}
    layers = max(
        (int(name.split(".")[1]) for name in arrays if name.split(".")[1:2] and name.split(".")[1].isdigit()),
        default=-1,
    )
    for short in {name.split(".", 2)[2] for name in arrays if layers >= 0 and name.startswith("layers.")}:
        arrays[f"layers.{short}"] = np.stack([arrays.pop(f"layers.{at}.{short}") for at in range(layers + 1)])
    return arrays


def away(answer, reference):
    assert answer.keys() == reference.keys()
    off = sum(float(np.sum((answer[name].astype(np.float64) - reference[name]) ** 2)) for name in reference)
    return (off / sum(float(np.sum(reference[name].astype(np.float64) ** 2)) for name in reference)) ** 0.5


def bytes_of(state):
    """What the state has beside parameters and the count of steps."""
    rest = {key: value for key, value in state.items() if key not in ("params", "steps")}
    return sum(leaf.nbytes for _, leaf in tree.leaves(rest) if hasattr(leaf, "nbytes"))


# One matrix, step by step


def moved(name, p, gradients, rate=0.01, **knobs):
    """Move one matrix `layers.0.up` by a rule in both frameworks; return it after each gradient, in both."""
    import jax
    import jax.numpy as jnp

    answers = []
    for backend in place.NAMES:
        parts = parts_of(backend, learning_rate=rate, weight_decay=0.1)
        params = (
            {"layers": [{"up": torch.tensor(p)}]} if backend == "torch" else {"layers": {"up": jnp.asarray(p)[None]}}
        )

        first = {"params": params, "moments": None, "steps": 0 if backend == "torch" else jnp.zeros((), jnp.int32)}

        def init(parts, source=None, first=first, compiled=backend == "jax"):
            zeros = {key: jax.tree.map(jnp.zeros_like, first["params"]) for key in parts.moments} if compiled else {}
            return {**first, **zeros}

        parts = LOADED.strategies[name].on[backend](replace(parts, init=init), **knobs)
        state, seen = parts.init(parts, None), []
        for g in gradients:
            like = (
                {"layers": [{"up": torch.tensor(g)}]}
                if backend == "torch"
                else {"layers": {"up": jnp.asarray(g)[None]}}
            )
            state = parts.update(parts, state, like)
            layer = state["params"]["layers"]
            seen.append(layer[0]["up"].numpy().copy() if backend == "torch" else np.asarray(layer["up"][0]))
        answers.append(seen)
    return answers


def draws(rows, columns, count, seed=0):
    random = np.random.default_rng(seed)
    return [random.standard_normal((rows, columns)).astype(np.float32) for _ in range(count)]


def test_lion_leans_on_the_old_momentum_and_then_follows():
    p, *gradients = draws(6, 8, 5)
    expected, m = p.astype(np.float64), np.zeros_like(p)
    for g in gradients:
        expected = expected * (1 - 0.01 * 0.1) - 0.01 * 0.5 * np.sign(0.9 * m + 0.1 * g)
        m = 0.99 * m + 0.01 * g
    for seen in moved("lion", p, gradients, factor=0.5):
        assert np.allclose(seen[-1], expected, atol=1e-6)


def test_momentum_adds_gradients_up_and_weights_decay_beside_it():
    p, *gradients = draws(6, 8, 5)
    expected, m = p.astype(np.float64), 0
    for g in gradients:
        m = 0.8 * m + g
        expected = expected * (1 - 0.01 * 0.1) - 0.01 * m
    for seen in moved("sgd_momentum", p, gradients, momentum=0.8):
        assert np.allclose(seen[-1], expected, atol=1e-6)


def test_lomo_is_gradient_descent_at_a_multiple_of_the_rate():
    p, *gradients = draws(6, 8, 5)
    expected = p.astype(np.float64)
    for g in gradients:
        expected = expected * (1 - 0.01 * 0.1) - 0.01 * 3 * g
    for seen in moved("lomo", p, gradients, factor=3.0):
        assert np.allclose(seen[-1], expected, atol=1e-6)


@pytest.mark.parametrize("rate", [0.01, 0.9])
def test_adafactor_divides_by_rows_and_columns_and_bounds_its_steps(rate):
    p, *gradients = draws(6, 9, 5)
    gradients[2] = gradients[2] * 100
    expected, row, column = p.astype(np.float64), 0, 0
    for steps, g in enumerate(gradients, 1):
        share, squares = steps**-0.8, g.astype(np.float64) ** 2
        size = np.sqrt((expected**2).mean()) * min(rate, steps**-0.5)
        row = row + share * (squares.mean(1, keepdims=True) - row)
        column = column + share * (squares.mean(0, keepdims=True) - column)
        change = g / np.sqrt(row * column / row.mean())
        expected = expected * (1 - rate * 0.1) - size * change / max(1, np.sqrt((change**2).mean()))
    for seen in moved("adafactor", p, gradients, rate):
        assert np.allclose(seen[-1], expected, rtol=1e-4, atol=1e-4)


def test_muon_takes_the_momentum_that_is_asked_for():
    p, *gradients = draws(4, 32, 6)

    def of_torch(momentum):
        matrix = torch.nn.Parameter(torch.tensor(p).T)  # torch takes [out, in]
        optimizer = torch.optim.Muon([matrix], lr=0.01, weight_decay=0.1, momentum=momentum)
        for g in gradients:
            matrix.grad = torch.tensor(g).T
            optimizer.step()
        return matrix.detach().numpy().T

    asked, usual = of_torch(0.5), of_torch(0.95)
    for seen in moved("muon", p, gradients, momentum=0.5):  # in bfloat16, which another order rounds in another way
        assert np.linalg.norm(seen[-1] - asked) < 0.3 * np.linalg.norm(seen[-1] - usual)


def test_the_first_step_of_galore_is_adams_in_the_space_of_the_largest_directions():
    for rows, columns, scale in ((6, 9, 0.25), (9, 6, 0.5)):
        p, g, *_ = draws(rows, columns, 2)
        left, _, right = np.linalg.svd(g.astype(np.float64), full_matrices=False)
        projector = left[:, :2] if rows <= columns else right[:2].T
        low = projector.T @ g if rows <= columns else g @ projector
        change = low / (np.abs(low) + 1e-8)  # Adam's first step
        whole = projector @ change if rows <= columns else change @ projector.T
        expected = p * (1 - 0.01 * 0.1) - 0.01 * scale * whole
        for seen in moved("galore", p, [g], rank=2, scale=scale):
            assert np.allclose(seen[0], expected, atol=1e-5)


@pytest.mark.parametrize("name", ["apollo", "galore"])
def test_a_matrix_whose_shorter_side_is_the_rank_is_updated_by_adam(name):
    p, g, *_ = draws(3, 5, 2)
    for seen in moved(name, p, [g], rank=3):
        assert np.allclose(seen[0], p * (1 - 0.01 * 0.1) - 0.01 * np.sign(g), atol=1e-5)


def test_galore_looks_for_directions_anew_only_so_often():
    """With gradients in one direction, and then in another, the second moves nothing until the projector is new."""
    p = np.ones((4, 5), np.float32)
    first, second = np.zeros_like(p), np.zeros_like(p)
    first[0, 0], second[3, 3] = 1.0, 1.0
    for seen in moved("galore", p, [first, second, second], rank=1, every=2):
        still, after = seen[1][3, 3] - seen[0][3, 3] * (1 - 0.001), seen[2][3, 3] - seen[1][3, 3] * (1 - 0.001)
        assert abs(still) < 1e-6 and after < -1e-4
    for seen in moved("galore", p, [first, second], rank=1, every=1):
        assert seen[1][3, 3] - seen[0][3, 3] * (1 - 0.001) < -1e-4, "each step has directions of its own"


def test_apollo_scales_whole_channels_and_lets_the_norm_grow_slowly():
    p, *gradients = draws(6, 9, 4)
    gradients[2] = gradients[2] * 1000
    for seen in moved("apollo", p, gradients, rank=3):
        before, norms = p, []
        for now, g in zip(seen, gradients, strict=True):
            change = (before * (1 - 0.001) - now) / 0.01
            ratio = change / g
            assert np.allclose(ratio, ratio[:1], rtol=1e-2), "a column has one scale"
            norms.append(np.linalg.norm(change))
            before = now
        assert all(b <= 1.02 * a for a, b in pairwise(norms)), norms


@pytest.mark.parametrize(("rows", "columns"), [(6, 9), (9, 6)])
def test_apollo_scales_channels_as_adam_would_in_the_space_that_is_drawn(rows, columns):
    import jax

    rank, side = 3, int(rows > columns)
    p, *gradients = draws(rows, columns, 6)
    gradients[3] = gradients[3] * 1000

    def by_torch(seed):
        return torch.randn(6, rank, generator=torch.Generator().manual_seed(seed)).numpy()

    def by_jax(seed):
        return np.asarray(jax.random.normal(jax.random.key(seed), (6, rank)))

    for seen, draw in zip(moved("apollo", p, gradients, rank=rank, every=2), (by_torch, by_jax), strict=True):
        expected, m, v, norm = p.astype(np.float64), 0, 0, np.inf
        for steps, (now, g) in enumerate(zip(seen, gradients, strict=True), 1):
            drawn = draw((steps - 1) // 2) / rank**0.5
            low = drawn.T @ g if side == 0 else g @ drawn
            m, v = 0.9 * m + 0.1 * low, 0.999 * v + 0.001 * low**2
            change = m / (1 - 0.9**steps) / (np.sqrt(v / (1 - 0.999**steps)) + 1e-8)  # Adam's of `low`
            assert steps > 1 or np.allclose(abs(change), 1, atol=1e-4)
            scale = np.linalg.norm(change, axis=side) / np.linalg.norm(low, axis=side)
            whole = g * np.expand_dims(scale, side)
            whole = whole * min(1, 1.01 * norm / np.linalg.norm(whole))
            norm = np.linalg.norm(whole)
            expected = expected * (1 - 0.001) - 0.01 * whole
            assert np.allclose(now, expected, atol=3e-6), steps


def test_soap_is_adam_in_the_basis_of_the_preconditioners():
    """The first gradient gives the basis and moves nothing; in it the second moves everything by the rate."""
    p, first, g = draws(5, 5, 3, seed=3)  # of two sides of one length: no basis is arbitrary
    left, _, right = np.linalg.svd(first.astype(np.float64))
    change = left @ np.sign(left.T @ g @ right.T) @ right
    expected = p * (1 - 0.001) - 0.01 * change
    for seen in moved("soap", p, [first, g]):
        assert np.array_equal(seen[0], p) and np.allclose(seen[1], expected, atol=1e-4)


@pytest.mark.parametrize("turns", [False, True])
def test_soap_keeps_its_second_moment_with_the_directions_that_it_is_of(turns):
    """One element has nearly all of each gradient, or from the second on: it moves by the rate, whatever is turned."""
    p, *gradients = draws(2, 2, 5)
    gradients = [0.01 * g for g in gradients]
    gradients[0][(0, 0) if turns else (1, 1)] += 1 if turns else 100
    for g in gradients[1:]:
        g[1, 1] += 100
    for seen in moved("soap", p, gradients, every=2):
        steps = [before[1, 1] * (1 - 0.001) - now[1, 1] for before, now in pairwise(seen)]
        assert steps == pytest.approx([0.01] * 3, rel=0.1)


@pytest.mark.parametrize("backend", place.NAMES)
def test_soap_refuses_matrices_that_nothing_decomposes(backend):
    parts = parts_of(backend, "bfloat16", "soap")
    with pytest.raises(ValueError, match="is stored in 16 bits"):
        parts.init(parts, None)


def test_soap_takes_wide_adapters_of_a_narrow_model():
    names = ("bfloat16", "lora", "soap")
    assert conflict([LOADED.strategies[name] for name in names]) is None
    _, losses, _ = trained("torch", *names, steps=4)
    assert np.isfinite(losses).all()


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(set(RULES) - {"apollo", "soap"}))
def test_a_rule_is_the_same_in_both_frameworks(name):
    (answer, losses, _), (reference, others, _) = trained("torch", name), trained("jax", name)
    # Codes at the edge of two levels, and signs of what is nearly zero, may go either way. `apollo` draws its own
    # numbers in each, and the basis of `soap` is not unique where gradients are of low rank.
    assert away(answer, reference) < (2e-3 if name in ("adam_4bit", "lion", "galore") else 1e-5)
    assert losses == pytest.approx(others, rel=1e-3)


@pytest.mark.parametrize("name", [*RULES, "badam", "lisa"])
def test_a_rule_learns(name):
    _, losses, _ = trained("torch", name, steps=24, ignored=0.0, learning_rate=3e-3)
    assert np.mean(losses[-4:]) < np.mean(losses[:4]) - 0.02


# What is kept


@pytest.mark.long
@pytest.mark.parametrize("backend", place.NAMES)
def test_bytes_of_moments(backend):
    sizes = {"width": 64, "hidden": 256, "vocabulary": 512}
    shape = parts_of(backend, **sizes).shape
    parameters = shape.parameters()
    per_parameter = {name: bytes_of(trained(backend, name, steps=1, **sizes)[2]) / parameters for name in RULES}
    assert per_parameter["lomo"] == 0 and per_parameter["lion"] == 4
    assert 4 < per_parameter["adam_mini"] < 4.1
    assert 1 + 8 / 128 <= per_parameter["adam_4bit"] < 1.2
    assert per_parameter["soap"] > 12
    assert per_parameter["apollo"] < per_parameter["galore"] < 8


def test_blocks_of_adam_mini_are_heads_outputs_and_rows():
    parts = parts_of("torch")
    layout = adam_mini.Layout.of(parts)
    assert layout.blocks("layers.0.wq", (48, 48)) == (1, parts.shape.heads)
    assert layout.blocks("layers.0.wo", (48, 40)) == (1, 40)
    assert layout.blocks("embed", (67, 48)) == (67, 1)
    assert layout.blocks("layers.0.mix_norm", (48,)) == (1,)


@pytest.mark.parametrize("backend", place.NAMES)
def test_adam_mini_divides_by_the_mean_over_a_head_or_over_an_output(backend):
    """After one step the change of an element is its gradient over the root of its block's mean of squares."""
    import jax.numpy as jnp

    module, random = backends.load(backend), np.random.default_rng(1)
    parts = parts_of(backend, "adam_mini", kv_heads=2, learning_rate=0.01, weight_decay=0.0)
    whole, blocks = parts.init(parts, None), {"wq": 4, "wk": 2, "wv": 24}
    array, key = (torch.tensor, "moments") if backend == "torch" else (jnp.asarray, "first")

    def some(of):
        layers = of["layers"][:1] if backend == "torch" else [of["layers"]]
        (layer,) = ({name: each[name] for name in blocks} for each in layers)
        return {"layers": [layer] if backend == "torch" else layer}

    state = {"params": some(whole["params"]), key: some(whole[key]), "steps": whole["steps"]}
    grads = tree.mapped(lambda p: array(random.standard_normal(p.shape).astype(np.float32)), state["params"])
    before, slopes = (named(module, of) for of in (state["params"], grads))
    after = named(module, parts.update(parts, state, grads)["params"])
    for name, count in blocks.items():
        g = slopes[f"layers.{name}"]
        means = (g**2).reshape(*g.shape[:2], count, -1).mean((1, 3))
        due = g / np.sqrt(means.repeat(g.shape[2] // count, 1))[:, None]
        assert np.allclose((before[f"layers.{name}"] - after[f"layers.{name}"]) / 0.01, due, atol=1e-3), name


@pytest.mark.parametrize(
    ("config", "ends", "axes"),
    [
        ("smollm2-135m", "embed_tokens.weight", (1,)),
        ("smollm2-135m", "up_proj.weight", (1,)),
        ("gpt2", "wpe.weight", (1,)),
        ("gpt2", "c_fc.weight", (0,)),
        ("mixtral-8x7b", "experts.down_proj", (2,)),
        ("mixtral-8x7b", "head", (1,)),
    ],
)
def test_blocks_of_adam_mini_in_a_published_model_are_its_outputs_and_rows(config, ends, axes):
    """After one step the change of an element is its gradient over the root of its block's mean of squares."""
    pytest.importorskip("transformers", reason="needs the package transformers")
    published = LOADED.workloads["causal_lm"]
    shape = published.probe(published.shape(config=config, weight_decay=0.0, learning_rate=0.01))
    parts = published.on["torch"](shape, Place("torch", "cpu"), None, 0)
    parts = LOADED.strategies["adam_mini"].on["torch"](parts)
    state = parts.init(parts, None)
    before = {name: p.detach().clone() for name, p in tree.leaves(state["params"])}
    grads = tree.mapped(lambda p: torch.randn(p.shape, generator=torch.Generator().manual_seed(1)), state["params"])
    state = parts.update(parts, state, grads)
    params, gradients = dict(tree.leaves(state["params"])), dict(tree.leaves(grads))
    name = next(name for name in params if name.endswith(ends))
    due = gradients[name] / gradients[name].square().mean(axes, keepdim=True).sqrt()
    assert torch.allclose((before[name] - params[name].detach()) / 0.01, due, atol=1e-4)


@pytest.mark.parametrize("signed", [True, False])
def test_levels_of_4_bit_are_those_of_the_paper(signed):
    levels = adam_4bit.levels(signed)
    assert len(set(levels.tolist())) == 16 and (np.diff(levels) > 0).all() and levels[-1] == 1
    if signed:
        assert sorted(levels[levels > 0]) == pytest.approx([0.0055, 0.0325, 0.0775, 0.2125, 0.4375, 0.6625, 0.8875, 1])
    else:
        assert levels == pytest.approx(np.arange(1, 17) / 16), "no second moment becomes zero"


# Blocks in turn


def test_badam_moves_one_block_after_the_other_by_an_adam_begun_anew_and_keeps_its_moments_alone():
    parts, fed = LOADED.strategies["badam"].on["torch"](parts_of("torch"), every=2), {}
    inner = parts.update

    def update(parts, state, grads):
        fed.update((name, g.clone()) for name, g in tree.leaves(grads))
        return inner(parts, state, grads)

    parts = replace(parts, update=update)
    state = parts.init(parts, None)
    order = badam.turns(state["params"])
    assert order[0] == "embed" or order[0].startswith("layers.")
    batches = parts.batches(parts, parts.windows(parts, parts.source(parts)))
    for step in range(2 * len(order) + 2):  # until the first block has its second turn
        before = {name: p.detach().clone() for name, p in tree.leaves(state["params"])}
        x, y = next(batches)
        state, _ = parts.step(parts, state, x, y)
        now = {name: p.detach() for name, p in tree.leaves(state["params"])}
        turn = order[step // 2 % len(order)]
        assert {block_of(name) for name, p in now.items() if not torch.equal(p, before[name])} == {turn}
        block = {name for name in now if block_of(name) == turn}
        with_moments = {name for name, sub in zip(before, zeros(state), strict=True) if sub}
        assert with_moments == block
        if step % 2 == 0:
            alone = {name: torch.nn.Parameter(before[name]) for name in block}
            settings = {"lr": parts.shape.learning_rate, "weight_decay": parts.shape.weight_decay}
            adam = torch.optim.AdamW(alone.values(), **settings)
        for name, p in alone.items():
            p.grad = fed[name]
        adam.step()
        assert all(torch.allclose(now[name], p, rtol=1e-5, atol=1e-7) for name, p in alone.items()), step


def test_lisa_trains_the_ends_always_and_a_layer_that_is_drawn_by_an_adam_begun_anew():
    parts, fed, seen = LOADED.strategies["lisa"].on["torch"](parts_of("torch", layers=4), layers=1, every=3), {}, set()
    inner = parts.update

    def update(parts, state, grads):
        fed.update((name, g.clone()) for name, g in tree.leaves(grads))
        return inner(parts, state, grads)

    parts = replace(parts, update=update)
    state, batches = parts.init(parts, None), parts.batches(parts, parts.windows(parts, parts.source(parts)))
    settings = {"lr": parts.shape.learning_rate, "weight_decay": parts.shape.weight_decay}
    alone = {name: torch.nn.Parameter(p.detach().clone()) for name, p in tree.leaves(state["params"])}
    ends = torch.optim.AdamW([p for name, p in alone.items() if not name.startswith("layers.")], **settings)
    for step in range(24):
        before = {name: p.detach().clone() for name, p in tree.leaves(state["params"])}
        state, _ = parts.step(parts, state, *next(batches))
        now = {name: p.detach() for name, p in tree.leaves(state["params"])}
        turn = lisa.drawn(state["params"], step // 3, 1)
        trains = {name for name in now if block_of(name) in turn or not name.startswith("layers.")}
        assert {name for name, p in now.items() if not torch.equal(p, before[name])} == trains
        assert {name for name, sub in zip(before, zeros(state), strict=True) if sub} == trains
        if step % 3 == 0:
            layer = torch.optim.AdamW([p for name, p in alone.items() if block_of(name) in turn], **settings)
        for name, p in alone.items():
            p.grad = fed[name] if name in trains else None
        ends.step(), layer.step()
        assert all(torch.allclose(now[name], p, rtol=1e-5, atol=1e-7) for name, p in alone.items()), step
        seen |= turn
    assert len(seen) > 2, "other layers in other turns"


def test_lisa_draws_all_layers_alike_and_none_twice():
    params = {"embed": torch.ones(1), "layers": [{"up": torch.ones(1), "down": torch.ones(1)} for _ in range(4)]}
    turns = [lisa.drawn(params, turn, 2) for turn in range(400)]
    counts = [sum(f"layers.{at}" in turn for turn in turns) for at in range(4)]
    assert {len(turn) for turn in turns} == {2} and min(counts) > 150 and sum(counts) == 800
    assert lisa.drawn(params, 0, 9) == {f"layers.{at}" for at in range(4)}


def zeros(state):
    lists = []
    tree.mapped(lambda _, of: lists.append(of), state["params"], state["moments"])
    return lists


# Clipping


@pytest.mark.long_in_jax
@pytest.mark.parametrize("backend", place.NAMES)
def test_gradients_are_shrunk_to_the_norm_and_no_smaller_ones(backend):
    module = backends.load(backend)
    for norm in (0.05, 1e6):
        plain, parts = parts_of(backend), LOADED.strategies["clip_gradients"].on[backend](parts_of(backend), norm=norm)
        state = plain.init(plain, None)
        x, y = next(iter(plain.batches(plain, plain.windows(plain, plain.source(plain)))))
        before, after = (named(module, each.grad(each, state, x, y)[1]) for each in (plain, parts))
        total = sum(float((g.astype(np.float64) ** 2).sum()) for g in before.values()) ** 0.5
        share = min(1.0, norm / total)
        assert all(np.allclose(after[name], before[name] * share, rtol=1e-4, atol=1e-9) for name in before)


@pytest.mark.parametrize(
    ("name", "backend"), [*(("clip_gradients", each) for each in place.NAMES), ("clip_in_backward", "torch")]
)
def test_the_norm_of_gradients_in_16_bits_is_taken_in_32(name, backend):
    """A sum in 16 bits loses the small ones beside the large one; the wide one shows by what all are multiplied."""
    import jax.numpy as jnp

    values = {"wide": np.full(2, 0.5), "large": np.ones(1010)}
    values |= {f"small{at}": np.full(3, 0.70703125) for at in range(200)}
    total = sum(float((g**2).sum()) for g in values.values()) ** 0.5
    dtypes = {key: "float32" if key == "wide" else "bfloat16" for key in values}
    clipped, params = {}, {}
    if backend == "torch":
        slopes = {key: torch.tensor(g).to(getattr(torch, dtypes[key])) for key, g in values.items()}
        params = {key: torch.zeros_like(g, requires_grad=True) for key, g in slopes.items()}
    else:
        slopes = {key: jnp.asarray(g, dtypes[key]) for key, g in values.items()}

    def grad(parts, state, x, y):
        if backend == "jax":
            return 0.0, slopes
        loss = sum((p * slopes[key]).sum() for key, p in params.items())
        return loss, dict(zip(params, torch.autograd.grad(loss, list(params.values())), strict=True))

    def update(parts, state, grads):
        clipped.update(grads)
        return state

    parts = Parts(None, Place(backend, "cpu"), grad=grad, update=update)
    parts = LOADED.strategies[name].on[backend](parts, norm=1.0)
    state = {"params": params, "moments": None, "steps": 0}
    if name == "clip_in_backward":
        parts.step(parts, state, None, None)
    else:
        clipped.update(parts.grad(parts, state, None, None)[1])
    assert np.asarray(clipped["wide"]) == pytest.approx(0.5 / total, rel=1e-5)


def test_gradients_that_take_no_memory_are_shrunk_without_any():
    """What stands still has one number for all of its gradient: to write to it would be to write many times."""
    slopes = {"whole": torch.full((3,), 4.0), "single": torch.tensor(3.0).expand(2, 2), "scale": torch.tensor(2.0)}
    parts = Parts(None, Place("torch", "cpu"), grad=lambda *_: (0.0, dict(slopes)))
    parts = LOADED.strategies["clip_gradients"].on["torch"](parts, norm=1.0)
    clipped = parts.grad(parts, {}, None, None)[1]
    total = (3 * 16 + 4 * 9 + 4) ** 0.5
    assert clipped["whole"] is slopes["whole"] and clipped["single"].stride() == (0, 0)
    for name, size, value in (("whole", (3,), 4.0), ("single", (2, 2), 3.0), ("scale", (), 2.0)):
        torch.testing.assert_close(clipped[name], torch.full(size, value / total))


def test_two_backward_passes_clip_as_one_does():
    answer, losses, state = trained("torch", "clip_in_backward")
    reference, plain, _ = trained("torch", "clip_gradients")
    unclipped, _, _ = trained("torch")
    assert losses == pytest.approx(plain, rel=1e-6) and int(state["steps"]) == 6
    assert away(answer, reference) < 1e-6 < away(answer, unclipped)


@pytest.mark.parametrize("names", [("clip_gradients", "update_in_backward"), ("update_in_backward", "clip_gradients")])
def test_one_backward_pass_cannot_clip(names):
    with pytest.raises(ValueError, match="applies each gradient at once"):
        trained("torch", *names, steps=1)


@pytest.mark.parametrize("rule", ["lion", "adam_mini", "galore", "apollo", "soap", "adam_4bit"])
def test_rules_go_with_updates_in_the_backward_pass(rule):
    answer, _, _ = trained("torch", rule, "update_in_backward", steps=3)
    assert away(answer, trained("torch", rule, steps=3)[0]) < 1e-5


@pytest.mark.parametrize(
    ("names", "wanted"),
    [
        ((), ["first", "second"]),
        (("update_in_backward",), ["first", "second"]),
        (("sgd_momentum",), ["first"]),
        (("muon",), ["first"]),
        *(((name,), []) for name in ("adam_8bit", "adafactor", "lion", "lomo", "soap", "lora")),
        (("lora", "lion"), []),
    ],
    ids=str,
)
def test_no_moment_of_adamw_is_made_in_jax_that_a_rule_would_drop(names, wanted, monkeypatch):
    from harness.workloads.decoder import _jax

    made, inner = [], _jax.with_moments

    def watched(parts, params):
        made.append(inner(parts, params))
        return dict(made[-1])

    monkeypatch.setattr(_jax, "with_moments", watched)
    parts = parts_of("jax", *names)
    state = parts.init(parts, None)
    assert sorted(made[0].keys() - {"params", "steps"}) == wanted
    assert names[-1:] != ("lion",) or state.keys().isdisjoint({"second"})
