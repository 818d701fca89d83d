"""Runs public programs, unedited: `python tests/legacy/public_programs.py MODE NAME FOLDER OUT`.

FOLDER has the program's sources, as it was published. MODE old records with jax 0.4.13, legacy runs after install(),
and alone runs a tree that `--migrate` has rewritten. OUT is a JSON list with the values of each array.
"""

import json
import sys
from pathlib import Path
from unittest import mock

import jax
import numpy as np

jax.config.update("jax_enable_x64", True)  # float32 would let an adaptive step amplify its roundings


def diffrax():
    """diffrax 0.1.1: an adaptive solve, and the gradient of one with constant steps."""
    import diffrax
    import jax.numpy as jnp

    def pendulum(t, y, args):
        length, damping = args
        return {"angle": y["speed"], "speed": -damping * y["speed"] - jnp.sin(y["angle"]) / length}

    def solve(y0, args, solver, **options):
        saved = diffrax.SaveAt(ts=jnp.linspace(0.0, 1.0, 5))
        term = diffrax.ODETerm(pendulum)
        return diffrax.diffeqsolve(term, solver, 0.0, 1.0, 0.05, y0, args, saveat=saved, **options)

    def loss(y0, args):
        return sum(jnp.sum(y**2) for y in jax.tree_util.tree_leaves(solve(y0, args, diffrax.Heun()).ys))

    y0, args = {"angle": jnp.array([1.0, 0.5]), "speed": jnp.array([0.0, -0.2])}, (1.3, 0.2)
    adaptive = diffrax.PIDController(rtol=1e-4, atol=1e-6)
    solution = solve(y0, args, diffrax.Tsit5(), stepsize_controller=adaptive)
    return solution.ys, solution.stats, jax.grad(loss, argnums=(0, 1))(y0, args)


def brax():
    """brax 0.9.0: three steps of a pendulum."""
    import jax.numpy as jnp
    from brax import envs

    environment = envs.get_environment("inverted_pendulum", backend="spring")
    step = jax.jit(environment.step)
    state, states = environment.reset(jax.random.PRNGKey(0)), []
    for _ in range(3):
        state = step(state, 0.3 * jnp.ones(environment.action_size))
        states.append((state.obs, state.reward, state.done, state.pipeline_state.x, state.pipeline_state.xd))
    return states


def easy_neural_ode():
    """jacobjinkelly/easy-neural-ode: solvers on a pendulum, with gradients; built on jax.linear_util."""
    import jax.numpy as jnp
    from lib import ode

    def pendulum(y, t, damping, gravity):
        return {"angle": y["speed"], "speed": -damping * y["speed"] - gravity * jnp.sin(y["angle"])}

    def decay(y, t):
        return -0.5 * y * t

    def loss(y0, damping, gravity):
        found = ode.odeint(pendulum, y0, times, damping, gravity)[0]
        return sum(jnp.sum(y**2) for y in jax.tree_util.tree_leaves(found))

    y0, times = {"angle": jnp.array([1.0, 0.5]), "speed": jnp.array([0.0, -0.2])}, jnp.linspace(0.0, 1.0, 5)
    results = [ode.odeint(pendulum, y0, times, 0.3, 9.8)[0], jax.grad(loss, argnums=(0, 1, 2))(y0, 0.3, 9.8)]
    results.append(ode.odeint_grid(pendulum, y0, times, 0.3, 9.8, step_size=0.05))
    for name in ("_heun_odeint", "_bosh_odeint", "_dopri5_odeint"):
        results.append(getattr(ode, name)(decay, 1e-6, 1e-6, 1000.0, jnp.array([1.0, 2.0, -1.0]), times))
    return results


def sparse_mixers():
    """google-research/sparse_mixers: its own core utilities, on PmapSharding."""
    import jax.numpy as jnp
    from sparse_mixers import core_utils

    tree = {"a": {"expert_w": jnp.arange(16.0).reshape(8, 2), "w": jnp.ones(3)}, "b": {"expert_b": jnp.arange(8)}}
    sharded = core_utils.tree_shard_by_name(tree, core_utils.match_fn(r".*expert_.*"))
    replicated = core_utils.tree_replicate_by_name(tree, lambda name: "expert" not in name)
    weights, shared = sharded["a"]["expert_w"], replicated["a"]["w"]
    total = jax.pmap(lambda w, r: (jax.lax.psum(w.sum() + r.sum(), "i"), w * 2), axis_name="i")(weights, shared)
    return (
        sharded,
        replicated,
        total,
        core_utils.tree_unreplicate_by_name(replicated, lambda name: "expert" not in name),
    )


