"""`lax.pdot`, `lax.xeinsum`, `lax.pgather`, and `jnp.einsum` with named axes: what left JAX together with xmap.

`pdot` is a primitive of its own, because its transpose is the dot product's, with no sum over the named axes: the
`psum` of a dot product would sum a cotangent as well.
"""

import string
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

_jnp_einsum = jnp.einsum  # before `install()` puts ours in its place


def pdot(x, y, axis_name, pos_contract=((), ()), pos_batch=((), ()), precision=None):
    """A dot product that contracts the positions `pos_contract` and the named axes `axis_name`."""
    names = tuple(axis_name) if isinstance(axis_name, (list, tuple)) else (axis_name,)
    if len(set(names)) != len(names):
        raise ValueError(f"pdot contracts each named axis once, got {axis_name!r}")
    contract, batch = (tuple(map(tuple, sides)) for sides in (pos_contract, pos_batch))
    return _pdot.bind(
        jnp.asarray(x), jnp.asarray(y), names=names, dimensions=(contract, batch), precision=_precision(precision)
    )


def xeinsum(spec: str, *operands):
    """An einsum whose operands may carry named axes in braces: `'ij{a},jk{a}->ik'`."""
    if spec.count("->") != 1:
        raise ValueError(f"xeinsum got {spec!r}; write the result as well, after one '->': 'ij{{a}},jk{{a}}->ik'")
    terms = [_parse_term(term) for side in spec.split("->") for term in _split_terms(side)]
    *inputs, (out_letters, out_names) = terms
    if len(inputs) != len(operands):
        raise ValueError(f"xeinsum got {len(operands)} operands for the {len(inputs)} of {spec!r}")
    if len(operands) > 2:
        raise NotImplementedError(f"xeinsum takes one or two operands, got {len(operands)}")
    for what, index, result in (("subscript", 0, out_letters), ("named axis", 1, out_names)):
        if absent := set(result).difference(*(term[index] for term in inputs)):
            raise ValueError(f"the result of {spec!r} has the {what} {', '.join(sorted(absent))}, which no operand has")
    if any(len(set(axes)) < len(axes) for term in terms for axes in term):
        raise NotImplementedError(f"a term of {spec!r} has an axis twice; take the diagonal first (jnp.diagonal)")
    first, *rest = [_reduce_alone(position, operand, inputs, terms[-1]) for position, operand in enumerate(operands)]
    if rest:
        return _contract(first, rest[0], terms[-1])
    x, letters, _ = first
    return jnp.transpose(x, [letters.index(letter) for letter in out_letters])


def einsum(subscripts, /, *operands, _use_xeinsum: bool = False, **options):
    """`jnp.einsum`, and xeinsum where the subscripts have named axes in braces, or `_use_xeinsum` asks for it."""
    if isinstance(subscripts, str) and (_use_xeinsum or "{" in subscripts):
        return xeinsum(subscripts.replace(" ", ""), *operands)
    return _jnp_einsum(subscripts, *operands, **options)


def pgather(src, idx, axes):
    """Indexes the flattened `axes` of `src`, positions or names, with `idx`."""
    axes = tuple(axes) if isinstance(axes, (list, tuple)) else (axes,)
    positions = [axis for axis in axes if isinstance(axis, int)]
    names = [axis for axis in axes if not isinstance(axis, int)]
    gathered = jnp.moveaxis(jnp.asarray(src), positions, range(len(positions)))
    for name in reversed(names):
        gathered = lax.all_gather(gathered, name)  # in front of what was gathered before
    gathered = jnp.moveaxis(gathered, range(len(axes)), [axes.index(axis) for axis in (*names, *positions)])
    return gathered.reshape(-1, *gathered.shape[len(axes) :])[idx]


# Parsing --------------------------------------------------------------------------------------------------------------


def _split_terms(side: str) -> list[str]:
    """'ij{a,b},j' as ['ij{a,b}', 'j']."""
    depth, terms = 0, [""]
    for character in side:
        depth += (character == "{") - (character == "}")
        if character == "," and not depth:
            terms.append("")
        else:
            terms[-1] += character
    return terms


def _parse_term(text: str) -> tuple[str, tuple[str, ...]]:
    """The subscripts and the named axes of one operand."""
    letters, brace, names = text.partition("{")
    if (brace and not names.endswith("}")) or set(letters) - set(string.ascii_letters):
        raise ValueError(
            f"{text!r} is not an operand of a named einsum; write letters, then named axes in braces: 'ij{{a}}'"
        )
    names = names.removesuffix("}")
    return letters, tuple(names.split(",")) if names else ()


def _reduce_alone(position: int, operand, inputs: list, result: tuple):
    """Sums the axes that this operand alone has; returns it with the letters and the names that are left."""
    rest = [term for other, term in enumerate(inputs) if other != position]
    letters, names = inputs[position]
    left = [
        [axis for axis in axes if axis in result[kind] or any(axis in term[kind] for term in rest)]
        for kind, axes in enumerate((letters, names))
    ]
    operand = jnp.asarray(operand)
    operand = operand.sum(tuple(i for i, letter in enumerate(letters) if letter not in left[0]))
    if alone := tuple(name for name in names if name not in left[1]):
        operand = lax.psum(operand, alone)
    return operand, left[0], left[1]


