"""The table of silent changes: calls that still run and give other results than with jax 0.4.13.

Each row was measured: tests/legacy/silent_programs.py has a program, and its results with jax 0.4.13 and today.
"""

import ast
from collections.abc import Callable
from math import inf
from typing import NamedTuple

from shardformer.legacy import call_arguments as given
from shardformer.legacy.source_names import DERIVATIVES, calls_within

Condition = Callable[[ast.Call, "given.Resolver"], bool]


class SilentChange(NamedTuple):
    """A change of results: the release that made it, what is different, and what to write for the old results."""

    library: str
    version: tuple[int, ...]
    difference: str
    fix: str

    def advice(self) -> str:
        return f"{self.library} {'.'.join(map(str, self.version))}: {self.difference}; {self.fix}"


THREEFRY_OPTION = "jax_threefry_partitionable"
THREEFRY = SilentChange(
    "jax", (0, 5, 0), "other draws", f'jax.config.update("{THREEFRY_OPTION}", False) gives the old ones'
)
PMAP_SHARD = SilentChange("jax", (0, 4, 34), "a shard of a pmap keeps the mapped axis, of length 1", "take its [0]")
PMAP_INDEX = SilentChange(
    "jax", (0, 8, 0), "a row of a pmap's result is spread over all devices", "take x.addressable_data(i)[0]"
)
PARTITION_SPEC = SilentChange(
    "jax", (0, 10, 0), "a PartitionSpec never equals a tuple", "compare with PartitionSpec(*the_tuple)"
)
COMPLEX_BOOL = SilentChange("jax", (0, 4, 27), "an imaginary number is True", "x.real.astype(bool) is the old value")
TRACE = SilentChange("jax", (0, 4, 27), "booleans are counted, and unsigned integers stay unsigned", "cast the result")
SHARD_MAP = "jax.experimental.shard_map.shard_map"
CHECK_REP = SilentChange(
    "jax",
    (0, 6, 0),
    "a gradient in the body counts psum once, and is summed over the devices that share its argument",
    "check_rep=False",
)
VIEW_NONE = SilentChange("jax", (0, 7, 2), "the dtype stays", "x.view(float)")

_DRAWS = """
ball bernoulli beta binomial bits categorical cauchy chisquare choice dirichlet double_sided_maxwell exponential f gamma
generalized_normal geometric gumbel laplace loggamma logistic lognormal maxwell multinomial multivariate_normal normal
orthogonal pareto permutation poisson rademacher randint rayleigh shuffle split t triangular truncated_normal uniform
wald weibull_min
"""
# Uses that always give other results.
ALWAYS: dict[str, SilentChange] = {f"jax.random.{name}": THREEFRY for name in _DRAWS.split()} | {
    "haiku.PRNGSequence": THREEFRY,
    "optax.adabelief": SilentChange("optax", (0, 2, 4), "other steps", "copy the old scale_by_belief to keep them"),
    "optax.scale_by_belief": SilentChange("optax", (0, 2, 4), "other steps", "copy the old function to keep them"),
    "optax.add_noise": SilentChange("optax", (0, 2, 3), "other noise", "copy the old function to keep it"),
    "optax.noisy_sgd": SilentChange("optax", (0, 2, 3), "other noise", "copy the old add_noise to keep it"),
    "optax.optimistic_gradient_descent": SilentChange(
        "optax", (0, 2, 4), "another first step", "copy the old scale_by_optimistic_gradient to keep it"),
    "optax.scale_by_optimistic_gradient": SilentChange(
        "optax", (0, 2, 4), "another first step", "copy the old function to keep it"),
}  # fmt: skip

_SHAPE_PARAMETERS = {"a", "b", "alpha", "df", "p"}
_SMALL_SHAPES = SilentChange("jax", (0, 4, 14), "other draws for a shape parameter below 1", "no option restores them")
_EMPTY = SilentChange("jax", (0, 11, 0), "the array is uninitialized", "jax.numpy.zeros")
_TRUNCATE = SilentChange("jax", (0, 4, 31), "integers stay integers", "x.astype(float) first")
_GAMMA = SilentChange("jax", (0, 4, 36), "NaN at negative integers", "infinity was returned: use jax.numpy.where")
_CALLBACK = SilentChange(
    "jax", (0, 4, 27), "the callback gets jax.Arrays, no numpy.ndarrays", "call numpy.asarray on its arguments first"
)


# Functions with another derivative, wherever one is taken.
UNDER_DERIVATIVE = {
    "jax.numpy.ldexp": SilentChange(
        "jax", (0, 4, 34), "its derivative is 2 ** exponent, no more 0", "jax.lax.stop_gradient around it"),
}  # fmt: skip