def in_float64(tree):
    return jax.tree_util.tree_map(lambda x: x.astype("float64") if x.dtype == "float32" else x, tree)


def waves(*shape):
    """Returns numbers between -1 and 1 that no release draws otherwise."""
    return np.sin(1.0 + np.arange(np.prod(shape))).reshape(shape)


def as_waves(tree):
    """Returns a tree of the same shapes in float64: the roundings of drawn parameters would grow."""
    return jax.tree_util.tree_map(lambda x: waves(*x.shape) / 2, tree)


def progen():
    """lucidrains/progen: three steps over 8 devices and a sample."""
    import haiku
    import optax
    from progen_transformer import ProGen
    from progen_transformer.utils import get_loss_fn, sample

    sizes = {"num_tokens": 11, "dim": 8, "seq_len": 8, "depth": 2, "window_size": 4, "heads": 2, "dim_head": 4}
    model = ProGen(**sizes, global_mlp_depth=1)
    loss_and_gradients = get_loss_fn(model, data_parallel=True)
    tokens = np.arange(1, 109).reshape(12, 9) * 7 % 11
    params = in_float64(model.init(jax.random.PRNGKey(0), tokens[0, :8]))
    decayed = lambda tree: jax.tree_util.tree_map(lambda x: x.ndim > 1, tree)  # noqa: E731
    optimizer = optax.chain(
        optax.clip_by_global_norm(0.5), optax.adamw(1e-2, weight_decay=0.1, mask=decayed), optax.apply_every(2)
    )
    state, results = optimizer.init(params), []
    for _ in range(3):
        loss, gradients = loss_and_gradients(params, jax.random.PRNGKey(1), tokens)
        results += [loss, gradients]
        updates, state = optimizer.update(gradients, state, params)
        params = optax.apply_updates(params, updates)
    drawn = sample(haiku.PRNGSequence(2), jax.jit(model.apply), params, tokens[0, :3], 8, top_k=4)
    return results, params, drawn


def vietTTS():
    """NTT123/vietTTS: three steps of a small acoustic model over 8 devices, as its TPU trainer takes them."""
    import haiku
    import jax.numpy as jnp
    import optax
    from vietTTS.nat.config import FLAGS, AcousticInput
    from vietTTS.nat.model import AcousticModel

    FLAGS.vocab_size, FLAGS.mel_dim, FLAGS.postnet_dim = 11, 3, 4
    FLAGS.acoustic_encoder_dim = FLAGS.acoustic_decoder_dim = 4
    model = haiku.transform_with_state(lambda inputs: AcousticModel()(inputs))
    phonemes, durations = np.arange(8 * 2 * 5).reshape(8, 2, 5) * 7 % 11, 1.0 + waves(8, 2, 5) ** 2
    inputs = AcousticInput(phonemes, np.full((8, 2), 4), durations, None, None, waves(8, 2, 6, 3))
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2, weight_decay=1e-4))

    def loss(params, aux, key, inputs):
        (first, second), aux = model.apply(params, aux, key, inputs)
        return jnp.mean((first - inputs.mels) ** 2 + jnp.abs(second - inputs.mels)), aux

    def step(params, aux, key, state, inputs):
        key, new_key = jax.random.split(key)
        (value, aux), gradients = jax.value_and_grad(loss, has_aux=True)(params, aux, key, inputs)
        gradients = jax.lax.pmean(gradients, "i")
        updates, state = optimizer.update(gradients, state, params)
        return (optax.apply_updates(params, updates), aux, new_key, state), (value, gradients)

    key = jax.random.PRNGKey(42)
    params, aux = in_float64(model.init(key, jax.tree_util.tree_map(lambda x: x[0], inputs)))
    start = (params, aux, key, optimizer.init(params))
    state, results = jax.tree_util.tree_map(lambda x: np.stack([x] * 8), start), []
    for _ in range(3):
        state, (values, gradients) = jax.pmap(step, axis_name="i")(*state, inputs)
        results += [values, jax.tree_util.tree_map(lambda x: x[0], gradients)]
    return results, jax.tree_util.tree_map(lambda x: x[0], state[:2])


def replace_packages(*names, **members):
    """Gives a tree empty packages instead of some that its computations do not need."""
    sys.modules.update({name: mock.MagicMock(**members) for name in names})


