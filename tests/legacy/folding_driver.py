"""Runs an AlphaFold 2 fork, unedited: `python tests/legacy/folding_driver.py MODE FOLDER OUT`.

FOLDER has the fork's `alphafold` package, such as EvoBind's src/AF2. MODE is old (jax 0.4.13 and dm-haiku 0.0.10, to
record) or legacy (after install()). The model is a small monomer one with random weights, six residues and two
iterations. OUT is an .npz with its outputs, and with sums of the gradients of its weights and sequence features.
"""

import os
import sys
import zlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

RESIDUES, SEQUENCES, EXTRA, RECYCLES = 6, 3, 2, 1


def small(config):
    """Shrinks the fork's own configuration: one block of each stack, without templates."""
    config = config.model
    config.num_recycle = RECYCLES
    config.global_config.update(zero_init=False, use_remat=True, subbatch_size=2)
    evoformer = config.embeddings_and_evoformer
    evoformer.update(evoformer_num_block=1, extra_msa_stack_num_block=1, msa_channel=8, pair_channel=8)
    evoformer.update(seq_channel=12, extra_msa_channel=8, cyclic_offset=True)  # the last is EvoBind's
    evoformer.template.enabled = False
    for part in evoformer.evoformer.values():
        small_part = {"num_head": 2, "num_intermediate_channel": 8, "num_outer_channel": 4}
        part.update({key: value for key, value in small_part.items() if key in part})
    heads = config.heads
    heads.structure_module.update(num_layer=1, num_channel=12, num_head=2)
    heads.structure_module.sidechain.num_channel = 8
    heads.predicted_lddt.num_channels = 8
    return config


def make_batch(residue_constants):
    random = np.random.RandomState(0)
    kind = random.randint(0, 20, RESIDUES)
    atoms = residue_constants.atom_types
    to_14 = np.zeros((20, 37), np.int32)
    exists_14, exists_37 = np.zeros((20, 14), np.float32), np.zeros((20, 37), np.float32)
    for number, letter in enumerate(residue_constants.restypes):
        names = residue_constants.restype_name_to_atom14_names[residue_constants.restype_1to3[letter]]
        for place, name in enumerate(names):
            if name:
                to_14[number, atoms.index(name)] = place
                exists_14[number, place] = exists_37[number, atoms.index(name)] = 1
    arrays = {
        "aatype": kind.astype(np.int32),
        "target_feat": np.eye(22, dtype=np.float32)[kind + 1],
        "msa_feat": random.uniform(0, 1, (SEQUENCES, RESIDUES, 49)).astype(np.float32),
        "residue_index": np.arange(RESIDUES, dtype=np.int32),
        "seq_mask": np.ones(RESIDUES, np.float32),
        "msa_mask": np.ones((SEQUENCES, RESIDUES), np.float32),
        "msa_row_mask": np.ones(SEQUENCES, np.float32),
        "extra_msa": random.randint(0, 22, (EXTRA, RESIDUES)).astype(np.int32),
        "extra_msa_mask": np.ones((EXTRA, RESIDUES), np.float32),
        "extra_msa_row_mask": np.ones(EXTRA, np.float32),
        "extra_has_deletion": np.zeros((EXTRA, RESIDUES), np.float32),
        "extra_deletion_value": np.zeros((EXTRA, RESIDUES), np.float32),
        "atom14_atom_exists": exists_14[kind],
        "atom37_atom_exists": exists_37[kind],
        "residx_atom37_to_atom14": to_14[kind],
        "seq_length": np.int32(RESIDUES),
        "cyclic_offset": (np.arange(RESIDUES)[:, None] - np.arange(RESIDUES) + 3) % RESIDUES - 3,
    }
    return {name: np.stack([array] * (RECYCLES + 1)) for name, array in arrays.items()}


def draw_weights(shapes):
    """Returns weights that depend on their names and shapes only, not on a release's draws."""

    def draw(module, name, shape):
        random = np.random.RandomState(zlib.crc32(f"{module}/{name}".encode()))
        spread = {"scale": 0.1, "offset": 0.1}.get(name, (shape[-2] if len(shape) > 1 else 100) ** -0.5)
        return (name == "scale") + spread * random.normal(size=shape).astype(np.float32)

    return {m: {n: jnp.asarray(draw(m, n, leaf.shape)) for n, leaf in own.items()} for m, own in shapes.items()}


def run():
    import haiku as hk
    from alphafold.common import residue_constants
    from alphafold.model import config, modules

    from tests.legacy.gradient_programs import summarize

    model_config, batch = small(config.model_config("model_3")), make_batch(residue_constants)

    def forward(batch):
        return modules.AlphaFold(model_config)(batch, is_training=False)

    model, key = hk.transform(forward), jax.random.PRNGKey(0)
    weights = draw_weights(jax.eval_shape(model.init, key, batch))

    def loss(weights, features):
        found = model.apply(weights, key, {**batch, **features})
        chosen = {
            "positions": found["structure_module"]["final_atom_positions"],
            "plddt": found["predicted_lddt"]["logits"],
            "distogram": found["distogram"]["logits"],
            "msa": found["masked_msa"]["logits"],
        }
        return sum(jnp.mean(jnp.sin(value)) for value in chosen.values()), chosen

    features = {name: jnp.asarray(batch[name]) for name in ("msa_feat", "target_feat")}
    gradient = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))
    (value, outputs), gradients = gradient(weights, features)
    leaves = jax.tree_util.tree_leaves(gradients)
    assert all(np.any(leaf) for leaf in jax.tree_util.tree_leaves(gradients[1]))
    return {"loss": value, **outputs, "gradients": summarize(list(map(np.asarray, leaves)))}


def main(mode, folder, out):
    os.environ["JAX_PLATFORMS"] = "cpu"
    sys.path[:0] = [folder]
    sys.path.append(str(Path(__file__).parents[2]))
    if mode == "legacy":
        import shardformer.legacy

        shardformer.legacy.install(legacy_random=True)
    found = run()
    np.savez_compressed(out, **{name: np.asarray(value, np.float32) for name, value in found.items()})


if __name__ == "__main__":
    main(*sys.argv[1:])
