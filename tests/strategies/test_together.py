"""Strategies that would answer wrongly together say so, and what each keeps where others freeze or cut."""

from functools import partial
from itertools import islice

import numpy as np
import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from harness import Parts, Place, backends, tree
from harness.contract import plugins
from harness.contract.assembly import assemble
from harness.contract.loop import training
from harness.records import Applied, Case
from harness.run.schedule import conflict
from harness.verbs.combinations import combinations

LOADED = plugins.load()
SHAPE = {"layers": 2, "width": 32, "heads": 2, "vocabulary": 61, "batch": 2, "tokens": 24}


def parts_of(backend, *strategies, workload="decoder", **sizes):
    named = [(each, {}) if isinstance(each, str) else each for each in strategies]
    made = LOADED.workloads[workload]
    shape = made.probe(made.shape()).model_dump() | (SHAPE if workload == "decoder" else {}) | sizes
    applied = tuple(Applied(name=name, knobs=knobs) for name, knobs in named)
    place, plain = f"{backend}/cpu", {"corpus": "drawn", "tokenizer": "none"}
    return assemble(LOADED, Case(workload=workload, shape=shape, place=place, strategies=applied, **plain))


def losses_of(parts, steps=3):
    module = backends.load(parts.place.backend)
    module.start(parts.place)
    return [float(loss) for loss, _ in islice(training(parts, module.prepare(parts), finish=module.wait), steps)]


@pytest.mark.parametrize("rule", ["adam_8bit", "adam_4bit", "adafactor", "fused_adamw", "foreach_adamw"])
@pytest.mark.parametrize("turned", [False, True])
def test_an_optimizer_that_keeps_no_rows_is_not_given_rows_of_the_embedding(rule, turned):
    names = [(rule, {"least": 16}) if rule.startswith("adam_") else rule, ("sparse_embedding_gradient", {"rows": 13})]
    with pytest.raises(ValueError, match="not in rows"):
        losses_of(parts_of("torch", *(reversed(names) if turned else names)))


@pytest.mark.parametrize("name", ["float16_scaled", "float16_master"])
@pytest.mark.parametrize("other", ["offloaded_moments", "mapped_moments", "sparse_embedding_gradient"])
def test_an_overflow_is_not_decided_by_one_tensor(name, other):
    with pytest.raises(ValueError, match=f"{name} decides by all gradients .* one tensor at a time"):
        losses_of(parts_of("torch", name, other))


@pytest.mark.parametrize("name", ["float16_scaled", "float16_master"])
def test_an_overflow_is_decided_by_all_tensors_in_the_other_order(name):
    assert losses_of(parts_of("torch", "mapped_moments", name))[-1] < 5


def test_a_frozen_model_that_would_stay_wide_is_refused():
    with pytest.raises(ValueError, match="would stay wide"):
        losses_of(parts_of("jax", "lora", "float16_scaled"))


def test_layers_that_run_outside_of_the_gradient_are_not_changed_within_it():
    with pytest.raises(ValueError, match="another 'attend' within the gradient"):
        losses_of(parts_of("jax", "packed", "update_in_backward", workload="documents"))


@pytest.mark.parametrize("name", ["rope_cache", "rope_on_the_fly"])
def test_positions_of_packed_rows_are_no_slices(name):
    with pytest.raises(ValueError, match=f"{name}: in JAX packed rows have positions of their own"):
        losses_of(parts_of("jax", "packed", name, workload="documents"))


def test_fsdp_refuses_a_head_that_it_does_not_divide():
    with pytest.raises(ValueError, match="leave out `head_bias`"):
        parts_of("torch", "fsdp", head_bias=True)


@pytest.mark.parametrize("name", ["lora", "badam", "lisa"])
def test_layers_are_undone_where_a_part_of_them_is_frozen(name):
    parts = parts_of("torch", "reversible", name)
    state = parts.init(parts, None)
    x, y = next(parts.batches(parts, parts.windows(parts, parts.source(parts))))
    for _ in range(2):
        loss, grads = parts.grad(parts, state, x, y)
        state = parts.update(parts, state, grads)
    assert loss.isfinite()