def objax():
    """google/objax: three steps of a convolutional net with batch norm, by Adam over 8 devices."""
    import jax.numpy as jnp

    sys.modules["tensorflow"] = None  # it does without
    writers = ("compat", "compat.proto", "summary", "summary.writer", "summary.writer.event_file_writer", "util")
    replace_packages("tensorboard", *(f"tensorboard.{name}" for name in (*writers, "util.tensor_util")))
    import objax

    generator = objax.random.Generator(0)
    draw = lambda shape: objax.random.normal(shape, stddev=0.3, generator=generator)  # noqa: E731
    layers = [objax.nn.Conv2D(2, 4, 3, w_init=draw), objax.nn.BatchNorm2D(4), objax.functional.leaky_relu]
    layers += [objax.functional.average_pool_2d, lambda x: x.mean((2, 3)), objax.nn.Linear(4, 3, w_init=draw)]
    net = objax.nn.Sequential(layers)
    variables = net.vars()
    for variable in variables:
        variable.assign(variable.value.astype(jnp.float64))
    optimizer = objax.optimizer.Adam(variables)

    @objax.Function.with_vars(variables)
    def loss(x, labels):
        return objax.functional.loss.cross_entropy_logits_sparse(net(x, training=True), labels).mean()

    gradients_and_values = objax.GradValues(loss, variables)

    @objax.Function.with_vars(variables + optimizer.vars() + generator.vars())
    def step(x, labels):
        gradients, (value,) = gradients_and_values(x, labels)
        gradients = objax.functional.parallel.pmean(gradients)
        optimizer(1e-2, gradients)
        return objax.functional.parallel.pmean(value), gradients

    images, labels = waves(16, 2, 4, 4), np.arange(16) * 5 % 3
    train, results = objax.Parallel(step, reduce=lambda x: x[0]), []
    with (variables + optimizer.vars() + generator.vars()).replicate():
        results += [train(images, labels) for _ in range(3)]
    evaluate = objax.Parallel(lambda x: net(x, training=False), vc=variables)
    with variables.replicate():
        results.append(evaluate(images))
    return results, [variable.value for variable in variables]


def swarm_jax():
    """kingoflolz/swarm-jax: three steps of its reversible layers over 8 devices, without ray."""
    import random

    import optax

    jax.config.update("jax_enable_x64", False)  # its layers are made in float32 alone
    plain = lambda **_: lambda decorated: decorated  # noqa: E731
    replace_packages("ray", remote=plain, method=plain)
    from swarm_jax.embedding_layer import EmbeddingLayer, ProjLayer
    from swarm_jax.model import DenseBlock, MultiHeadAttentionFixed
    from swarm_jax.reversible_layer import ReversibleLayer
    from swarm_jax.swarm_layer import NetworkPrecision, dequantize, quantize

    def blocks(i):
        return MultiHeadAttentionFixed(2, 4, 1.0, name=f"attn{i}", model_size=8), DenseBlock(1.0, 2, name=f"dense{i}")

    random.seed(0)
    optimizer = optax.chain(optax.clip_by_global_norm(0.25), optax.adam(1e-2, eps=1e-5))
    precision = NetworkPrecision("float32", "float32", "float32")
    tokens = (np.arange(8 * 2 * 5).reshape(8, 2, 5) * 7 % 11).astype(np.uint32)
    observed, target = tokens[..., :-1], tokens[..., 1:]
    embedding = EmbeddingLayer(observed, 11, 16, optimizer, precision)
    hidden = quantize(embedding.embed_fwd(observed, embedding.state["params"]), "float32")
    middle = [ReversibleLayer(blocks, i, hidden, optimizer, precision) for i in range(2)]
    last = ProjLayer(hidden, 11, 16, optimizer, 1.0, precision)
    layers = [embedding, *middle, last]
    results = [layer.get_params() for layer in layers]
    jax.config.update("jax_enable_x64", True)
    for layer in layers:
        params = as_waves(jax.tree_util.tree_map(lambda x: x[0], layer.get_params()))
        params = jax.pmap(lambda x: x)(jax.tree_util.tree_map(lambda x: np.stack([x] * 8), params))
        layer.state = in_float64(layer.state) | {"params": params}
    for _ in range(3):
        x = embedding.embed_fwd(observed, embedding.state["params"])
        for layer in middle:
            x = layer.forward(x, layer.state["params"])
        x, dy, loss, last.state["grad_acc"] = last.debed_grad(x, target, last.state["grad_acc"], last.state["params"])
        for layer in reversed(middle):
            (x, dy), layer.state["grad_acc"] = layer.reverse((x, dy), layer.state["grad_acc"], layer.state["params"])
        state = embedding.state
        _, _, state["grad_acc"] = embedding.embed_grad(observed, (x, dy), state["grad_acc"], state["params"])
        results += [loss, [layer.get_accum() for layer in layers]]
        for layer in layers:
            layer.opt()
    rounded = [dequantize(quantize(dy, name), "float32") for name in ("uint8", "uint16", "float16")]
    return results, rounded, [layer.get_params() for layer in layers]


