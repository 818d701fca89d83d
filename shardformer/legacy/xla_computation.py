"""`jax.xla_computation`: the HLO of a function, by `jax.jit(f).lower(...)`."""

import functools
from collections.abc import Callable, Sequence

import jax


def xla_computation(
    fun: Callable,
    static_argnums: int | Sequence[int] = (),
    backend: str | None = None,
    return_shape: bool = False,
    donate_argnums: int | Sequence[int] = (),
    **sharded,
) -> Callable:
    """Returns a function of the arguments of `fun`, or of their shapes, that returns the XLA computation.

    The results are always one tuple, as they were. `axis_env` and the parts of sharded_jit have no counterpart.
    """
    given = {name: value for name, value in sharded.items() if value}
    if set(given) - {"tuple_args", "instantiate_const_outputs"}:
        raise NotImplementedError(
            f"xla_computation takes no {', '.join(sorted(given))} on today's jax; write "
            "jax.jit(fun, in_shardings=..., out_shardings=...).lower(*arguments).compiler_ir('hlo')"
        )

    @functools.wraps(fun)
    def computation(*args, **kwargs):
        jitted = jax.jit(fun, static_argnums=static_argnums, backend=backend, donate_argnums=donate_argnums)
        lowered = jitted.lower(*args, **kwargs)
        hlo = lowered.compiler_ir("hlo")
        return (hlo, lowered.out_info) if return_shape else hlo

    return computation
