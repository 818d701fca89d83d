"""Runs an unedited checkout of mesh-transformer-jax under jax 0.4.13, 0.4.30 or today's, and keeps its numbers.

The goldens were recorded from commit f8315e3, with MESH_TRANSFORMER_JAX set to the checkout:
    <python of jax 0.4.13> tests/legacy/mesh_transformer_driver.py tests/legacy/goldens/mesh_transformer.npz
    <python of jax 0.4.30> tests/legacy/mesh_transformer_driver.py \\
        tests/legacy/goldens/mesh_transformer_generate.npz --parts generate reshard_generate device_sample
jax 0.4.13 rejects the repository's `generate`.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import json
import os
import random
import re
import runpy
import shutil
import sys
import tempfile
import threading
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
CHECKOUT = Path(os.environ["MESH_TRANSFORMER_JAX"]).resolve()
sys.path[:0] = [str(HERE / "stubs"), str(CHECKOUT)]

import jax  # noqa: E402

# Its xmap fails (NameError, RecursionError) where this model's batch is larger than dp. Resources never change values:
# its goldens are those of a mesh whose dp is the batch.
OLDEST = jax.__version__ == "0.4.13"

try:
    import jax.experimental.maps
except ImportError:
    sys.path.insert(2, str(HERE.parents[1]))  # before an installed shardformer, after the checkout's own modules
    if "FUTURE_JAX" in os.environ:
        from tests.legacy import future_jax  # noqa: F401
    import shardformer.layout.mesh
    import shardformer.legacy

    shardformer.layout.mesh.use_cpu_devices(8)
    print(shardformer.legacy.install(legacy_random=True), file=sys.stderr)
else:
    import old_jax

    devices = 16 if OLDEST and __name__ == "__main__" else 8
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + f" --xla_force_host_platform_device_count={devices}"
    old_jax.put_back()

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
import wandb  # noqa: E402
from jax.experimental import maps  # noqa: E402
from mesh_transformer import checkpoint, layers, sampling, train_actor, transformer_shard, util  # noqa: E402

VOCABULARY, SEQ, STEPS, SAMPLES = 128, 32, 3, 32
tree_map, tree_leaves = jax.tree_util.tree_map, jax.tree_util.tree_leaves


class Case(NamedTuple):
    pe: str
    dp: int
    mp: int
    accumulate: int = 1
    per_replica: int = 1
    f32: bool = True

    @property
    def name(self):
        kind = "f32" if self.f32 else "bf16"
        return f"{self.pe}-{self.dp}x{self.mp}-{kind}-{self.accumulate}x{self.per_replica}"

    @property
    def batch(self):
        return self.dp * self.per_replica


V1_CASES = [
    Case("rotary", 4, 2, 1, 1),
    Case("rotary", 2, 4, 2, 2),
    Case("rotary", 1, 8, 3, 1),
    Case("fixed", 4, 2, 2, 1),
    Case("fixed", 2, 4, 1, 2),
    Case("fixed", 1, 8, 1, 1),
    Case("t5", 4, 2, 2, 2),
    Case("t5", 2, 4, 1, 1),
    Case("t5", 1, 8, 2, 2),
    Case("rotary", 4, 2, 2, 2, f32=False),
    Case("fixed", 2, 4, 1, 1, f32=False),
    Case("t5", 1, 8, 2, 1, f32=False),
]
V2_CASES = [Case("rotary", 4, 2, 1, 1), Case("rotary", 2, 4, 2, 2), Case("rotary", 1, 8, 1, 2, f32=False)]


class Float32:
    """jax.numpy for a module that says bfloat16 and shall compute in float32."""

    bfloat16 = jnp.float32

    def __getattr__(self, name):
        return getattr(jnp, name)


def set_precision(f32):
    """Exchanges names that the model's module looks up: its source stays as it is."""
    transformer_shard.to_bf16 = (lambda tree: tree) if f32 else util.to_bf16
    transformer_shard.jnp = Float32() if f32 else jnp


def keep_gradient():
    """An optimizer's first link, whose state is the gradient that it was given."""
    return optax.GradientTransformation(
        lambda params: tree_map(jnp.zeros_like, params), lambda gradient, state, params=None: (gradient, gradient)
    )


def optimizer_of(case, *first, use_psum=True):
    return optax.chain(
        *first,
        optax.scale(1 / case.accumulate),
        util.clip_by_global_norm(1, use_psum=use_psum),
        optax.scale_by_adam(),
        util.additive_weight_decay(0.1),
        optax.scale(-1),
        optax.scale_by_schedule(util.gpt3_schedule(2, 10, 1e-3, 1e-4)),
    )


