"""Records what mesh-transformer-jax's classes and the seed's cells give under jax 0.4.13.

MESH_TRANSFORMER_JAX=<checkout> <python of jax 0.4.13, dm-haiku 0.0.5, optax 0.0.9> tests/convert/record.py

writes goldens/gptj.tar.xz: of tiny models on 1 to 8 shards, the files that its `write_ckpt` wrote and the logits that
its `generate_initial` gave. And goldens/seed/: the two files that the notebook's `save` wrote.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import tarfile
import tempfile
import zlib
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
CHECKOUT = Path(os.environ["MESH_TRANSFORMER_JAX"]).resolve()
sys.path[:0] = [str(HERE.parent / "legacy" / "stubs"), str(HERE.parent / "legacy"), str(CHECKOUT)]
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import old_jax  # noqa: E402

old_jax.put_back()

import haiku as hk  # noqa: E402
import jax  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from jax.experimental import maps  # noqa: E402
from mesh_transformer import transformer_shard, util  # noqa: E402


class Case(NamedTuple):
    pe: str
    shards: int
    trained: bool = False  # one step done, with its optimizer state; else slim and bfloat16
    d_model: int = 32
    n_heads: int = 8

    @property
    def name(self):
        return f"{self.pe}-{self.shards}"


CASES = [
    Case("rotary", 1),
    Case("rotary", 2),
    Case("rotary", 4),
    Case("rotary", 8),
    Case("t5", 4),
    Case("fixed", 2, True, 16, 4),
]
BATCH, SEQ = 1, 24  # T5 counts distances one by one up to 16


def config_of(case):
    """A first step whose rate is 0, as in GPT-J's schedule: the saved moments belong to the saved parameters."""
    optimizer = optax.chain(
        optax.scale(1.0),
        util.clip_by_global_norm(1),
        optax.scale_by_adam(),
        util.additive_weight_decay(0.1),
        optax.scale(-1),
        optax.scale_by_schedule(util.gpt3_schedule(2, 10, 1e-3, 1e-4)),
    )
    sizes = {"d_model": case.d_model, "n_heads": case.n_heads, "pe_rotary_dims": 2}
    rest = {"norm": "layernorm", "pe": case.pe, "cores_per_replica": case.shards, "optimizer": optimizer}
    return {"layers": 2, "n_vocab": 32, "seq": SEQ, **sizes, **rest}


def different_everywhere(tree, path=""):
    """Values of few bits, other ones on every shard: biases and norms too, so that it shows which of them count."""
    if hasattr(tree, "items"):
        return type(tree)({name: different_everywhere(child, f"{path}/{name}") for name, child in tree.items()})
    noise = np.random.RandomState(zlib.crc32(path.encode())).standard_normal(tree.shape)
    small = path.endswith(("/scale", "/offset", "/b"))
    values = np.round(noise * 4) / 4 * (0.25 if small else 2.0 ** np.round(np.log2(1 / np.sqrt(tree.shape[-2]))))
    return np.float32(values + path.endswith("/scale"))


def keep(tree):
    return tree


def record(case, folder):
    config = config_of(case)
    tokens = np.random.RandomState(0).randint(0, config["n_vocab"], (BATCH, SEQ + 1)).astype(np.uint32)
    transformer_shard.to_bf16 = keep
    with maps.Mesh(np.array(jax.devices()[: case.shards]).reshape(1, case.shards), ("dp", "mp")):
        network = transformer_shard.CausalTransformer(config)
        network.state["params"] = different_everywhere(network.state["params"])
        if case.trained:
            network.train({"obs": tokens[None, :, :-1], "target": tokens[None, :, 1:]})
        else:
            del network.state["opt_state"]
            network.state["params"] = util.to_bf16(network.state["params"])
        for shard in range(case.shards):
            network.write_ckpt(f"{folder}/", shard)
        logits = logits_of(config)(util.to_f32(network.state["params"]), tokens)
    np.savez_compressed(folder / "golden.npz", tokens=tokens, logits=np.asarray(logits)[0])
    settings = {name: value for name, value in config.items() if name != "optimizer"}
    (folder / "config.json").write_text(json.dumps(settings))


def logits_of(config):
    """Returns the function from parameters to the logits of all tokens but the last, as `generate` computes them."""

    def logits(params, context):
        def generate():
            shard = transformer_shard.CausalTransformerShard(config)
            return shard.generate_initial(context, np.uint32(len(context)))

        return hk.transform(generate).apply(params, jax.random.PRNGKey(0))[0]

    axes = {"shard": "mp", "batch": "dp"}
    return maps.xmap(logits, (["shard", ...], ["batch", ...]), ["shard", "batch", ...], axis_resources=axes)


def names_of_many_layers():
    """Returns the names of 12 layers in tree order: layer_10 comes before layer_2."""
    config = {**config_of(Case("t5", 1)), "layers": 12}
    context = np.zeros(SEQ, np.uint32)

    def model(context):
        return transformer_shard.CausalTransformerShard(config).loss(context, context)

    def initialise(key):
        return hk.transform(model).init(key, context)

    shapes = jax.eval_shape(jax.vmap(initialise, axis_name="shard"), np.zeros((1, 2), np.uint32))
    order = jax.tree_util.tree_unflatten(
        jax.tree_util.tree_structure(shapes), range(len(jax.tree_util.tree_leaves(shapes)))
    )
    places = {order[module][name]: f"{module}/{name}" for module in order for name in order[module]}
    return json.dumps([places[i] for i in range(len(places))])


def seed(folder):
    """The notebook's cells, with a smaller model than the goldens of the notebook itself have; some leave files."""
    from record_notebook import Notebook, _put_back_what_jax_0_4_13_had_lost

    _put_back_what_jax_0_4_13_had_lost()
    notebook = Notebook()
    notebook.edit("44", "'d_model' : 16", "'d_model' : 8")
    notebook.edit("44", "'n_vocab': 32", "'n_vocab': 8")
    notebook.edit("44", "maxval=32", "maxval=8")
    notebook.edit("40", "save('model', state)", "save(folder, state)")
    notebook.namespace["folder"] = str(folder)
    notebook.run("2", "3", "7", "11", "14", "16", "17", "44", "49", "34", "40", "49")
    np.save(folder / "next_losses.npy", np.asarray(notebook.namespace["loss"]))


def main():
    goldens = HERE / "goldens"
    (goldens / "seed").mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, tarfile.open(goldens / "gptj.tar.xz", "w:xz") as archive:
        for case in CASES:
            Path(folder, case.name).mkdir()
            with contextlib.redirect_stdout(io.StringIO()):
                record(case, Path(folder, case.name))
            print(case.name, flush=True)
        Path(folder, "names_of_12_layers.json").write_text(names_of_many_layers())
        archive.add(folder, ".")
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        os.chdir(folder)
        seed(goldens / "seed")
        os.chdir(HERE)
    for path in sorted(goldens.rglob("*")):
        print(path.relative_to(HERE), path.stat().st_size)


if __name__ == "__main__":
    main()