def _is_small_randint(call: ast.Call, _: "given.Resolver") -> bool:
    return given.dtype_name(given.argument(call, 4, "dtype")) in {"int8", "uint8", "int16", "uint16"}


def sums_booleans_or_unsigned(array: ast.expr | None, file: "given.Resolver") -> bool:
    """Returns True if the diagonal of an array is summed in another dtype than before."""
    dtype = given.dtype_of(array, file)
    return dtype in {"bool", "bool_"} or dtype.startswith("uint")


def _traces_booleans_or_unsigned(call: ast.Call, file: "given.Resolver") -> bool:
    return given.argument(call, 4, "dtype") is None and sums_booleans_or_unsigned(given.argument(call, 0, "a"), file)


def differentiates_inside(call: ast.Call, body: ast.AST | None, file: "given.Resolver") -> bool:
    """Returns True if a shard_map with check_rep differentiates in its body."""
    checked = given.argument(call, 4, "check_rep")
    off = isinstance(checked, ast.Constant) and checked.value is False
    return not off and any(name in DERIVATIVES for _, name in calls_within(body, file))


def _shard_map_differentiates(call: ast.Call, file: "given.Resolver") -> bool:
    return differentiates_inside(call, given.argument(call, 0, "f"), file)


def _has_elements(call: ast.Call, _: "given.Resolver") -> bool:
    shape = given.argument(call, 0, "shape")
    sizes = shape.elts if isinstance(shape, ast.Tuple | ast.List) else [shape]
    return not any(isinstance(size, ast.Constant) and size.value == 0 for size in sizes)


def _accepts_integers(call: ast.Call, file: "given.Resolver") -> bool:
    return given.kind(given.argument(call, 0, "x"), file) == "integer"


def _accepts_complex(call: ast.Call, file: "given.Resolver") -> bool:
    return any(given.kind(argument, file) == "complex" for argument in call.args)


def _signs_complex(call: ast.Call, file: "given.Resolver") -> bool:
    return given.is_true(given.argument(call, 4, "return_sign")) and _accepts_complex(call, file)


def _inverts_a_matrix(call: ast.Call, file: "given.Resolver") -> bool:
    inverse = given.argument(call, 2, "return_inverse")
    flat = given.is_flat(given.argument(call, 0, "ar"), file)
    return given.is_true(inverse) and given.argument(call, 4, "axis") is None and not flat


def _solves_for_vectors(call: ast.Call, file: "given.Resolver") -> bool:
    system, right = given.argument(call, 0, "a"), given.argument(call, 1, "b")
    return given.depth(system, file) == 3 and given.depth(right, file) == 2


def _accepts_a_matrix(call: ast.Call, file: "given.Resolver") -> bool:
    return any((given.depth(argument, file) or 0) > 1 for argument in call.args)


def _accepts_negatives(call: ast.Call, _: "given.Resolver") -> bool:
    return any(isinstance(node, ast.USub) for argument in call.args for node in ast.walk(argument))


def _ranks_integers(call: ast.Call, _: "given.Resolver") -> bool:
    method = given.argument(call, 1, "method")
    return isinstance(method, ast.Constant) and method.value in {"min", "max", "dense", "ordinal"}


def _rejects_literals(call: ast.Call, _: "given.Resolver") -> bool:
    return bool(call.args) and not isinstance(call.args[0], ast.Constant | ast.List | ast.Tuple)


def _accepts_halves(call: ast.Call, file: "given.Resolver") -> bool:
    return given.argument(call, 2, "dtype") is None and given.kind(given.argument(call, 0, "a"), file) == "float16"


def _transforms_last_axes(call: ast.Call, _: "given.Resolver") -> bool:
    return given.argument(call, 2, "s") is not None and given.argument(call, 3, "axes") is None


def _draws_below(least: float, parameters: int = 1) -> Condition:
    """Returns a condition: the first shape parameters are not all literals of at least `least`."""

    def condition(call: ast.Call, _: "given.Resolver") -> bool:
        shapes = [*call.args[1 : parameters + 1], *(k.value for k in call.keywords if k.arg in _SHAPE_PARAMETERS)]
        values = [shape.value for shape in shapes if isinstance(shape, ast.Constant)]
        known = [number for number in values if isinstance(number, int | float) and number >= least]
        return not shapes or len(known) < len(shapes)

    return condition


def _maps_over_keys(call: ast.Call, file: "given.Resolver") -> bool:
    return bool(call.args) and (file.resolve(call.args[0]) or "").startswith("jax.random.")


def _callback_uses_numpy(call: ast.Call, file: "given.Resolver") -> bool:
    return given.is_array_method_used(given.argument(call, 0, "callback"), file)