def config_of(case, use_psum=True, **changes):
    small = {"layers": 2, "d_model": 64, "n_heads": 8, "d_head": 8, "n_vocab": VOCABULARY, "seq": SEQ}
    rest = {"norm": "layernorm", "pe": case.pe, "pe_rotary_dims": 4, "cores_per_replica": case.mp}
    optimizer = optimizer_of(case, keep_gradient(), use_psum=use_psum)
    return {**small, **rest, "optimizer": optimizer, "sampler": sampling.nucleaus_sample, **changes}


def mesh_of(case):
    rows = case.batch if OLDEST else case.dp
    return maps.Mesh(np.array(jax.devices()[: rows * case.mp]).reshape(rows, case.mp), ("dp", "mp"))


def tokens(case, step, *lead, seq=SEQ, vocabulary=VOCABULARY):
    text = np.random.RandomState(step).randint(0, vocabulary, (*lead, case.batch, seq + 1)).astype(np.uint32)
    return {"obs": text[..., :-1], "target": text[..., 1:]}


def same_everywhere(tree, path=""):
    """Parameters of these shapes with the same values under every version, and different ones in every shard."""
    if isinstance(tree, Mapping):
        return type(tree)({name: same_everywhere(child, f"{path}/{name}") for name, child in tree.items()})
    noise = np.random.RandomState(zlib.crc32(path.encode())).standard_normal(tree.shape)
    if path.endswith(("/scale", "/offset", "/b")):
        return np.float32(path.endswith("/scale") + 0.1 * noise)
    return np.float32(noise / np.sqrt(tree.shape[-2]))


def leaves_by_name(tree):
    if not isinstance(tree, Mapping):
        return [np.asarray(tree, np.float64).ravel()]
    return [leaf for name in sorted(tree) for leaf in leaves_by_name(tree[name])]


def summary(name, tree):
    """Per leaf: SAMPLES values spread over all of it, its norm and its largest value."""
    leaves = leaves_by_name(tree)
    return {
        f"{name}/samples": np.float32([leaf[np.linspace(0, leaf.size - 1, SAMPLES).astype(int)] for leaf in leaves]),
        f"{name}/norms": np.float32([np.linalg.norm(leaf) for leaf in leaves]),
        f"{name}/largest": np.float32([np.abs(leaf).max() for leaf in leaves]),
    }


def equal(left, right):
    pairs = tree_map(lambda a, b: a.dtype == b.dtype and np.array_equal(np.asarray(a), np.asarray(b)), left, right)
    return all(tree_leaves(pairs))


def train(network, case, first_step=0, steps=STEPS):
    losses = [network.train(tokens(case, step, case.accumulate)) for step in range(first_step, first_step + steps)]
    return np.float32(losses)


def exercise(network, case, folder):
    """Evaluates, trains, saves, loses and restores a model, and trains on."""
    results = summary("init", network.state["params"])
    network.state["params"] = same_everywhere(network.state["params"])
    results.update({f"eval/{name}": np.asarray(value) for name, value in network.eval(tokens(case, 100)).items()})
    results["train/losses"] = train(network, case, 0, 1)
    results.update(summary("gradient", network.state["opt_state"][0]))
    results["train/losses"] = np.concatenate([results["train/losses"], train(network, case, 1)])
    results.update(summary("trained", network.state["params"]))
    before = tree_map(np.array, network.state)
    for shard in range(case.mp):
        network.write_ckpt(folder, shard)
    train(network, case, 50, 1)
    network.load_ckpt(folder)
    results["restored"] = np.array(all(equal(before[part], network.state[part]) for part in ("params", "opt_state")))
    results["train/restored"] = train(network, case, STEPS + 1, 1)
    return results


def v1(case, folder):
    with mesh_of(case):
        return exercise(transformer_shard.CausalTransformer(config_of(case)), case, folder)


def without_psum(case, _):
    """A mistake that the test must see: the gradients without a psum of their backward pass."""
    kept, layers.f_psum = layers.f_psum, lambda x: x
    try:
        with mesh_of(case):
            network = transformer_shard.CausalTransformer(config_of(case))
            network.state["params"] = same_everywhere(network.state["params"])
            results = {f"eval/{name}": np.asarray(value) for name, value in network.eval(tokens(case, 100)).items()}
            train(network, case, 0, 1)
            return results | summary("gradient", network.state["opt_state"][0])
    finally:
        layers.f_psum = kept