def nucleotide():
    """instadeepai/nucleotide-transformer of July 2023: steps of a masked loss over 8 devices, and what it returns."""
    import haiku
    import optax
    from nucleotide_transformer.model import NucleotideTransformerConfig, build_nucleotide_transformer_fn

    sizes = {"attention_heads": 2, "embed_dim": 8, "ffn_embed_dim": 8, "num_layers": 2, "max_positions": 6}
    saved = {"embeddings_layers_to_save": (1, 2), "attention_maps_to_save": ((1, 0), (2, 0))}
    chosen = {"token_dropout": True, "use_gradient_checkpointing": True, "emb_layer_norm_before": True}
    config = NucleotideTransformerConfig(11, 1, 2, **sizes, **saved, **chosen)
    model = haiku.transform(build_nucleotide_transformer_fn(config))
    tokens = (np.arange(8 * 2 * 6) * 7 % 11).reshape(8, 2, 6)
    drawn = model.init(jax.random.PRNGKey(0), tokens[0])
    params, optimizer = as_waves(drawn), optax.adamw(1e-2)

    def loss(params, key, tokens):
        logits = model.apply(params, key, tokens)["logits"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens).mean()

    def step(params, state, key, tokens):
        value, gradients = jax.value_and_grad(loss)(params, key, tokens)
        gradients = jax.lax.pmean(gradients, "batch")
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value, gradients

    params, state = jax.tree_util.tree_map(lambda x: np.stack([x] * 8), (params, optimizer.init(params)))
    results = [drawn]
    for i in range(3):
        keys = jax.random.split(jax.random.PRNGKey(i), 8)
        params, state, values, gradients = jax.pmap(step, axis_name="batch")(params, state, keys, tokens)
        results += [values, jax.tree_util.tree_map(lambda x: x[0], gradients)]
    outputs = jax.pmap(lambda *inputs: model.apply(*inputs))(params, keys, tokens)
    return results, jax.tree_util.tree_map(lambda x: x[0], params), outputs


PROGRAMS = {
    program.__name__: program
    for program in (
        diffrax,
        brax,
        easy_neural_ode,
        sparse_mixers,
        progen,
        vietTTS,
        objax,
        swarm_jax,
        nucleotide,
    )
}


def put_older_names_back() -> None:
    """Gives jax 0.4.13 the names that it had lost itself."""
    jax.ShapedArray = jax.core.ShapedArray
    jax.tree_multimap = jax.tree_util.tree_map
    jax.ops.index = np.s_

    def index_update(x, index, y):
        return jax.numpy.asarray(x).at[index].set(y)

    def index_add(x, index, y):
        return jax.numpy.asarray(x).at[index].add(y)

    jax.ops.index_update, jax.ops.index_add = index_update, index_add
    jax.config.update("jax_threefry_partitionable", False)


def recorded(array):
    """Returns the values of a small array, and eight products of a large one with fixed waves.

    Less than 1e-9 is what roundings leave of a zero, such as the gradient of a bias before a batch norm.
    """
    values = np.ravel(array)
    if values.size > 32:
        angles = np.outer(1.0 + np.arange(8), 1.0 + np.arange(values.size))
        values = np.cos(np.sqrt(2) * angles) @ values
    return np.where(abs(values) < 1e-9, 0, values).tolist()


def main(mode: str, name: str, folder: str, out: str) -> None:
    sys.path.insert(0, folder)
    if mode == "old":
        put_older_names_back()
    elif mode == "legacy":
        sys.path.append(str(Path(__file__).parents[2]))
        import shardformer.legacy

        shardformer.legacy.install(legacy_random=True)
    else:
        jax.config.update("jax_threefry_partitionable", False)
    leaves = jax.tree_util.tree_leaves(PROGRAMS[name]())
    if mode == "alone":
        assert "shardformer" not in sys.modules
    arrays = [[float(f"{value:.12g}") for value in recorded(leaf)] for leaf in leaves]
    Path(out).write_text(json.dumps(arrays))


if __name__ == "__main__":
    main(*sys.argv[1:])