# Calls that give other results under a condition.
CALLS: dict[str, tuple[Condition, SilentChange]] = {
    **{f"jax.random.{name}": (_draws_below(1), _SMALL_SHAPES) for name in ("gamma", "loggamma", "dirichlet")},
    **{f"jax.random.{name}": (_draws_below(2), _SMALL_SHAPES) for name in ("chisquare", "t")},
    # These draw from a gamma distribution with the inverse of their parameter.
    **{f"jax.random.{name}": (_draws_below(inf), _SMALL_SHAPES) for name in ("ball", "generalized_normal")},
    "jax.random.beta": (_draws_below(1, parameters=2), _SMALL_SHAPES),
    **{f"jax.numpy.{name}": (_has_elements, _EMPTY) for name in ("empty", "empty_like")},
    **{f"jax.numpy.{name}": (_accepts_integers, _TRUNCATE) for name in ("floor", "ceil", "trunc", "fix")},
    **{f"jax.scipy.special.{name}": (_accepts_negatives, _GAMMA) for name in ("gamma", "gammasgn")},
    **{f"jax.{name}": (_callback_uses_numpy, _CALLBACK)
       for name in ("pure_callback", "experimental.io_callback", "debug.callback")},
    "jax.numpy.mean": (_accepts_halves, SilentChange(
        "jax", (0, 4, 17), "float16 is summed in float32", "jnp.sum(x, dtype=x.dtype) / x.size")),
    "jax.numpy.trace": (_traces_booleans_or_unsigned, TRACE),
    SHARD_MAP: (_shard_map_differentiates, CHECK_REP),
    "jax.numpy.unique": (_inverts_a_matrix, SilentChange(
        "jax", (0, 4, 24), "the inverse has the shape of the input", "ravel the inverse")),
    "jax.numpy.sign": (_accepts_complex, SilentChange(
        "jax", (0, 4, 24), "x / abs(x), and no more the sign of the real part", "jax.numpy.sign(x.real)")),
    "jax.scipy.special.logsumexp": (_signs_complex, SilentChange(
        "jax", (0, 4, 24), "the sign is x / abs(x)", "jax.numpy.sign(sign.real)")),
    "jax.numpy.geomspace": (_accepts_complex, SilentChange(
        "jax", (0, 4, 26), "another branch of the spiral", "nothing gives the old NaNs and branch")),
    "jax.numpy.linalg.solve": (_solves_for_vectors, SilentChange(
        "jax", (0, 5, 0), "b is a matrix, no more a batch of vectors", "solve(a, b[..., None]).squeeze(-1)")),
    "jax.scipy.linalg.toeplitz": (_accepts_a_matrix, SilentChange(
        "jax", (0, 4, 36), "a matrix is a batch of rows, no more flattened", "ravel the arguments")),
    "jax.scipy.stats.rankdata": (_ranks_integers, SilentChange(
        "jax", (0, 10, 0), "ranks are floating point", ".astype(int)")),
    "jax.numpy.isscalar": (_rejects_literals, SilentChange(
        "jax", (0, 4, 35), "True for every array without axes", "numpy.isscalar")),
    "jax.scipy.fft.dctn": (_transforms_last_axes, SilentChange(
        "jax", (0, 10, 0), "only the last len(s) axes are transformed", "give axes")),
    "jax.scipy.fft.idctn": (_transforms_last_axes, SilentChange(
        "jax", (0, 10, 0), "only the last len(s) axes are transformed", "give axes")),
}  # fmt: skip
# A second row of jax.random.randint, and of functions that draw with the generator "rbg".
SMALL_RANDINT = (_is_small_randint, SilentChange(
    "jax", (0, 7, 2), "other draws of 8 and 16 bits", "draw int32 and convert"))  # fmt: skip
RBG_VMAP = (_maps_over_keys, SilentChange(
    "jax", (0, 4, 26), "under vmap, rbg draws from the first key only", "jax.lax.map over the keys"))  # fmt: skip

# Names that appeared in a release: code that uses one has seen the changes up to that release.
FIRST_RELEASE = {
    "jax.tree": (0, 4, 25), "jax.export": (0, 4, 30), "jax.make_mesh": (0, 4, 34), "jax.ffi": (0, 5, 0),
    "jax.typeof": (0, 5, 3), "jax.shard_map": (0, 6, 1), "jax.lax.axis_size": (0, 6, 1), "jax.P": (0, 7, 0),
    "jax.set_mesh": (0, 7, 1), "jax.enable_x64": (0, 8, 0), "jax.reshard": (0, 9, 0),
}  # fmt: skip
