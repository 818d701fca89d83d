"""`weights=`: a matrix is stored as codes with scales, two or three parameters that are split as the matrix is.

`Stored` and its subclasses are replicas of data parallelism in the shard view: ZeRO gathers parts as they are stored.
"""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
from jax import Array, lax

from shardformer import collectives
from shardformer.config import Config
from shardformer.config.names import ALL_MATRICES, BLOCKS, CODES, EXPERT_MATRICES, MP, SCALES, is_part, is_stacked
from shardformer.kernels.vocabulary_loss import loss_in_recomputed_chunks
from shardformer.layout import specs
from shardformer.layout.float_weights import FloatWeights
from shardformer.parallel.replicas import ForwardZero, Replicated, Zero, Zero1, Zero3, map_named
from shardformer.parallel.scattering import Scattering, gather_parts
from shardformer.quantized import int8_matrix, packed_matrix
from shardformer.quantized.int8_matrix import Int8Matrix
from shardformer.quantized.packed_matrix import PackedMatrix
from shardformer.quantized.part_keys import TABLES, group_size, splits_groups

if TYPE_CHECKING:
    from shardformer.layout import Layout

PARTS = (CODES, SCALES, BLOCKS)


class QuantizedWeights(FloatWeights):
    """weights=int8: the layers' matrices, the token tables and the untied head as int8 codes and scales."""

    multiply_table: Callable = staticmethod(int8_matrix.multiply_table)
    loss_in_chunks: Callable = staticmethod(loss_in_recomputed_chunks)

    def __init__(self, config: Config):
        self.config = config

    def is_quantized(self, name: str) -> bool:
        """Returns whether the parameter of this full name is stored as codes and scales."""
        module, _, leaf = name.rpartition("/")
        return leaf in ALL_MATRICES if is_stacked(module) else name.endswith((*TABLES, "/head/w"))

    def quantizes_rows(self, name: str) -> bool:
        """Returns whether each index of the first axis has its own scales: each layer, or each row of tables."""
        return is_stacked(name) or name.endswith(TABLES)

    def store(self, params: dict) -> dict:
        """Returns the parameters (or, from their shapes, the shapes) with the codes and scales of each matrix."""
        is_shape = any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(params))
        return jax.eval_shape(self._store, params) if is_shape else self._store(params)

    def suffixes(self, name: str) -> tuple[str, ...]:
        """Returns the ends of the names of the parts of a quantised parameter of this full name."""
        return CODES, SCALES

    def quantize(self, name: str, w: Array) -> tuple[Array, ...]:
        """Returns the parts of the parameter of this full name: codes, scales and perhaps the scales of scales."""
        return int8_matrix.quantize(w, axis=-1 if name.endswith(TABLES) else -2)

    def join(self, name: str, parts: tuple[Array, ...]) -> Any:
        """Returns this shard's matrix of the parts of this full name, without a leading L. Shard view."""
        return Int8Matrix(*parts)

    def dequantize(self, name: str, parts: tuple[Array, ...]) -> Array:
        """Returns the float32 parameter of this full name from all of its parts, of one layer or of all layers."""
        return Int8Matrix(*parts).astype("float32")

    def name_parts(self, params: dict) -> dict:
        """Returns the stored form of parameters in which each matrix is a tuple of its parts."""
        stored: dict = {module: {} for module in params}
        for module, leaves in params.items():
            for name, leaf in leaves.items():
                full = f"{module}/{name}"
                names = [f"{name}{suffix}" for suffix in self.suffixes(full)] if self.is_quantized(full) else [name]
                stored[module] |= dict(zip(names, leaf if len(names) > 1 else [leaf], strict=True))
        return stored

    def _store(self, params: dict) -> dict:
        def quantize(name, leaf):
            return self.quantize(name, leaf) if self.is_quantized(name) else leaf

        return self.name_parts(map_named(quantize, params))


class Int4Weights(QuantizedWeights):
    """weights=int4: 4-bit codes of the layers' matrices, with bfloat16 scales of groups; the tables are int8."""

    def quantize(self, name: str, w: Array) -> tuple[Array, ...]:
        return packed_matrix.quantize_int4(w) if is_stacked(name) else super().quantize(name, w)

    def join(self, name: str, parts: tuple[Array, ...]) -> Any:
        if not is_stacked(name):
            return super().join(name, parts)
        codes, scales = parts
        return PackedMatrix(codes, self._take_groups(name, codes, scales).astype("float32"), packed_matrix.INT4_LEVELS)

    def dequantize(self, name: str, parts: tuple[Array, ...]) -> Array:
        if not is_stacked(name):
            return super().dequantize(name, parts)
        codes, scales = parts
        return packed_matrix.dequantize(codes, scales, packed_matrix.INT4_LEVELS)

    def _take_groups(self, name: str, codes: Array, scales: Array) -> Array:
        """Returns the scales of this shard's rows: a part of a group has that group's scale."""
        leaf = name.rpartition("/")[2]
        if not self._is_split(name, -2) or splits_groups(leaf, self.config):
            return scales
        group, rows = group_size(self.config.split_inputs(leaf)), 2 * codes.shape[-2]
        return packed_matrix.take_groups(scales, group, collectives.index(MP) * rows, rows)

    def _is_split(self, name: str, dimension: int) -> bool:
        """Returns whether mp splits the rows (-2) or the columns (-1) of the matrix of this full name."""
        axes = tuple(specs.parameter_spec(name, self.config))
        length = 4 if name.rpartition("/")[2] in EXPERT_MATRICES else 3
        return self.config.parallel.mp > 1 and (*axes, *[None] * (length - len(axes)))[dimension] == MP


