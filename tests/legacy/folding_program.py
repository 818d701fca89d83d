"""A small model written as the forks of AlphaFold 2 are, and two ways to design a sequence with it.

It uses removed names that EvoBind and af_backprop use: `jax.tree_map`, `jax.tree_multimap`, `jax.util.wraps`,
`jnp.clip(a_min=)`, `np.object` and `jax.experimental.optimizers`. Keys are a pytree node. `hk.scan` stacks the blocks
with a custom creator and getter, and runs attention in chunks. `hk.while_loop` recycles, `hk.remat` recomputes.

To record with jax 0.4.13 and dm-haiku 0.0.10: `python tests/legacy/folding_program.py goldens/folding_0.4.13.npz`.
"""

import sys
import zlib
from pathlib import Path

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np

RESIDUES, SEQUENCES, PAIR, CHANNELS, HEADS, KINDS, BINS = 5, 3, 4, 6, 2, 20, 4


class SafeKey:
    """A random key that can be used once."""

    def __init__(self, key):
        self._key, self._used = key, False

    def get(self):
        assert not self._used, "the key was used before"
        self._used = True
        return self._key

    def split(self, count=2):
        return jax.tree_map(SafeKey, tuple(jax.random.split(self.get(), count)))


jax.tree_util.register_pytree_node(SafeKey, lambda key: ((key._key,), key._used), lambda used, keys: SafeKey(keys[0]))


def linear(x, size, name):
    return hk.Linear(size, w_init=hk.initializers.VarianceScaling(2.0), name=name)(x)


def norm(x, name):
    return hk.LayerNorm(axis=-1, create_scale=True, create_offset=True, name=name)(x)


def in_chunks(function, size):
    """Maps `function` over chunks of the first axis by hk.scan, and writes each result into one buffer."""

    @jax.util.wraps(function)
    def mapped(*args):
        leaves, tree = jax.tree_flatten(args)
        count = leaves[0].shape[0] // size
        chunks = jax.tree_unflatten(tree, [leaf.reshape(count, size, *leaf.shape[1:]) for leaf in leaves])
        first = jax.tree_map(lambda leaf: leaf[0], chunks)
        shapes = hk.eval_shape(function, *first)
        buffer = jax.tree_map(lambda s: jnp.zeros((count * size, *s.shape[1:]), s.dtype), shapes)

        def write(outputs, number_and_chunk):
            number, chunk = number_and_chunk
            start = number * size
            found = function(*chunk)
            updated = jax.tree_multimap(
                lambda old, new: jax.lax.dynamic_update_slice_in_dim(old, new, start, 0), outputs, found
            )
            return updated, ()

        if hk.running_init():
            function(*first)
        return hk.scan(write, buffer, (jnp.arange(count), chunks))[0]

    return mapped