def test_products_by_modules_are_rounded_as_those_that_are_written_out():
    from strategies.activations.int8_activations._torch import RoundedProducts

    x, w, bias = (torch.randn(*size, requires_grad=True) for size in ((3, 5, 16), (8, 16), (8,)))
    saved: set[torch.dtype] = set()

    def gradients(product):
        with RoundedProducts(64), saved_tensors_hooks(lambda tensor: saved.add(tensor.dtype) or tensor, lambda t: t):
            y = product()
        return y, torch.autograd.grad(y.square().sum(), (x, w, bias))

    linear, of_linear = gradients(lambda: torch.nn.functional.linear(x, w, bias))
    assert torch.int8 in saved
    written, of_written = gradients(lambda: x @ w.T + bias)
    assert torch.allclose(linear, written)
    for one, other in zip(of_linear, of_written, strict=True):
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-5)
    exact = torch.autograd.grad(torch.nn.functional.linear(x, w, bias).square().sum(), w)[0]
    away = (of_linear[1] - exact).norm() / exact.norm()
    assert 1e-5 < away < 0.02, "what is rounded are the inputs"


def test_pieces_that_are_measured_leave_nothing():
    from strategies.attention.automatic_windows import saved_in_torch

    outputs: list[StorageWeakRef] = []

    def inner(parts, ps, x):
        y = torch.softmax(x @ ps, -1)  # its backward pass reads its own output
        outputs.append(StorageWeakRef(y.untyped_storage()))
        return y * 2

    assert saved_in_torch(inner, None, torch.randn(8, 8, requires_grad=True), torch.randn(1, 16, 8), 4) > 0
    assert outputs[0].expired()


def test_gradients_of_pieces_are_summed_without_another_tensor():
    made: list[torch.Tensor] = []

    def grad(parts, state, x, y):
        made.append(torch.full((5,), float(len(made) + 1)))
        return torch.tensor(1.0), {"w": made[-1]}

    place = Place("torch", "cpu")
    parts = LOADED.strategies["accumulate"].on["torch"](Parts(None, place, grad=grad), pieces=2)
    x = torch.zeros(4, 3, dtype=torch.int64)
    _, sums = parts.grad(parts, {}, x, x)
    assert sums["w"] is made[0] and torch.equal(sums["w"], torch.full((5,), 1.5))
    made.clear()
    y = x.clone()
    y[2:] = -100
    made_nan = replace_nan(grad, made)
    parts = LOADED.strategies["accumulate"].on["torch"](Parts(None, place, grad=made_nan), pieces=2)
    _, sums = parts.grad(parts, {}, x, y)
    assert torch.equal(sums["w"], torch.full((5,), 1.0)), "a piece without a target adds nothing, not NaN"


def replace_nan(grad, made):
    def with_nan(parts, state, x, y):
        loss, grads = grad(parts, state, x, y)
        if (y == -100).all():
            grads["w"].fill_(torch.nan)
        return loss, grads

    return with_nan


@pytest.mark.parametrize("name", ["float8_matmul", "written"])
def test_a_product_with_a_frozen_weight_saves_no_input(name, monkeypatch):
    if name == "float8_matmul":
        parts = LOADED.strategies[name].on["torch"](Parts(None, Place("torch", "cpu")))
        product = partial(parts.linear, parts)
    else:
        from strategies.products import _written

        monkeypatch.setattr(_written, "product", lambda name, x, w: x @ w)
        parts = _written.with_products(Parts(None, Place("torch", "cpu")), "naive")
        product = partial(parts.linear, parts)
    x, w = torch.randn(7, 32, requires_grad=True), torch.randn(32, 3)
    saved = []
    with saved_tensors_hooks(lambda tensor: saved.append(tensor.numel()) or tensor, lambda tensor: tensor):
        y = product({"up": w}, "up", x)
    assert x.numel() not in saved and w.numel() in saved
    (slope,) = torch.autograd.grad(y.sum(), x)
    assert slope.shape == x.shape