def migrated(case, folder):
    """With the module that makes the xmaps as `legacy --migrate` writes it; the other modules stay as they are."""
    from shardformer.legacy.migration import shard_map_helpers
    from shardformer.legacy.migration.migrate import migrate_file

    migration = migrate_file(Path(transformer_shard.__file__))
    assert (migration.decided, migration.undecided) == (5, [])
    names = {"__name__": "migrated", "__package__": "mesh_transformer"}
    sys.modules["mesh_transformer.shard_map_helpers"] = sys.modules["shard_map_helpers"] = shard_map_helpers
    exec(compile(migration.migrated, transformer_shard.__file__, "exec"), names)
    names |= {"to_bf16": transformer_shard.to_bf16, "jnp": transformer_shard.jnp}
    kept, checkpoint.index_weights = checkpoint.index_weights, without_jax_mesh(checkpoint.index_weights)
    try:
        with mesh_of(case) as mesh, shard_map_helpers.mesh_scope(mesh):
            return exercise(names["CausalTransformer"](config_of(case)), case, folder)
    finally:
        checkpoint.index_weights = kept


def without_jax_mesh(function):
    """`jit(backend=...)` in the repository's checkpoints refuses to run under jax.set_mesh."""

    def call(*arguments):
        with jax.set_mesh(jax.sharding.Mesh(np.empty((), object), ())):
            return function(*arguments)

    return call


def v2(case, folder):
    with mesh_of(case):
        return exercise(transformer_shard.CausalTransformerV2(config_of(case, use_psum=False)), case, folder)


def sample(network, case, **options):
    """Eight tokens and their logits, from contexts of different lengths."""
    random.seed(0)
    lengths = np.linspace(SEQ // 2, SEQ, case.batch).astype(int)
    options = {"top_p": np.full(case.batch, 0.9), "temp": np.full(case.batch, 0.75), **options}
    _, (drawn, _, logits) = network.generate(tokens(case, 200)["obs"], lengths, 8, options, return_logits=True)
    return {"tokens": np.asarray(drawn), "logits": np.asarray(logits)[..., :8]}


def generate(case, folder):
    with mesh_of(case):
        network = transformer_shard.CausalTransformer(config_of(case))
        network.state["params"] = same_everywhere(network.state["params"])
        return sample(network, case, top_k=np.full(case.batch, 20))


def fewer_shards(case, folder, then):
    """As slim_model.py and resharding_example.py do: a checkpoint of `case.mp` shards becomes a model of one."""
    with mesh_of(case):
        network = transformer_shard.CausalTransformer(config_of(case))
        train(network, case)
        before = network.eval(tokens(case, 100))["loss"]
        del network.state["opt_state"]
        network.state = network.move_xmap(network.state, np.zeros(case.dp))
        for shard in range(case.mp):
            network.write_ckpt(folder, shard)
    one = case._replace(dp=1, mp=1, per_replica=case.batch)
    maps.thread_resources.env = maps.ResourceEnv(mesh_of(one))
    network = transformer_shard.CausalTransformer(config_of(one, optimizer=optax.scale(0), early_cast=True))
    network.state = checkpoint.read_ckpt(network.state, folder, case.mp, shards_out=1)
    network.state = jax.device_put(network.state, jax.devices("cpu")[0])
    results = {"before": np.asarray(before), **then(network, one)}
    maps.thread_resources.env = maps.ResourceEnv(maps.Mesh(np.empty((), dtype=object), ()), ())
    return results


def reshard(case, folder):
    return fewer_shards(
        case, folder, lambda network, one: {"after": np.asarray(network.eval(tokens(one, 100))["loss"])}
    )


def reshard_generate(case, folder):
    return fewer_shards(case, folder, sample)


def give_up(error):
    """Without its thread, this one would wait for ever."""
    sys.excepthook(*error[:3])
    os._exit(1)


def actor(case, folder):
    """train_actor.py's thread, which owns the mesh and the model, asked from this one."""
    threading.excepthook = give_up
    runner = train_actor.NetworkRunner(
        mesh_of(case).devices.shape, lambda: transformer_shard.CausalTransformer(config_of(case))
    )
    threading.Thread(target=runner.run, daemon=True).start()
    losses = [runner.train(tokens(case, step, case.accumulate)) for step in range(STEPS)]
    for shard in range(case.mp):
        runner.write_ckpt(folder, shard)
    runner.train(tokens(case, 50, case.accumulate))
    results = {"losses": np.float32(losses), "step": np.asarray(runner.load_ckpt(folder))}
    results["loss"] = np.asarray(runner.eval(tokens(case, 100))["loss"])
    runner.move_params()
    return {**results, "parameters": np.asarray(runner.get_params())}


def script(name, *arguments):
    """Returns the output of an unedited script of the checkout; it may end by exit(), or for lack of input."""
    printed, before = io.StringIO(), (sys.argv, sys.stdin)
    sys.argv, sys.stdin = [name, *arguments], io.StringIO("Once upon\n")
    random.seed(0)
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit, EOFError):
        runpy.run_path(str(CHECKOUT / name), run_name="__main__")
    sys.argv, sys.stdin = before
    return printed.getvalue()


