"""Runs Grok-1's published code, unedited: `python tests/legacy/grok_driver.py MODE MESH FOLDER OUT [KEEP]`.

FOLDER has xai-org/grok-1. MODE is old (jax 0.4.25 and dm-haiku 0.0.12, to record) or legacy (after install()). MESH is
1x8 or 2x4. OUT is an .npz with the logits of a small model with random weights; on 1x8 also with the text that its
own sampler writes, from a checkpoint of its own format; a stand-in has the place of its tokenizer. KEEP is a new folder
for the checkpoint's files.

Its limits: the experts, 8-bit weights and the sampler need a data axis of size 1, so that 2x4 has dense blocks of plain
weights. Everything is float32: the CPU of jax 0.4.25 cannot multiply bfloat16.
"""

import os
import shutil
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

TOKENS = np.array([[5, 90, 17, 42, 8, 61, 33, 2], [9, 9, 71, 26, 3, 55, 80, 14]])
PROMPT = "The answer to life the universe and everything is of course"


def settings(model, experts):
    transformer = model.TransformerConfig(
        emb_size=64, widening_factor=2, key_size=32, num_q_heads=8, num_kv_heads=8, num_layers=2,
        attn_output_multiplier=0.2, shard_activations=True, num_experts=8 if experts else -1,
        num_selected_experts=2, data_axis="data", model_axis="model",
    )  # fmt: skip
    return model.LanguageModelConfig(
        vocab_size=128 * 1024, pad_token=0, eos_token=2, sequence_len=64, embedding_init_scale=1.0,
        output_multiplier_scale=0.6, embedding_multiplier_scale=8.0, model=transformer,
    )  # fmt: skip


def weight(number, path, shape, mesh, quantized):
    """Returns random values of a parameter; on 1x8 the matrices of layers are 8-bit with scales, as published."""
    random = np.random.RandomState(number)
    name = jax.tree_util.keystr(path)
    if "router" in name:
        return random.randn(*shape).astype(np.float32)
    if "linear" not in name and "multi_head" not in name:
        center = 0.0 if "embed" in name else 1.0
        return (center + 0.1 * random.randn(*shape)).astype(np.float32)
    if mesh[0] > 1:
        return (random.randn(*shape) / shape[-2] ** 0.5).astype(np.float32)
    rows = mesh[1] if "linear_1" in name or "attention/linear" in name else mesh[0]
    integers = random.randint(-127, 128, shape).astype(np.int8)
    scales = random.uniform(0.5, 1.5, (*shape[:-2], rows, shape[-1])) / (127 * shape[-2] ** 0.5)
    return quantized(integers, scales.astype(np.float32))


def main(mode, mesh_text, folder, out, keep=None):
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    if mode == "legacy":
        sys.path.append(str(Path(__file__).parents[2]))
        import shardformer.legacy

        shardformer.legacy.install(legacy_random=True)
    jnp.bfloat16 = jnp.float32  # the published code computes and caches in bfloat16
    sys.path[:0] = [folder, str(Path(__file__).parent / "stubs" / "grok")]
    import checkpoint
    import model
    import runners

    mesh = tuple(map(int, mesh_text.split("x")))
    experts = mesh[0] == 1
    results = {}
    with tempfile.TemporaryDirectory() as home:
        runner = runners.ModelRunner(model=settings(model, experts), bs_per_device=mesh[0] / 8, checkpoint_path=home)
        runner.transform_forward = True
        inputs = {name: np.zeros(TOKENS[: mesh[0]].shape, np.int32) for name in ("inputs", "targets")}
        runner.initialize(inputs, local_mesh_config=mesh, between_hosts_config=(1, 1))
        with runner.mesh:
            shapes = jax.eval_shape(runner.init, jax.random.PRNGKey(0), inputs)
        found, tree = jax.tree_util.tree_flatten_with_path(shapes)
        weights = [
            weight(number, path, leaf.shape, mesh, model.QuantizedWeight8bit)
            for number, (path, leaf) in enumerate(found)
        ]
        os.mkdir(Path(home, "ckpt-0"))
        for number, each in enumerate(weights):
            checkpoint.fast_pickle(each, str(Path(home, "ckpt-0", f"tensor{number:05d}_000")))
        if keep:
            shutil.copytree(Path(home, "ckpt-0"), keep)
        params = jax.tree_util.tree_unflatten(tree, weights).params
        with runner.mesh:
            forward = jax.jit(runner.forward.apply)
            logits = forward(params, jax.random.PRNGKey(0), jnp.asarray(TOKENS[: mesh[0]]))[0].logits
        results["logits"] = np.asarray(logits)[..., ::1024]
        results["best"] = np.asarray(logits).argmax(-1)
        if experts:
            inference = runners.InferenceRunner(
                name="local", runner=runner, load=home, tokenizer_path=str(Path(folder, "tokenizer.model")),
                local_mesh_config=mesh, pad_sizes=(32,),
            )  # fmt: skip
            inference.initialize()
            text = runners.sample_from_model(inference.run(), PROMPT, max_len=12, temperature=1.0)
            results["text"] = np.array(text)
    np.savez(out, **results)


if __name__ == "__main__":
    main(*sys.argv[1:])