def _contract(left: tuple, right: tuple, result: tuple):
    (x, x_letters, x_names), (y, y_letters, y_names) = left, right
    shared = [letter for letter in x_letters if letter in y_letters]

    def positions(letters):
        return tuple([axes.index(letter) for letter in letters] for axes in (x_letters, y_letters))

    contracted = [letter for letter in shared if letter not in result[0]]
    batch = [letter for letter in shared if letter in result[0]]
    names = [name for name in x_names if name in y_names and name not in result[1]]
    product = pdot(x, y, names, positions(contracted), positions(batch))
    order = batch + [letter for axes in (x_letters, y_letters) for letter in axes if letter not in shared]
    return jnp.transpose(product, [order.index(letter) for letter in result[0]])


# The primitive --------------------------------------------------------------------------------------------------------


def _precision(precision):
    if precision is None or isinstance(precision, lax.Precision):
        return precision
    if isinstance(precision, Sequence) and not isinstance(precision, str):
        return tuple(lax.Precision(each) for each in precision)
    return lax.Precision(precision)


def _dot(x, y, names, dimensions, precision):
    return lax.dot_general(x, y, dimensions, precision=precision)


def _lower(x, y, *, names, dimensions, precision):
    if names:  # a name that no vmap has resolved belongs to shard_map's mesh
        return lax.psum(_dot(x, y, names, dimensions, precision), names)
    return _dot(x, y, names, dimensions, precision)


_pdot = Primitive("pdot")
_pdot.def_impl(_lower)
mlir.register_lowering(_pdot, mlir.lower_fun(_lower, multiple_results=False))


@_pdot.def_abstract_eval
def _shape(x, y, *, names, dimensions, precision):
    product = jax.eval_shape(lambda x, y: _dot(x, y, names, dimensions, precision), x, y)
    return jax.core.ShapedArray(product.shape, product.dtype)


def _differentiate(primals, tangents, **how):
    (x, y), (x_tangent, y_tangent) = primals, tangents
    terms = [
        _pdot.bind(*operands, **how)
        for tangent, operands in ((x_tangent, (x_tangent, y)), (y_tangent, (x, y_tangent)))
        if not isinstance(tangent, ad.Zero)
    ]
    return _pdot.bind(x, y, **how), terms[0] if len(terms) == 1 else terms[0] + terms[1]


def _transpose(cotangent, x, y, *, names, dimensions, precision):
    """The transpose of this instance's dot product, for whichever operand is linear: no sum over the names."""
    if isinstance(cotangent, ad.Zero):
        return [None, None]
    if ad.is_undefined_primal(x):
        linear, dot = x.aval, lambda x: _dot(x, y, names, dimensions, precision)
    else:
        linear, dot = y.aval, lambda y: _dot(x, y, names, dimensions, precision)
    (result,) = jax.linear_transpose(dot, jax.ShapeDtypeStruct(linear.shape, linear.dtype))(cotangent)
    return [result, None] if ad.is_undefined_primal(x) else [None, result]


ad.primitive_jvps[_pdot] = _differentiate
ad.primitive_transposes[_pdot] = _transpose


def _batch(axis, operands, batched, *, names, dimensions, precision):
    """A batch axis whose name is contracted becomes a contracted position, every other one a batch position."""
    (x, y), (x_axis, y_axis) = operands, batched
    if axis.name in names:
        if x_axis is None or y_axis is None:  # the same for all instances: as many summands as there are instances
            x, x_axis = (x, x_axis) if x_axis is not None else (_repeated(x, axis.size), 0)
            y, y_axis = (y, y_axis) if y_axis is not None else (_repeated(y, axis.size), 0)
        contract, batch = (_shifted(sides, x_axis, y_axis) for sides in dimensions)
        contract = ((x_axis, *contract[0]), (y_axis, *contract[1]))
        left = tuple(name for name in names if name != axis.name)
        return _pdot.bind(x, y, names=left, dimensions=(contract, batch), precision=precision), None
    how = {"names": names, "precision": precision}
    if x_axis is None and y_axis is None:
        return _pdot.bind(x, y, dimensions=dimensions, **how), None
    if x_axis is not None and y_axis is not None:
        contract, batch = (_shifted(sides, x_axis, y_axis) for sides in dimensions)
        batch = ((x_axis, *batch[0]), (y_axis, *batch[1]))
        return _pdot.bind(x, y, dimensions=(contract, batch), **how), 0
    contract, batch = (_shifted(sides, x_axis, y_axis) for sides in dimensions)
    product = _pdot.bind(x, y, dimensions=(contract, batch), **how)
    if x_axis is not None:
        return product, len(batch[0]) + _free_position(x_axis, contract[0], batch[0])
    free_of_x = x.ndim - len(contract[0]) - len(batch[0])
    return product, len(batch[0]) + free_of_x + _free_position(y_axis, contract[1], batch[1])


def _repeated(x, size: int):
    return jnp.broadcast_to(x, (size, *jnp.shape(x)))


def _shifted(sides, x_axis, y_axis):
    """The positions of both operands, once a batch axis is inserted in them."""
    return _shift(sides[0], x_axis), _shift(sides[1], y_axis)


def _shift(positions, position: int | None) -> tuple[int, ...]:
    return tuple(p + 1 if position is not None and p >= position else p for p in positions)


def _free_position(position: int, contract, batch) -> int:
    """Returns a position's index among the positions that are neither contracted nor batched."""
    return position - sum(other < position for other in (*contract, *batch))


batching.fancy_primitive_batchers[_pdot] = _batch