class Nf4Weights(Int4Weights):
    """weights=nf4: the layers' matrices as bitsandbytes stores them, with double quantisation; the tables are int8."""

    def suffixes(self, name: str) -> tuple[str, ...]:
        return (CODES, SCALES, BLOCKS) if is_stacked(name) else super().suffixes(name)

    def quantize(self, name: str, w: Array) -> tuple[Array, ...]:
        return packed_matrix.quantize_nf4(w) if is_stacked(name) else super().quantize(name, w)

    def join(self, name: str, parts: tuple[Array, ...]) -> Any:
        if not is_stacked(name):
            return super().join(name, parts)
        codes, scales, blocks = parts
        split_rows = self._is_split(name, -2) and splits_groups(name.rpartition("/")[2], self.config)
        groups, outputs = scales.shape[-2:]
        first_group = collectives.index(MP) * groups if split_rows else 0
        first_output = collectives.index(MP) * outputs if self._is_split(name, -1) else 0
        total = groups * (self.config.parallel.mp if split_rows else 1)
        floats = packed_matrix.dequantize_scales(scales, blocks, (first_group, first_output), total)
        return PackedMatrix(codes, self._take_groups(name, codes, floats), packed_matrix.NF4_LEVELS)

    def dequantize(self, name: str, parts: tuple[Array, ...]) -> Array:
        if not is_stacked(name):
            return super().dequantize(name, parts)
        codes, scales, blocks = parts
        floats = packed_matrix.dequantize_scales(scales, blocks, (0, 0), scales.shape[-2])
        return packed_matrix.dequantize(codes, floats, packed_matrix.NF4_LEVELS)


FORMS = {"int8": QuantizedWeights, "int4": Int4Weights, "nf4": Nf4Weights}


def quantize_layout(layout: "Layout") -> "Layout":
    """Returns the layout with matrices stored in the form that `weights=` names."""
    form = layout.config.stored.weights
    weights = FORMS[form](layout.config)
    replicas = make_replicas(layout.replicas, weights)
    reasons = layout.reasons | {"weights": f"weights={form}"}
    return dataclasses.replace(layout, weights=weights, replicas=replicas, reasons=reasons)


@dataclasses.dataclass(frozen=True)
class Stored(Replicated):
    """Replicas that join each matrix from its stored parts. The parts are gathered as stored and have no gradient."""

    join: Callable | None = None  # of (full name of a matrix, its parts)

    def gather_outside(self, params: dict) -> dict:
        return self._join_all(super().gather_outside(params))

    def gather_layer(self, stored: dict) -> dict:
        return self._join_all(super().gather_layer(stored))

    def gather(self, name: str, p: Array, dimension: int | None, scattering: Scattering) -> Array:
        """Returns a parameter of which every replica has a part along `dimension`."""
        if dimension is None or not is_part(name):
            return super().gather(name, p, dimension, scattering)  # type: ignore[misc]  # of ZeRO
        return self._gather_part(p, dimension, scattering)

    def _gather_part(self, p: Array, dimension: int, scattering: Scattering) -> Array:
        return gather_parts(p, dimension, scattering.stages, self.layer_axes)

    def _join_all(self, params: dict) -> dict:
        """Returns the parameters with one matrix instead of its parts."""
        joined: dict = {module: {} for module in params}
        for module, leaves in params.items():
            for name, leaf in leaves.items():
                if name.endswith(CODES):
                    base = name.removesuffix(CODES)
                    parts = tuple(leaves[part] for suffix in PARTS if (part := f"{base}{suffix}") in leaves)
                    joined[module][base] = self.join(f"{module}/{base}", parts)  # type: ignore[misc]  # it is given
                elif not is_part(name):
                    joined[module][name] = leaf
        return joined


@dataclasses.dataclass(frozen=True)
class StoredZero(Stored, Zero):
    """ZeRO's parts of stored parameters."""

    def for_forward_pass(self) -> "StoredForwardZero":
        return StoredForwardZero(**_fields(self))


@dataclasses.dataclass(frozen=True)
class StoredZero1(StoredZero, Zero1):
    """ZeRO-1 of stored parameters."""


@dataclasses.dataclass(frozen=True)
class StoredZero3(StoredZero, Zero3):
    """ZeRO-3 of stored parameters."""


@dataclasses.dataclass(frozen=True)
class StoredForwardZero(StoredZero, ForwardZero):
    """ZeRO in forward passes without gradients."""

    def _gather_part(self, p: Array, dimension: int, scattering: Scattering) -> Array:
        return lax.all_gather(p, self.layer_axes, axis=dimension, tiled=True, to="invarying")


def make_replicas(replicas: Replicated, weights: QuantizedWeights) -> Stored:
    """Returns the same replicas, which gather the parts of a matrix as they are stored and join them."""
    kind = {Replicated: Stored, Zero1: StoredZero1, Zero3: StoredZero3}[type(replicas)]
    return kind(**_fields(replicas), join=weights.join)


def _fields(replicas: Replicated) -> dict:
    return {field.name: getattr(replicas, field.name) for field in dataclasses.fields(replicas)}
