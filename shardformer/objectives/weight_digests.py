"""The sha256 of weights that a run compares with: they must be the same in each of its starts."""

import hashlib
import json

import jax
import numpy as np
from jax import lax
from jax.sharding import NamedSharding

from shardformer.devices import programs
from shardformer.errors import RunError
from shardformer.files import make_folder, read_text, replacing
from shardformer.training.run_folder import Run


def digest_weights(params, replicated: NamedSharding) -> str:
    """Returns a sha256 of the full parameters, the same on every mesh; one matrix at a time is on the host."""

    def select(leaf, layer):
        return lax.dynamic_index_in_dim(leaf, layer, keepdims=False)

    digest, gather = hashlib.sha256(), programs.jit(select, out_shardings=replicated)
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        digest.update(f"{jax.tree_util.keystr(path)} {leaf.shape} {leaf.dtype} ".encode())
        stacked = leaf if leaf.ndim > 2 else leaf[None]
        for layer in range(len(stacked)):
            digest.update(np.ascontiguousarray(gather(stacked, np.int32(layer))).tobytes())
    return digest.hexdigest()


def check_weights(run: Run, file: str, name: str, weights: str, step: int) -> None:
    """Compares the weights that a run learns from with those of its first start, or notes them in a file of the run."""
    path = run.records / file
    try:
        before = json.loads(read_text(path))["weights"]
    except FileNotFoundError:
        make_folder(run.records)
        with replacing(path) as temporary:
            temporary.write_text(json.dumps({"weights": weights, "step": step}) + "\n")
        return
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise RunError(f"{path} is damaged ({error!s:.100}); remove it to go on with {name} as it is") from None
    if before != weights:
        raise RunError(
            f"{name} has changed: the run started with weights of sha256 "
            f"{str(before)[:12]}, and its best are {weights[:12]} (step {step}) now; restore them, or remove {path} to "
            "go on with these"
        )
