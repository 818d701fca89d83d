"""Muon for each layer's matrices; adam for all other parameters."""

import math

import jax
import optax
from optax import contrib
from optax.transforms import chain  # see chain.py

from shardformer.config import Config
from shardformer.config.names import MATRICES
from shardformer.optim import name_patterns

# Layers are stacked on a leading axis: the last two are the matrix.
MATRIX = contrib.MuonDimensionNumbers(reduction_axis=-2, output_axis=-1)
RMS_OF_ADAM = 0.2  # of a typical adam update (arXiv:2502.16982), so that lr and weight_decay mean the same for both


def scale_by_muon(config: Config) -> optax.GradientTransformationExtraArgs:
    """Sets the momentum's singular values to about one, and scales the updates to the size of adam's."""
    muon = chain(
        contrib.scale_by_muon(weight_dimension_numbers=lambda updates: jax.tree.map(lambda _: MATRIX, updates)),
        optax.stateless(lambda updates, _: jax.tree.map(_as_large_as_adam, updates)),
    )
    adam = optax.scale_by_adam(config.beta1, config.beta2)
    return optax.partition({"muon": muon, "adam": adam}, lambda tree: name_patterns.map_names(_label, tree))


def _label(name: str) -> str:
    return "muon" if name.rpartition("/")[2] in MATRICES else "adam"


def _as_large_as_adam(update):
    return update * (RMS_OF_ADAM * math.sqrt(max(update.shape[-2:])))
