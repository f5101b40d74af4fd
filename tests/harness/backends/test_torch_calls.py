"""An operator call as text, and a call like it: the same sizes come out, whatever the arguments are."""

import json

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from harness.backends.torch_calls import ready, text_of
from harness.backends.torch_flops import Work

aten = torch.ops.aten


def remade(function, *arguments, **options):
    """The result of a call that went through text."""
    return ready(text_of(function, arguments, options), "cpu")()


def test_a_call_comes_back_with_its_sizes_strides_and_dtypes() -> None:
    x = torch.zeros(6, 8, dtype=torch.bfloat16).T
    result = remade(aten.add.Tensor, x, x, alpha=0.5)
    assert (result.shape, result.dtype, result.stride()) == (x.shape, x.dtype, x.stride())
    assert remade(aten.cat.default, [torch.ones(2, 3), torch.ones(4, 3)], 0).shape == (6, 3)
    copied = remade(aten._to_copy.default, torch.ones(4), dtype=torch.float16, device=torch.device("cpu"))
    assert copied.dtype == torch.float16
    assert remade(aten.masked_fill.Scalar, torch.ones(4), torch.ones(4, dtype=torch.bool), float("-inf")).shape == (4,)


def test_an_expanded_tensor_takes_the_storage_of_one_element() -> None:
    text = text_of(aten.clone.default, (torch.ones(1).expand(1 << 40),), {})
    assert json.loads(text)[1] == [{"tensor": ["float32", [1 << 40], [0]]}]
    ready(text, "cpu")  # makes the argument, and would not without its strides


def test_an_index_stays_within_what_it_points_into() -> None:
    table, ids = torch.ones(5, 300), torch.full((100,), 4)
    for _ in range(20):
        assert remade(aten.embedding.default, table, ids).shape == (100, 300)
        assert remade(aten.gather.default, table, 1, torch.zeros(5, 7, dtype=torch.int64)).shape == (5, 7)


def test_what_text_cannot_stand_for_is_left_out() -> None:
    assert text_of(aten.add.Tensor, (torch.ones(2), object()), {}) == ""


def test_every_call_of_a_step_can_be_made_again() -> None:
    with FakeTensorMode(), Work() as work:
        weights = [torch.zeros(size, requires_grad=True) for size in ((50, 16), (16, 16), (50, 16))]
        embedding, layer, head = weights
        ids = torch.zeros(2, 12, dtype=torch.int64)
        x = F.embedding(ids, embedding) @ layer
        x = F.layer_norm(
            F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], is_causal=True)[:, 0], (16,)
        )
        F.cross_entropy((x @ head.T).flatten(0, 1), ids.flatten(), ignore_index=-100).backward()
        torch.optim.AdamW(weights, foreach=False).step()
        counted = work.taken()
    assert len(counted) > 30 and all(each.call for each in counted)
    names = {json.loads(each.call)[0] for each in counted}
    assert {"aten.embedding_dense_backward.default", "aten._log_softmax.default"} <= names
    for each in counted:
        ready(each.call, "cpu")()


def test_a_call_that_torch_refuses_raises() -> None:
    text = text_of(aten.mm.default, (torch.ones(2, 3), torch.ones(4, 5)), {})
    with pytest.raises(RuntimeError):
        ready(text, "cpu")()