def test_gradients_of_windows_are_no_longer_than_windows():
    class Watch(TorchDispatchMode):
        long = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            made = function(*args, **(kwargs or {}))
            if isinstance(made, torch.Tensor) and made.numel() >= 64 * 4 and "view" not in str(function):
                self.long += 1
            return made

    def long_ones(tokens):
        parts = Parts(None, Place("torch", "cpu"), stack=lambda parts, ps, x: x * ps)
        parts = LOADED.strategies["sequence_windows"].on["torch"](parts, window=8, stride=4)
        x, p = torch.randn(1, tokens, 4, requires_grad=True), torch.tensor(2.0, requires_grad=True)
        y = parts.stack(parts, p, x)
        with Watch() as watch:
            y.sum().backward()
        assert torch.allclose(x.grad, torch.full_like(x, 2.0))
        return watch.long

    assert long_ones(64) <= 4, "there are 15 windows"


@pytest.mark.parametrize(("size", "pieces"), [(21, (7, 3)), (20, (4, 5)), (23, (4, 6))])
def test_a_classifier_is_filled_up_only_where_no_tiles_divide_it(size, pieces):
    from strategies.loss.cut_loss._jax import _pieces

    assert _pieces(np.ones((size, 2)), 6, 0).shape == (*pieces, 2)


@pytest.mark.parametrize("name", ["dense_attention", "chunked_attention", "window_attention", "block_sparse_attention"])
def test_scores_in_float16_are_scaled_before_they_overflow(name):
    parts = LOADED.strategies[name].on["torch"](Parts(None, Place("torch", "cpu")))
    q = torch.full((1, 8, 2, 16), 100.0, dtype=torch.float16)
    v = torch.randn(1, 8, 2, 16).half()
    assert (q[0, 0, 0].float() ** 2).sum() > torch.finfo(torch.float16).max
    assert parts.attend(parts, q, q, v).isfinite().all()


@pytest.mark.parametrize("name", ["selective_checkpoint", "offload_boundary"])
def test_rounded_products_are_recomputed_as_they_were_where_the_checkpoint_is_named_after_them(name):
    pair = [LOADED.strategies[name], LOADED.strategies["int8_activations"]]
    assert "name it after" in str(conflict(pair)) and conflict(pair[::-1]) is None
    assert losses_of(parts_of("torch", "int8_activations", name))[-1] < 5


@pytest.mark.parametrize("inner", ["drop_ignored", "chunked_backward_loss"])
def test_rows_that_were_read_are_those_of_the_whole_batch(inner):
    pieces = ("accumulate", {"pieces": 2})
    with pytest.raises(ValueError, match="rows that were read are those of the whole batch"):
        losses_of(parts_of("torch", pieces, ("sparse_embedding_gradient", {"rows": 13}), inner))


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_streams_that_are_restored_need_the_parts_of_a_layer(backend):
    with pytest.raises(ValueError, match="does not name both"):
        LOADED.strategies["reversible"].on[backend](Parts({}, Place(backend, "cpu"), feed=lambda *_: None))


def test_an_embedding_is_not_shared_with_a_head_that_has_a_bias():
    with pytest.raises(ValueError, match="leave `head_bias` out"):
        parts_of("torch", "tied", head_bias=True)


WINDOWS = ("sequence_windows", "automatic_windows")
CHECKPOINTS = ("checkpoint", "nested_checkpoint", "budget_checkpoint")


