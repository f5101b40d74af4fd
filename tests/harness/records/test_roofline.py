"""The work of a step: counted operation by operation, and the time it takes at given rates."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from harness.backends.jax_flops import work
from harness.backends.torch_flops import Work
from harness.records.roofline import Operations, Rates, by_intensity, estimate, gathered
from harness.suite.units import SizeError, shown, size


def counted(function, *arrays):
    with Work() as found:
        function(*arrays)
    return found.taken()


def flops(operations):
    return sum(each.flops for each in operations)


def moved(operations):
    return sum(each.moved for each in operations)


def test_a_product_is_counted_by_its_three_lengths():
    a, b = torch.ones(6, 8), torch.ones(8, 10)
    assert flops(counted(torch.mm, a, b)) == 2 * 6 * 8 * 10
    assert flops(counted(lambda: torch.ones(6, 10).addmm_(a, b))) == 2 * 6 * 8 * 10
    assert moved(counted(torch.mm, a, b)) == 4 * (48 + 80 + 60)


def test_updates_of_many_tensors_at_once_move_all_of_them():
    p, g, m, v = ([torch.ones(1000), torch.ones(500)] for _ in range(4))
    assert moved(counted(lambda: torch._foreach_mul_(p, 0.5))) == 2 * 4 * 1500
    steps, none = [torch.ones(()) for _ in p], []
    rates = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0, "eps": 1e-8}
    kinds = {"amsgrad": False, "maximize": False, "grad_scale": None, "found_inf": None}
    fused = counted(lambda: torch._fused_adamw_(p, g, m, v, none, steps, **rates, **kinds))
    assert moved(fused) >= 7 * 4 * 1500


def test_views_move_nothing_and_a_gather_only_what_it_takes():
    table, ids = torch.ones(1000, 4), torch.arange(3)
    assert counted(lambda: table.view(4, 1000).T[:2]) == ()
    assert moved(counted(lambda: F.embedding(ids, table))) == 2 * 3 * 4 * 4
    assert moved(counted(lambda: table * 2)) == 2 * 4000 * 4


def test_a_question_about_a_tensor_moves_nothing():
    with FakeTensorMode():
        table = torch.ones(1000, 4)
        assert counted(lambda: (table.device, table.shape, table.is_contiguous())) == ()
        assert moved(counted(lambda: torch.ones(2, 5, 4) @ table.T)) == 4 * (2 * 5 * 4 + 1000 * 4 + 2 * 5 * 1000 + 40)


def test_attention_under_a_causal_mask_is_half_of_it():
    q = torch.ones(1, 2, 64, 16)
    whole = flops(counted(lambda: F.scaled_dot_product_attention(q, q, q)))
    half = flops(counted(lambda: F.scaled_dot_product_attention(q, q, q, is_causal=True)))
    assert whole == 4 * 2 * 64 * 64 * 16 and half == whole / 2


def test_a_chunked_loss_counts_its_three_products():
    if not hasattr(F, "linear_cross_entropy"):
        pytest.skip("this torch has no linear_cross_entropy")
    x, w, y = torch.ones(64, 8, requires_grad=True), torch.ones(100, 8, requires_grad=True), torch.zeros(64).long()
    options = torch.nn.LinearCrossEntropyOptions(acc_policy="auto", chunking_method="auto")
    assert flops(counted(lambda: F.linear_cross_entropy(x, w, y, options=options))) == 3 * 2 * 64 * 8 * 100


def test_the_backward_pass_counts():
    q = torch.ones(1, 2, 64, 16, requires_grad=True)
    forward = flops(counted(lambda: F.scaled_dot_product_attention(q, q, q, is_causal=True)))
    both = flops(counted(lambda: F.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()))
    assert both == 3.5 * forward  # five products instead of two


def test_products_of_groups_and_of_an_lstm_are_counted():
    grouped = partial(torch._grouped_mm, offs=torch.tensor([8, 32], dtype=torch.int32))
    a, b = torch.empty(32, 16, dtype=torch.bfloat16), torch.empty(2, 16, 8, dtype=torch.bfloat16)
    with FakeTensorMode(allow_non_fake_inputs=True), Work() as made:
        grouped(torch.empty_like(a), torch.empty_like(b))
    assert flops(made.taken()) == 2 * 32 * 16 * 8
    with Work() as made:
        torch.nn.LSTM(16, 8)(torch.zeros(5, 4, 16))
    assert flops(made.taken()) == 2 * 5 * 4 * (4 * 8) * (16 + 8)


def test_products_with_vectors_and_of_a_bilinear_layer_are_counted():
    matrix, vector, other = torch.ones(4, 6), torch.ones(6), torch.ones(4)
    assert flops(counted(lambda: matrix @ vector)) == flops(counted(lambda: torch.addmv(other, matrix, vector))) == 48
    assert flops(counted(lambda: vector @ vector)) == 12
    assert flops(counted(lambda: torch.addr(matrix, other, vector))) == 48
    layer, a, b = torch.nn.Bilinear(3, 5, 7), torch.ones(11, 3, requires_grad=True), torch.ones(11, 5)
    once, then = 2 * 11 * 7 * 3 * 5, 2 * 11 * 7 * 5
    assert flops(counted(lambda: layer(a, b))) == once + then
    of_weight = 2 * 11 * 7 * 3 + once
    assert flops(counted(lambda: layer(a, b).sum().backward())) == once + then + of_weight + once + 2 * 11 * 3 * 5


def program(function, *arrays):
    return work(jax.make_jaxpr(function)(*arrays))


def counting(start, end, step):
    def multiplied(x, w, last):
        end_of = last if end is None else end
        return jax.lax.while_loop(lambda c: c[0] < end_of, lambda c: (step + c[0], c[1] @ w), (start, x))[1]

    return multiplied


@pytest.mark.parametrize(("start", "end", "step", "turns"), [(0, 7, 1, 7), (1, 8, 3, 3), (9, 7, 1, 0), (0, None, 1, 1)])
def test_a_loop_in_jax_that_counts_runs_as_often_as_it_counts(start, end, step, turns):
    x = jnp.ones((4, 4))
    assert flops(program(counting(start, end, step), x, x, 5)) == turns * 2 * 4**3


def test_a_loop_in_jax_whose_bound_is_carried_is_counted():
    x = jnp.ones((4, 4))
    assert (
        flops(
            program(
                lambda x: jax.lax.while_loop(lambda c: c[1] > c[0], lambda c: (c[0] + 2, c[1], c[2] @ x), (0, 6, x)), x
            )
        )
        == 3 * 2 * 4**3
    )
    assert flops(program(lambda x: jax.lax.while_loop(lambda c: c.sum() < 9, lambda c: c @ x, x), x)) == 2 * 4**3


def test_convolutions_and_products_of_groups_in_jax_are_counted():
    def convolved(x, kernel):
        return jax.lax.conv_general_dilated(x, kernel, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"))

    x, kernel = jnp.zeros((2, 10, 3)), jnp.zeros((4, 3, 5))
    assert flops(program(convolved, x, kernel)) == 2 * (2 * 10 * 5) * (4 * 3)
    groups = jnp.array([6, 4], jnp.int32)
    a, b = jnp.zeros((10, 3)), jnp.zeros((2, 3, 5))
    assert flops(program(jax.lax.ragged_dot, a, b, groups)) == 2 * 10 * 3 * 5
    trained = jax.grad(lambda a, b, groups: jax.lax.ragged_dot(a, b, groups).sum(), argnums=(0, 1))
    assert flops(program(trained, a, b, groups)) == 3 * 2 * 10 * 3 * 5, "both gradients take as many"


def test_a_loop_in_jax_counts_as_often_as_it_runs():
    w = jnp.ones((8, 8))
    once = flops(program(lambda x: x @ w, w))
    assert once == 2 * 8**3
    assert flops(program(lambda x: jax.lax.scan(lambda x, _: (x @ w, None), x, length=5)[0], w)) == 5 * once
    assert flops(program(jax.jit(lambda x: x @ w @ w), w)) == 2 * once
    assert flops(program(lambda x: jax.lax.cond(x[0, 0] > 0, lambda x: x @ w @ w, lambda x: x, x), w)) == 2 * once


def test_recomputation_in_jax_shows_as_work():
    w = jnp.ones((8, 8))

    def loss(function):
        return lambda x: jax.grad(lambda x: jnp.tanh(function(x) @ w).sum())(x)

    plain = flops(program(loss(lambda x: jnp.tanh(x @ w)), w))
    again = flops(program(loss(jax.checkpoint(lambda x: jnp.tanh(jnp.tanh(x @ w) @ w))), w))
    assert again > plain


def test_elementwise_chains_in_jax_move_their_ends_alone():
    x = jnp.ones(1000)
    assert moved(program(lambda x: jnp.tanh(jnp.exp(x) + 1) * 2, x)) == 4000
    assert moved(program(lambda x: x.reshape(10, 100), x)) == 0


@pytest.mark.parametrize("change", ["set", "add"])
def test_an_update_in_jax_moves_the_part_that_changes(change):
    table, rows = jnp.ones((1000, 4)), jnp.ones((2, 4))
    assert moved(program(lambda t, x: getattr(t.at[jnp.array([1, 2])], change)(x), table, rows)) == 2 * rows.nbytes


def test_work_of_one_intensity_is_added_up():
    found = gathered([Operations("float32", 100.0, 10), Operations("float32", 100.0, 10), Operations("int64", 0.0, 7)])
    assert set(found) == {Operations("float32", 200.0, 20, times=2), Operations("", 0.0, 7)}
    far = gathered([Operations("float32", 100.0, 10), Operations("float32", 100.0, 1000)])
    assert len(far) == 2


def test_equal_calls_are_counted_and_can_be_forgotten():
    x = torch.ones(64, 64)

    def step():
        return torch.exp(x + x) + (x + x)

    added, exponents = sorted(counted(step), key=lambda each: -each.times)
    assert (added.times, exponents.times) == (3, 1)
    assert '"aten.add.Tensor"' in added.call and added.moved == 3 * 3 * 4 * 64**2
    assert by_intensity(counted(step)) == (Operations("", 0.0, added.moved + exponents.moved),)


def test_the_slower_of_two_rates_binds():
    rates = Rates(bandwidth=100.0, flops={"float32": 1000.0})

    def seconds(operations):
        return estimate([operations], rates)

    assert seconds(Operations("float32", 5000.0, 100)) == (5.0, 0.0)
    assert seconds(Operations("float32", 500.0, 300)) == (3.0, 0.0)
    assert seconds(Operations("", 0.0, 50)) == (0.5, 0.0)
    assert seconds(Operations("float16", 1.0, 1)) is None
    assert estimate([], rates) is None


def test_a_call_that_was_timed_takes_its_own_time():
    rates = Rates(bandwidth=100.0, flops={"float32": 1000.0}, calls={"a": 0.25})
    timed, other = Operations("float32", 500.0, 10, "a", 3), Operations("float32", 250.0, 10, "b")
    assert estimate([timed, other], rates) == (1.0, 0.75)
    warm = timed._replace(moved=150)  # alone it found in the cache what a step fetches from memory
    assert estimate([warm, other], rates) == (1.75, 1.5 / 1.75)


@pytest.mark.parametrize(
    ("text", "bytes_"), [("8GiB", 8 << 30), ("512 MiB", 512 << 20), ("80GB", 80 * 10**9), ("1.5KiB", 1536), ("7B", 7)]
)
def test_sizes_are_read_as_people_write_them(text, bytes_):
    assert size(text) == bytes_


@pytest.mark.parametrize("text", ["24gib", "24Gi", "24gi", "24GIB", str(24 << 30)])
def test_units_are_read_in_any_letters(text):
    assert size(text) == 24 << 30


@pytest.mark.parametrize(
    ("text", "unit"), [("24G", "24GiB or 24GB"), ("512m", "512MiB or 512MB"), ("24", "24GiB or 24GB")]
)
def test_a_unit_that_is_not_clear_is_refused(text, unit):
    """Some programs take 24G for 24 GiB and others for 24 GB, and nobody means 24 bytes."""
    with pytest.raises(SizeError, match=f"'{text}' has no unit that is clear: write {unit}"):
        size(text)
    with pytest.raises(SizeError, match=f"^gpu memory: '{text}' has no unit"):
        size(text, "gpu memory")


def test_a_size_from_python_may_be_a_number_of_bytes():
    assert size(24 << 30) == 24 << 30
    with pytest.raises(SizeError, match="'3' has no unit that is clear"):
        size(3)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "GiB",
        "-1GiB",
        "8 GiBs",
        "1e9",
        "0",
        "0G",
        "0MiB",
        "0.4B",
        "1e-4KiB",
        "nan",
        "8;GiB",
        "9" * 30,
        "\x1b[31m8GiB",
    ],
)
def test_what_is_no_size_is_refused_in_one_sentence(text):
    with pytest.raises(SizeError, match="is not a size: write a number and a unit") as refused:
        size(text)
    assert "\x1b" not in str(refused.value)


def test_sizes_are_shown_in_the_unit_that_suits_them():
    assert [shown(each) for each in (100, 1 << 20, 1536 << 20, 300 << 30)] == ["100 B", "1 MiB", "1.5 GiB", "300 GiB"]