class RowAttention(hk.Module):
    """Gated attention along each row, with a bias of the pairs."""

    def __call__(self, rows, pairs):
        init = hk.initializers.VarianceScaling(1.0)
        pair_weights = hk.get_parameter("feat_2d_weights", (PAIR, HEADS), init=init)
        pairs = hk.LayerNorm(-1, True, False, name="pair_norm")(pairs)  # an offset would shift all logits of a row
        bias = jnp.einsum("ijc,ch->hij", pairs, pair_weights)
        shape = (CHANNELS, HEADS, CHANNELS // HEADS)
        query, key, value = (hk.get_parameter(f"{part}_w", shape, init=init) for part in ("query", "key", "value"))
        gate = hk.get_parameter("gating_b", shape[1:], init=jnp.ones)
        query_norm, output = hk.LayerNorm(-1, True, True, name="query_norm"), hk.Linear(CHANNELS, name="output")

        def attend(x):
            x = query_norm(x)
            q, k, v = (jnp.einsum("sic,chd->sihd", x, weights) for weights in (query, key, value))
            logits = jnp.einsum("sihd,sjhd->shij", q * (CHANNELS // HEADS) ** -0.5, k) + bias
            mixed = jnp.einsum("shij,sjhd->sihd", jax.nn.softmax(logits), v) * jax.nn.sigmoid(gate)
            return output(mixed.reshape(x.shape))

        return in_chunks(attend, 1)(rows)


class Block(hk.Module):
    """A step of the MSA's and the pairs' representations."""

    def __call__(self, activations, key):
        rows, pairs = activations["msa"], activations["pair"]
        keep_key, _ = key.split()
        keep = jax.random.bernoulli(keep_key.get(), 0.8, (1, *rows.shape[1:]))
        rows = rows + keep * RowAttention()(rows, pairs) / 0.8
        rows = rows + linear(jax.nn.relu(linear(norm(rows, "transition_norm"), 8, "up")), CHANNELS, "down")
        left, right = (linear(rows, 3, f"outer_{side}") for side in ("left", "right"))
        outer = jnp.einsum("sia,sjb->ijab", left, right) / rows.shape[0]
        pairs = pairs + linear(outer.reshape(*pairs.shape[:2], -1), PAIR, "outer")
        edges = norm(pairs, "triangle_norm")
        triangle = jnp.einsum("ikc,jkc->ijc", linear(edges, PAIR, "a"), jax.nn.sigmoid(linear(edges, PAIR, "b")))
        return {"msa": rows, "pair": pairs + linear(norm(triangle, "center_norm"), PAIR, "triangle")}


def stack(block, count, activations, key):
    """Runs `count` blocks by hk.scan: a creator stacks the weights, and a getter reads one block's."""

    def create(next_creator, shape, dtype, init, context):
        def init_each(shape, dtype):
            return jnp.stack([init(shape[1:], dtype) for _ in range(count)])

        return next_creator((count, *shape), dtype, init_each)

    stacked: dict = {}

    def collect(next_getter, value, context):
        stacked[context.full_name] = next_getter(value)
        return stacked[context.full_name][0]

    with hk.experimental.custom_creator(create), hk.experimental.custom_getter(collect):
        first = block(activations, key.split()[0])
    if hk.running_init():
        return first
    random = hk.maybe_next_rng_key()

    def step(carry, weights):
        activations, random = carry
        here, random = jax.random.split(random)

        def read(next_getter, value, context):
            return weights[context.full_name]

        with hk.experimental.custom_getter(read), hk.with_rng(here):
            return (hk.remat(lambda x: block(x, SafeKey(hk.next_rng_key())))(activations), random), ()

    (activations, _), _ = hk.scan(step, (activations, random), dict(stacked))
    return activations


def to_rotation(quaternion):
    """Returns the rotation of 1 + a i + b j + c k."""
    a, b, c = jnp.moveaxis(quaternion, -1, 0)
    size = jnp.sqrt(1 + a * a + b * b + c * c)
    w, a, b, c = 1 / size, a / size, b / size, c / size
    rows = [
        [w * w + a * a - b * b - c * c, 2 * (a * b - w * c), 2 * (a * c + w * b)],
        [2 * (a * b + w * c), w * w - a * a + b * b - c * c, 2 * (b * c - w * a)],
        [2 * (a * c - w * b), 2 * (b * c + w * a), w * w - a * a - b * b + c * c],
    ]
    return jnp.stack([jnp.stack(row, -1) for row in rows], -2)


class Iteration(hk.Module):
    """Folds once, from the pairs and the positions of the iteration before."""

    def __call__(self, features, previous):
        rows = linear(features["msa"], CHANNELS, "msa") + linear(features["target"], CHANNELS, "target")
        distances = jnp.sum(jnp.square(previous["positions"][:, None] - previous["positions"]), -1, keepdims=True)
        bins = jnp.clip(distances * jnp.ones(BINS), a_min=0.5, a_max=1 + jnp.arange(BINS))
        pairs = linear(bins, PAIR, "distances") + norm(previous["pair"], "previous_norm")
        found = stack(Block(), 2, {"msa": rows, "pair": pairs}, SafeKey(hk.next_rng_key()))
        single = linear(norm(found["msa"][0], "single_norm"), CHANNELS, "single")
        rotation = to_rotation(linear(single, 3, "quaternion"))
        rotation = jax.lax.stop_gradient(rotation) * 0.5 + rotation * 0.5
        positions = jnp.einsum("iab,ib->ia", rotation, jax.nn.tanh(linear(single, 3, "local")))
        positions = positions + linear(single, 3, "shift")
        return {"pair": found["pair"], "positions": positions, "lddt": linear(single, BINS, "lddt")}


class Folder(hk.Module):
    """Recycles the pairs and the positions without a gradient, then folds once more."""

    def __call__(self, features, recycles=2):
        fold = Iteration()
        start = {"pair": jnp.zeros((RESIDUES, RESIDUES, PAIR)), "positions": jnp.zeros((RESIDUES, 3))}

        def body(carry):
            number, previous = carry
            found = fold(features, previous)
            return number + 1, jax.tree_map(jax.lax.stop_gradient, {name: found[name] for name in previous})

        if hk.running_init():
            _, previous = body((0, start))
        else:
            _, previous = hk.while_loop(lambda carry: carry[0] < recycles, body, (0, start))
        return fold(features, previous)


def draw_weights(shapes):
    """Returns weights that depend on their names and shapes only."""

    def draw(module, name, leaf):
        random = np.random.RandomState(zlib.crc32(f"{module}/{name}".encode()))
        return jnp.asarray((name == "scale") + 0.4 * random.normal(size=leaf.shape).astype(np.float32))

    shapes = hk.data_structures.to_mutable_dict(shapes)
    return {module: {name: draw(module, name, leaf) for name, leaf in own.items()} for module, own in shapes.items()}


def run():
    model, key = hk.transform(lambda features: Folder()(features)), jax.random.PRNGKey(4)
    random = np.random.RandomState(0)
    msa = random.uniform(size=(SEQUENCES, RESIDUES, 7)).astype(np.float32)
    sequence = np.array([random.randint(KINDS) for _ in range(RESIDUES)], dtype=np.object).astype(np.int32)

    def features(one_hot):
        return {"msa": jnp.asarray(msa), "target": one_hot}

    def loss(weights, one_hot, key):
        found = model.apply(weights, key, features(one_hot))
        confidence = jnp.mean(jax.nn.softmax(found["lddt"]) @ jnp.arange(BINS, dtype=jnp.float32))
        spread = jnp.mean(jnp.square(found["positions"]))
        return spread - confidence + jnp.mean(jnp.sin(found["pair"])), found

    eye = np.eye(KINDS, dtype=np.float32)
    weights = draw_weights(jax.eval_shape(model.init, key, features(eye[sequence])))
    evaluate = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))
    (value, found), gradients = evaluate(weights, eye[sequence], key)
    result = {"loss": value, **found}
    for path, leaf in sorted(flatten(gradients[0]).items()):
        result[f"gradient of {path}"] = leaf
    result["gradient of the sequence"] = gradients[1]
    result["mutations"] = mutate(lambda kinds: evaluate(weights, eye[kinds], key)[0][0], sequence)
    result["descent"] = descend(lambda one_hot: evaluate(weights, one_hot, key)[1][1])
    return {name: np.asarray(array) for name, array in result.items()}


def flatten(weights):
    return {f"{module}/{name}": leaf for module, own in weights.items() for name, leaf in own.items()}


def mutate(loss, sequence, steps=4):
    """EvoBind's design: a random residue changes, and the better sequence stays."""
    random, best, losses = np.random.RandomState(1), loss(sequence), []
    for _ in range(steps):
        changed = sequence.copy()
        changed[random.randint(RESIDUES)] = random.randint(KINDS)
        new = loss(changed)
        if new < best:
            sequence, best = changed, new
        losses.append([new, best, *sequence])
    return np.array(losses, np.float32)


def descend(gradient, steps=4):
    """af_backprop's design: Adam on logits, whose one-hot maximum the model sees."""
    from jax.experimental import optimizers

    init, update, read = optimizers.adam(0.1)
    state = init(jnp.asarray(np.random.RandomState(2).normal(size=(RESIDUES, KINDS)).astype(np.float32)))

    def hard(logits):
        soft = jax.nn.softmax(logits)
        return jax.lax.stop_gradient(jax.nn.one_hot(jnp.argmax(soft, -1), KINDS) - soft) + soft

    for step in range(steps):
        one_hot, back = jax.vjp(hard, read(state))
        state = update(step, back(gradient(one_hot))[0], state)
    return read(state)


def main(out):
    """Records, with the names that jax 0.4.13 and NumPy had lost by then."""
    from jax.example_libraries import optimizers

    jax.tree_multimap, np.object, jax.experimental.optimizers = jax.tree_util.tree_map, object, optimizers
    np.savez_compressed(Path(__file__).parent / out, **run())


if __name__ == "__main__":
    main(sys.argv[1])