@pytest.mark.parametrize(
    ("names", "word"),
    [
        *(((windows, name), "after each segment of layers") for windows in WINDOWS for name in CHECKPOINTS),
        *((("reversible", name), "keeps nothing of them") for name in CHECKPOINTS),
        *(((name, "reversible"), "keeps nothing of them") for name in CHECKPOINTS),
        *(((name, "truncated_bptt"), "one by one") for name in (*WINDOWS, "reversible", "budget_checkpoint")),
        *(((windows, "packed"), "in whole rows") for windows in WINDOWS),
        (("accumulate", "truncated_bptt"), "states of another piece's rows"),
        (("document_loss", "truncated_bptt"), "last frame of each segment"),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, tuple) else "",
)
def test_what_would_be_another_network_without_a_word_is_refused(names, word):
    assert word in str(conflict([LOADED.strategies[name] for name in names]))


@pytest.mark.parametrize(
    "names",
    [*((name, windows) for windows in WINDOWS for name in CHECKPOINTS), ("truncated_bptt", "accumulate")],
    ids="+".join,
)
def test_the_order_that_a_refusal_asks_for_is_allowed(names):
    assert conflict([LOADED.strategies[name] for name in names]) is None


@pytest.mark.parametrize("name", [name for name, strategy in sorted(LOADED.strategies.items()) if strategy.ranks])
def test_ranks_do_not_each_choose_windows_of_their_own(name):
    assert conflict([LOADED.strategies[name], LOADED.strategies["automatic_windows"]]) is not None


@pytest.mark.parametrize(
    ("whole", "layerwise"),
    [
        (("sequence_windows", {"window": 8, "stride": 4}), "update_in_backward"),
        (("automatic_windows", {"available_gib": 1e-6}), "lomo"),
        ("reversible", "update_in_backward"),
    ],
    ids=str,
)
def test_a_stack_that_is_a_whole_is_not_run_layer_by_layer(whole, layerwise):
    with pytest.raises(ValueError, match="runs the layers one by one"):
        losses_of(parts_of("jax", whole, layerwise))


@pytest.mark.parametrize(
    ("one", "other", "word"),
    [
        *(
            ("sparse_embedding_gradient", other, "joined in memory")
            for other in ("offloaded_moments", "mapped_moments")
        ),
        ("sparse_embedding_gradient", "tensor_parallel", "not summed over the ranks"),
        ("sparse_embedding_gradient", "vocabulary_parallel_loss", "not summed over the ranks"),
        *(("mapped_moments", other, "a count of steps") for other in ("foreach_adamw", "fused_adamw")),
        ("mapped_moments", "soap", "whole matrices"),
        ("badam", "float32_master", "for those that wait"),
        ("badam", "truncated_bptt", "cannot be written to"),
        *((name, "bfloat16", "drawn in bfloat16") for name in ("float16_master", "float32_master")),
    ],
)
def test_a_pair_that_is_wrong_in_either_order_says_why(one, other, word):
    pair = [LOADED.strategies[name] for name in (one, other)]
    assert word in str(conflict(pair)) and word in str(conflict(pair[::-1]))


@pytest.mark.parametrize("adapter", ["lora", "qlora", "peft_lora"])
@pytest.mark.parametrize("products", ["float8_matmul", "naive_product", "tiled_product"])
def test_products_that_know_no_adapters_are_named_before_them(products, adapter):
    pair = [LOADED.strategies[name] for name in (adapter, products)]
    assert "name the adapters after it" in str(conflict(pair)) and conflict(pair[::-1]) is None


@pytest.mark.parametrize("adapter", ["lora", "qlora"])
def test_adapters_have_a_gradient_beside_products_in_8_bits(adapter):
    parts = parts_of("torch", "float8_matmul", (adapter, {"rank": 4}))
    x, y = next(parts.batches(parts, parts.windows(parts, parts.source(parts))))
    _, grads = parts.grad(parts, parts.init(parts, None), x, y)
    assert all(g.abs().max() > 0 for name, g in tree.leaves(grads) if name.endswith(".b"))


@pytest.mark.parametrize(
    ("inner", "outer"),
    [
        ("float32_master", "clip_gradients"),
        ("sgd_momentum", "mapped_moments"),
        ("lion", "offloaded_moments"),
        ("fused_loss", "drop_ignored"),
        ("lora", "adam_8bit"),
        ("lora", "float16_scaled"),
    ],
    ids="+".join,
)
def test_what_calls_the_part_that_it_rewrites_is_tried_on_top_of_another(inner, outer):
    rows = combinations([Applied(name=inner), Applied(name=outer)], LOADED)
    assert [inner, outer] in [[applied.name for applied in row] for row in rows]