def device_config(case, folder, **changes):
    os.environ["BUCKETS"] = folder
    rest = {"bucket": "bucket", "model_dir": "model", "train_set": "", "val_set": {"val": ""}, "val_batches": 2}
    every = {"val_every": 2, "ckpt_every": 2, "keep_every": 2, "total_steps": 4, "eval_harness_tasks": []}
    rates = {"warmup_steps": 2, "anneal_steps": 10, "lr": 1e-3, "end_lr": 1e-4, "weight_decay": 0.1, "name": "small"}
    accumulate = {
        "gradient_accumulation_steps": case.accumulate,
        "per_replica_batch": case.batch * case.mp // jax.device_count(),
    }
    model = {name: value for name, value in config_of(case).items() if name not in ("optimizer", "sampler")}
    path = Path(folder, "config.json")
    path.write_text(json.dumps({**rest, **every, **rates, **accumulate, **model, **changes}))
    return str(path)


def device_train(case, folder):
    """device_train.py from nothing, on from its checkpoint, and fine-tuned from one; what it logs."""
    results = {}

    def keep(phase, *arguments, **changes):
        script("device_train.py", "--config", device_config(case, folder, **changes), *arguments)
        for name in ["train/loss", "train/last_loss", "train/grad_norm", "train/learning_rate", "val/loss_val"]:
            results[f"{phase}/{name}"] = np.float64([entry[name] for entry in wandb.logged if name in entry])

    keep("fresh")
    keep("resumed", total_steps=6)
    keep("tuned", "--tune-model-path", "gs://bucket/model/step_6/", model_dir="tuned", total_steps=3)
    return results


def device_sample(case, folder):
    """Returns the samples of device_sample.py from the files of device_train.py, and of slim_model.py."""
    config = device_config(case, folder)
    script("device_train.py", "--config", config)
    script("slim_model.py", "--config", config)
    shutil.copy(Path(folder, "bucket", "model", "meta.json"), Path(folder, "bucket", "model_slim"))

    def drawn(model_dir):
        lines = script("device_sample.py", "--config", device_config(case, folder, model_dir=model_dir)).splitlines()
        samples = [line for line in lines if line.startswith("sample ")]
        return np.array([re.findall(r"\d+", line.split(":")[1]) for line in samples]).astype(int)

    return {"tokens": drawn("model"), "slim/tokens": drawn("model_slim")}


PARTS = {
    "v1": (v1, V1_CASES),
    "v2": (v2, V2_CASES),
    "migrated": (migrated, [Case("rotary", 4, 2, 1, 1)]),
    "without_psum": (without_psum, [Case("rotary", 4, 2, 1, 1)]),
    "reshard": (reshard, [Case("rotary", 2, 4), Case("rotary", 1, 8), Case("t5", 1, 8, f32=False)]),
    "device_train": (device_train, [Case("rotary", 4, 2, 2, 2)]),
    "actor": (actor, [Case("rotary", 4, 2, 2, 2)]),
    "generate": (generate, [case for case in V1_CASES if case.pe != "fixed"]),  # with which it never worked
    "reshard_generate": (reshard_generate, [Case("rotary", 1, 8)]),
    "device_sample": (device_sample, [Case("rotary", 2, 4, 2)]),
}
ALL_BUT_GENERATE = ["v1", "v2", "reshard", "device_train", "actor"]


def run(parts, only):
    """Every case of the parts whose name, as part/case, begins with one of `only`."""
    results = {}
    for part in parts:
        function, cases = PARTS[part]
        for case in [case for case in cases if f"{part}/{case.name}".startswith(tuple(only))]:
            set_precision(case.f32)
            with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
                numbers = function(case, f"{folder}/")
            results.update({f"{part}/{case.name}/{name}": value for name, value in numbers.items()})
            print(f"{part}/{case.name}", flush=True)
    return results


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("out", help="the npz to write")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=ALL_BUT_GENERATE)
    parser.add_argument("--only", nargs="+", default=[""], help="beginnings of part/case")
    given = parser.parse_args()
    gc.freeze()  # as tests/conftest.py does: looking for garbage among JAX's objects takes a tenth of the time
    gc.set_threshold(50_000, 20, 50)
    np.savez_compressed(given.out, **run(given.parts, given.only))


if __name__ == "__main__":
    main()
