"""Operations of one instance: scatter, sort, FFT, linear algebra, loops, custom rules and random numbers.

Each is a function of a vector h [4], the constants of operation_programs.py, the instance's index along an axis, and
four random numbers.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, random

EYE = np.eye(4, dtype=np.float32)
DIAGONAL = np.diag(np.arange(4.0)).astype(np.float32)
ORDER = np.array([2, 0, 3, 1])
REPEATED = np.array([1, 3, 1, 0])


# Scatter and gather


def add_at_repeated_positions(h, c, index, numbers):
    return h.at[REPEATED].add(h * numbers)


def set_at_own_position(h, c, index, numbers):
    return h.at[index % 4].set(c.v[0]) + h


def multiply_at(h, c, index, numbers):
    return h.at[ORDER[:2]].multiply(c.v[:2], unique_indices=True)


def maximum_at(h, c, index, numbers):
    return h.at[ORDER].max(numbers * c.v)


def update_a_slice(h, c, index, numbers):
    return lax.dynamic_update_slice(h, jnp.sin(h[1:3]), (index % 3,))


def take_a_slice(h, c, index, numbers):
    return h.at[:2].add(lax.dynamic_slice(c.w @ h, (index % 3,), (2,)))


def sum_segments(h, c, index, numbers):
    return jax.ops.segment_sum(h * numbers, (jnp.arange(4) + index) % 3, 4) + h


def look_up_row(h, c, index, numbers):
    return c.w[index % 4] * h


# Order


def sort(h, c, index, numbers):
    return jnp.sort(h) / 2 + h


def sort_by_key(h, c, index, numbers):
    return lax.sort((numbers * h, h), num_keys=1)[1]


def choose_by_order(h, c, index, numbers):
    return c.v[jnp.argsort(h)] * h


def take_largest(h, c, index, numbers):
    values, positions = lax.top_k(h, 2)
    return h.at[positions].add(values)


def take_median(h, c, index, numbers):
    return h * jnp.median(h) + numbers


def accumulate(h, c, index, numbers):
    return jnp.cumsum(h) / 2 + lax.cummax(h) - jnp.cumprod(h * numbers) + lax.cumlogsumexp(h, reverse=True)


def accumulate_associatively(h, c, index, numbers):
    return lax.associative_scan(lambda x, y: x * y + y, h * numbers)


# FFT


def filter_frequencies(h, c, index, numbers):
    return jnp.fft.irfft(jnp.fft.rfft(h) * numbers[:3], 4)


def fourier_transform(h, c, index, numbers):
    z = jnp.fft.fft(h + 1j * c.v)
    return z.real + z.imag * numbers


# Linear algebra


def positive(h, c):
    """A matrix with eigenvalues of at least 2."""
    return 2 * EYE + jnp.outer(h, h) + c.w.T @ c.w / 8


def factor(h, c, index, numbers):
    return jnp.linalg.cholesky(positive(h, c)) @ numbers


def solve(h, c, index, numbers):
    return jnp.linalg.solve(positive(h, c) + jnp.triu(c.w) / 4, numbers + h)


def solve_triangular(h, c, index, numbers):
    return jax.scipy.linalg.solve_triangular(3 * EYE + jnp.tril(jnp.outer(h, c.v)), h, lower=True)


def spectral_function(h, c, index, numbers):
    values, vectors = jnp.linalg.eigh(DIAGONAL + positive(h / 8, c))
    return (vectors * jnp.sin(values)) @ vectors.T @ h


def log_determinant(h, c, index, numbers):
    return jnp.linalg.slogdet(positive(h, c))[1] * numbers + h


def orthogonalize(h, c, index, numbers):
    q, r = jnp.linalg.qr(positive(h, c))
    return jnp.abs(q) @ numbers + jnp.abs(jnp.diagonal(r)) / 4


# Loops and branches of one instance


def loop_as_often_as_the_index(h, c, index, numbers):
    return h + lax.fori_loop(0, 1 + index % 3, lambda i, x: jnp.sin(x * numbers + i), lax.stop_gradient(h))


def loop_until_small(h, c, index, numbers):
    small = lax.while_loop(lambda x: jnp.abs(x).max() > 0.3, lambda x: x / 2, lax.stop_gradient(h))
    return h * numbers + small


def branch_on_the_index(h, c, index, numbers):
    return lax.switch(index % 3, [jnp.sin, lambda h: h * numbers, lambda h: c.w @ h], h)


def branch_on_the_value(h, c, index, numbers):
    return lax.cond(h.sum() > 0, lambda h: h * c.v, lambda h: jnp.cos(h), h)


def scan_rows(h, c, index, numbers):
    return lax.scan(lambda h, row: (jnp.tanh(h + row), h[0]), h, c.w)[0]


# Custom rules


@jax.custom_jvp
def cube(h, numbers):
    return h**3 * numbers


@cube.defjvp
def differentiate_cube(primals, tangents):
    """The true derivative: jax.lax.map loses any other rule in a second derivative."""
    (h, numbers), (tangent, other) = primals, tangents
    return cube(h, numbers), 3 * h**2 * numbers * tangent + h**3 * other


def use_custom_jvp(h, c, index, numbers):
    return cube(h, c.v)


@jax.custom_vjp
def clip_gradient(h, scale):
    return h * scale


clip_gradient.defvjp(
    lambda h, scale: (h * scale, (h, scale)), lambda kept, g: (jnp.clip(g, -0.5, 0.5) * kept[1], kept[0] * g)
)


def use_custom_vjp(h, c, index, numbers):
    return clip_gradient(h, c.v) + numbers


def solve_implicitly(h, c, index, numbers):
    matrix = 3 * EYE + jnp.outer(c.v, c.v)
    return lax.custom_linear_solve(lambda x: matrix @ x, h, lambda _, b: jnp.linalg.solve(matrix, b), symmetric=True)


# Random numbers


def draw_everywhere_alike(h, c, index, numbers):
    return h * random.uniform(c.new, (4,))


def draw_by_index(h, c, index, numbers):
    return h + random.normal(random.fold_in(c.new, index), (4,))


def draw_from_old_keys(h, c, index, numbers):
    first, second = random.split(c.old)
    return jnp.where(random.bernoulli(first, 0.5, (4,)), h, h * random.uniform(second, (4,)))


def draw_integers(h, c, index, numbers):
    return h[random.randint(c.old, (4,), 0, 4)] + numbers


def permute_randomly(h, c, index, numbers):
    return random.permutation(c.old, h) + random.permutation(random.fold_in(c.new, index), h)


# Convolutions and windows


def convolve(h, c, index, numbers):
    inputs, kernel = h.reshape(1, 4, 1), c.w[:2].reshape(2, 1, 4)
    form = ("NWC", "WIO", "NWC")
    return lax.conv_general_dilated(inputs, kernel, (1,), "VALID", dimension_numbers=form).sum(1).reshape(4)


def pool(h, c, index, numbers):
    return lax.reduce_window(h, 0.0, lax.add, (2,), (1,), "SAME") * numbers


def multiply(h, c, index, numbers):
    return jnp.tanh(c.w @ h) + c.v * h


OPERATIONS = [
    function
    for name, function in list(globals().items())
    if callable(function)
    and getattr(function, "__code__", None)
    and function.__code__.co_varnames[:4] == ("h", "c", "index", "numbers")
]