@pytest.mark.long_in_jax
@pytest.mark.parametrize("backend", ["torch", "jax"])
@pytest.mark.parametrize("rule", ["adam_8bit", "adam_4bit", "adam_mini", "lion", "sgd_momentum"])
def test_a_rule_keeps_moments_of_the_adapters_alone(rule, backend):
    parts = parts_of(backend, "lora", (rule, {"least": 64} if rule.startswith("adam_") and "bit" in rule else {}))
    state = parts.init(parts, None)
    trained = {name for name, _ in tree.leaves(state["params"])}
    assert trained and all("adapters" in name for name in trained)
    x, y = next(parts.batches(parts, parts.windows(parts, parts.source(parts))))
    _, grads = parts.grad(parts, state, x, y)
    moved = parts.update(parts, state, grads)
    assert all(abs(p).max() > 0 for name, p in tree.leaves(moved["params"]) if name.endswith(".b"))


RULES = ("adafactor", "adam_4bit", "adam_8bit", "adam_mini", "apollo", "galore", "lion", "lomo", "muon", "sgd_momentum")


@pytest.mark.parametrize("rule", [*RULES, "soap"])
@pytest.mark.parametrize("other", ["fused_adamw", "bfloat16_stochastic", "float16_master", "sparse_embedding_gradient"])
def test_a_pair_of_updates_trains_or_says_why_not(rule, other):
    for names in ((rule, other), (other, rule)):
        if conflict([LOADED.strategies[name] for name in names]) is None:
            try:
                losses = losses_of(parts_of("torch", *((name, dict(LOADED.strategies[name].probe)) for name in names)))
            except ValueError as refused:  # it names what is wrong
                assert "row" in str(refused) or "backward pass" in str(refused) or "16 bits" in str(refused), names
            else:
                assert np.isfinite(losses).all(), names


def of_networks(network, *named):
    """The loss and the gradients of a recurrent network, through these strategies."""
    parts = parts_of("torch", *named, workload="temporal", network=network)
    x, y = next(parts.batches(parts, parts.windows(parts, parts.source(parts))))
    loss, grads = parts.grad(parts, parts.init(parts, None), x, y)
    return float(loss), dict(tree.leaves(grads))


@pytest.mark.parametrize("network", ["gru", "lstm"])
def test_pieces_that_torch_changes_in_place_are_offloaded_as_they_were(network):
    plain, grads = of_networks(network)
    loss, offloaded = of_networks(network, ("offload_activations", {"least_kib": 1}))
    assert loss == plain and all(torch.equal(offloaded[name], grads[name]) for name in grads)


def test_products_that_torch_changes_in_place_are_not_saved_for_later():
    with pytest.raises(ValueError, match="selective_checkpoint: torch's GRU and LSTM change in place"):
        of_networks("gru", "selective_checkpoint")


@pytest.mark.parametrize("loss", ["native_loss", "document_loss", "chunked_loss", "fused_loss"])
@pytest.mark.parametrize("precision", ["float16_master", "float16_scaled"])
def test_a_loss_in_float16_is_scaled_in_float32(loss, precision):
    scaled, plain = losses_of(parts_of("torch", loss, precision)), losses_of(parts_of("torch", loss))
    assert scaled == pytest.approx(plain, rel=0.02)


@pytest.mark.parametrize("turned", [False, True])
def test_reversible_layers_have_no_gradient_of_the_codes_of_a_frozen_base(turned):
    names = ["qlora", "reversible"]
    losses = [losses_of(parts_of(backend, *(reversed(names) if turned else names))) for backend in ("jax", "torch")]
    assert np.isfinite(losses).all() and losses[0][-1] < losses[0][0]
