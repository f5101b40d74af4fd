"""A model of your own, in JAX: `harness run examples/own_jax_model.yaml --plugin examples/own_jax_model.py`."""

from harness import Sizes, hookimpl, of_jax


class MySizes(Sizes):
    width: int = 64


def init(shape, key):
    import jax

    a, b, c = jax.random.split(key, 3)
    layers = {"w": jax.random.normal(a, (shape.layers, shape.width, shape.width)) * shape.width**-0.5}
    embed, head = (jax.random.normal(each, (shape.vocabulary, shape.width)) * 0.02 for each in (b, c))
    return {"embed": embed, "layers": layers, "head": head}


def embed(shape, params, ids):
    return params["embed"][ids]


def block(shape, p, x):
    """Mean of all tokens so far, mixed: anything from [B, T, D] to [B, T, D] will do."""
    import jax.numpy as jnp

    mean = jnp.cumsum(x, axis=1) / jnp.arange(1, x.shape[1] + 1)[:, None].astype(x.dtype)
    return x + jnp.tanh(mean @ p["w"])


def norm(shape, params, x):
    return x / (abs(x).mean(-1, keepdims=True) + 1e-6)


@hookimpl
def harness_workloads():
    return [of_jax("running_means", init, embed, block, norm, MySizes, {"width": 32})]
