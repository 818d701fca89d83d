"""The native trainer's step, written a second time as GPT-J would have: under xmap, with f and g by custom_vjp."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from shardformer import legacy, optim
from tests import asserts, shared

SHARDS, STEPS = 2, 3
SPLIT = "mp"


# What each shard does ------------------------------------------------------------------------------------------------


@jax.custom_vjp
def f_psum(x):
    return x


@jax.custom_vjp
def g_psum(x):
    return jax.lax.psum(x, "shard")


f_psum.defvjp(lambda x: (x, None), lambda _, dy: (jax.lax.psum(dy, "shard"),))
g_psum.defvjp(lambda x: (jax.lax.psum(x, "shard"), None), lambda _, dy: (dy,))


def norm(p, x_TD):
    x_TD = x_TD - x_TD.mean(-1, keepdims=True)
    return x_TD / jnp.sqrt((x_TD**2).mean(-1, keepdims=True) + 1e-5) * p["scale"][None] + p["offset"][None]


def rotated(x_ThK):
    T, _, K = x_ThK.shape
    angle = np.arange(T)[:, None] / 10000.0 ** (np.arange(0, K, 2) / K)
    cos, sin = (f(angle).astype(np.float32)[:, None] for f in (np.cos, np.sin))
    even, odd = x_ThK[..., ::2], x_ThK[..., 1::2]
    return jnp.stack([even * cos - odd * sin, odd * cos + even * sin], -1).reshape(x_ThK.shape)


def layer(p, p_norm, x_TD, head_size, enter):
    h_TD = enter(norm(p_norm, x_TD))
    q, k, v = ((h_TD @ p[name]).reshape(len(h_TD), -1, head_size) for name in "qkv")
    logits = jnp.einsum("thk,shk->hts", rotated(q), rotated(k)) / np.float32(np.sqrt(head_size))
    causal = np.tril(np.ones(logits.shape[1:], bool))[None]
    attended = jnp.einsum("hts,shk->thk", jax.nn.softmax(jnp.where(causal, logits, -1e10)), v)
    hidden = jax.nn.gelu(h_TD @ p["up"] + p["up_bias"][None])
    return x_TD + g_psum(attended.reshape(len(h_TD), -1) @ p["o"] + hidden @ p["down"]) + p["down_bias"][None]


def token_losses(config, params, tokens_T, targets_T, enter):
    table_vD = params["transformer/embed"]["tokens"]
    start = jax.lax.axis_index("shard") * len(table_vD)
    x_TD = g_psum(jax.nn.one_hot(tokens_T - start, len(table_vD)) @ table_vD)
    layers, norms = params["transformer/layers"], params["transformer/layers/norm"]
    for i in range(config.model.layers):
        x_TD = layer(*({n: w[i] for n, w in p.items()} for p in (layers, norms)), x_TD, config.model.head_size, enter)
    head = params["transformer/head"]
    logits_Tv = enter(norm(params["transformer/head/norm"], x_TD)) @ head["w"] + head["bias"][None]
    column = start + np.arange(logits_Tv.shape[1])
    logits_Tv = jnp.where((column < config.model.vocab)[None], logits_Tv, -1e10)
    highest = jax.lax.pmax(jax.lax.stop_gradient(logits_Tv).max(-1), "shard")
    log_z = highest + jnp.log(g_psum(jnp.exp(logits_Tv - highest[:, None]).sum(-1)))
    return log_z - g_psum((jax.nn.one_hot(targets_T - start, logits_Tv.shape[1]) * logits_Tv).sum(-1))


def clip_by_psum_norm(limit, specs):
    """The norm of the whole model: split leaves summed over the shards, copies counted once."""

    def update(grads, state, params=None):
        def squares(split):
            leaves = zip(jax.tree.leaves(grads), jax.tree.leaves(specs), strict=True)
            return sum(jnp.sum(g**2) for g, spec in leaves if (SPLIT in spec) == split)

        size = jnp.sqrt(jax.lax.psum(squares(True), "shard") + squares(False))
        return jax.tree.map(lambda g: g * jnp.minimum(1, limit / size), grads), state

    return optax.GradientTransformation(lambda _: optax.EmptyState(), update)


# The whole step ------------------------------------------------------------------------------------------------------


def legacy_trainer(config, specs, enter):
    def decayed(params):
        return {m: {n: n in optim.chain.DECAYED for n in leaves} for m, leaves in params.items()}

    rate = optim.learning_rate(config)
    optimizer = optax.chain(
        clip_by_psum_norm(config.optimizer.clip, specs),
        optax.scale_by_adam(config.optimizer.beta1, config.optimizer.beta2),
        optax.add_decayed_weights(config.optimizer.weight_decay, mask=decayed),
        optax.scale_by_schedule(lambda count: -rate(count)),
    )

    def train(state, tokens_T, targets_T):
        def loss_of(params):
            return token_losses(config, params, tokens_T, targets_T, enter).mean()

        loss, grads = jax.value_and_grad(loss_of)(state["params"])
        grads = jax.lax.pmean(grads, "batch")
        updates, opt_state = optimizer.update(grads, state["opt_state"], state["params"])
        return loss, {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}

    step = legacy.xmap(
        train,
        in_axes=(["shard", ...], ["batch", ...], ["batch", ...]),
        out_axes=(["batch", ...], ["shard", ...]),
        axis_resources={"shard": "mp", "batch": "dp"},
        donate_argnums=0,
    )
    return optimizer, step


def split(w, spec):
    """A whole array as GPT-J keeps it: every shard's slice, or its copy, on a leading axis."""
    if SPLIT not in spec:
        return np.stack([w] * SHARDS)
    return np.stack(np.split(w, SHARDS, axis=tuple(spec).index(SPLIT)))


def joined(w, spec):
    return np.concatenate(w, axis=tuple(spec).index(SPLIT)) if SPLIT in spec else w[0]


def native():
    state, losses = shared.initial_state(), []
    for step in range(STEPS):
        state, metrics = shared.trainer().step(state, shared.batch(step), step)
        losses.append(shared.trainer().read_metrics(metrics).loss)
    return losses, shared.on_host(state.params)


def in_legacy_style(enter=f_psum):
    trainer = shared.trainer()
    specs = trainer.model.specs
    optimizer, step = legacy_trainer(trainer.config, specs, enter)
    params = jax.tree.map(split, shared.on_host(shared.initial_state().params), specs)
    init = legacy.xmap(optimizer.init, in_axes=(["shard", ...],), out_axes=["shard", ...])
    state, losses = {"params": params, "opt_state": init(params)}, []
    devices = np.array(jax.devices()).reshape(-1, SHARDS)
    with legacy.mesh(devices, ("dp", "mp")), jax.numpy_dtype_promotion("standard"):
        for i in range(STEPS):
            loss, state = step(state, *shared.batch(i).values())
            losses.append(float(loss.mean()))
    return losses, jax.tree.map(joined, shared.on_host(state["params"]), specs)


@pytest.fixture(scope="module")
def native_run():
    return native()


def test_the_two_worlds_agree(native_run):
    losses, params = in_legacy_style()
    np.testing.assert_allclose(losses, native_run[0], rtol=1e-6)
    print(f"parameters after {STEPS} steps: {asserts.worst_relative(params, native_run[1]):.1e} apart")
    assert asserts.worst_relative(params, native_run[1]) < 1e-5


def test_without_f_they_do_not(native_run):
    losses, params = in_legacy_style(enter=lambda x: x)
    np.testing.assert_allclose(losses[0], native_run[0][0], rtol=1e-6)
    assert asserts.worst_relative(params, native_run[1]) > 1e-3
