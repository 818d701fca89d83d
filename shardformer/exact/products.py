"""Products of matrices, convolutions, and the factorisations of linear algebra."""

import contextlib

import numpy as np
import scipy.linalg
from numpy import ndarray

from shardformer.exact.movement import list_windows, pad_windows
from shardformer.exact.operations import Operation, rule, working_dtype


@rule("dot_general")
def dot(operation: Operation, a, b):
    (contracted_a, contracted_b), (batch_a, batch_b) = operation.params["dimension_numbers"]
    return multiply(operation, a, b, (contracted_a, contracted_b), (batch_a, batch_b))


def multiply(operation: Operation, a: ndarray, b: ndarray, contracted, batch) -> ndarray:
    """Returns [*mesh, *batch, *the rest of a, *the rest of b]."""
    a, rest_a = _as_matrices(operation, a, 0, batch[0], contracted[0], rows_first=True)
    b, rest_b = _as_matrices(operation, b, 1, batch[1], contracted[1], rows_first=False)
    dtype = working_dtype(operation.dtype)
    if dtype.kind in "iub" and max(a.dtype.itemsize, b.dtype.itemsize) <= 2:
        # Sums of products of 16-bit integers are exact in float64, whose products are much faster.
        product = np.matmul(a.astype(np.float64), b.astype(np.float64)).astype(np.int64).astype(dtype)
    else:
        product = np.matmul(a.astype(dtype, copy=False), b.astype(dtype, copy=False))
    return product.reshape((*product.shape[:-2], *rest_a, *rest_b))


def _as_matrices(operation: Operation, x, number: int, batch, contracted, rows_first: bool):
    """Returns [*mesh, *batch, rows, contracted], or [..., contracted, columns], and the sizes of the rest."""
    k, shape = len(operation.mesh), operation.inputs[number].shape
    rest = [axis for axis in range(len(shape)) if axis not in batch and axis not in contracted]
    order = [*batch, *rest, *contracted] if rows_first else [*batch, *contracted, *rest]
    sizes = int(np.prod([shape[axis] for axis in rest])), int(np.prod([shape[axis] for axis in contracted]))
    x = x.transpose(*range(k), *(k + axis for axis in order))
    matrix = sizes if rows_first else sizes[::-1]
    return x.reshape((*x.shape[: k + len(batch)], *matrix)), tuple(shape[axis] for axis in rest)


@rule("ragged_dot_general")
def ragged_dot(operation: Operation, a, b, sizes):
    """Multiplies each group of rows by its matrix, or, for gradients, sums the products of each group's rows."""
    k, numbers = len(operation.mesh), operation.params["ragged_dot_dimension_numbers"]
    (contracted, batch), ragged = numbers.dot_dimension_numbers, tuple(numbers.lhs_ragged_dimensions)
    groups, ranks = tuple(numbers.rhs_group_dimensions), [len(x.shape) for x in operation.inputs[:2]]
    if any(batch) or any(len(axes) != 1 for axes in (*contracted, ragged)) or ranks != [2, 2 + len(groups)]:
        raise NotImplementedError(f"ragged products with {numbers}")
    rows = operation.inputs[0].shape[ragged[0]]
    ends = np.cumsum(sizes, axis=-1)[..., None]  # [*mesh, groups, 1]
    position = np.arange(rows)
    mask = (position < ends) & (position >= ends - sizes[..., None])  # [*mesh, groups, rows]
    a = np.moveaxis(a, k + ragged[0], k)  # [*mesh, rows, m]
    if not groups:
        b = np.moveaxis(b, k + contracted[1][0], k)  # [*mesh, rows, n]
        return np.matmul(np.swapaxes(np.where(mask[..., None], a[..., None, :, :], 0), -1, -2), b[..., None, :, :])
    b = np.moveaxis(b, [k + groups[0], k + contracted[1][0]], [k, k + 1])  # [*mesh, groups, m, n]
    return sum(
        np.matmul(np.where(mask[..., group, :, None], a, 0), b[..., group, :, :]) for group in range(sizes.shape[-1])
    )


@rule("conv_general_dilated")
def convolve(operation: Operation, x, kernel):
    p, k = operation.params, len(operation.mesh)
    numbers = p["dimension_numbers"]
    x = x.transpose(*range(k), *(k + axis for axis in numbers.lhs_spec))  # [*mesh, N, C, *space]
    kernel = kernel.transpose(*range(k), *(k + axis for axis in numbers.rhs_spec))  # [*mesh, O, I, *space]
    x, kernel = (each.astype(working_dtype(operation.dtype), copy=False) for each in (x, kernel))
    sizes = tuple(operation.shape[axis] for axis in numbers.out_spec[2:])
    padded = pad_windows(x, p["padding"], p["lhs_dilation"], 0)
    groups = p["feature_group_count"] * p["batch_group_count"]
    padded = _split_groups(padded, k + 1 if p["feature_group_count"] > 1 else k, groups, k)
    kernel = _split_groups(kernel, k, groups, k)
    result = np.zeros((), padded.dtype)
    for at, part in list_windows(padded, kernel.shape[k + 3 :], p["window_strides"], p["rhs_dilation"], sizes):
        rows = part.reshape((*part.shape[: k + 3], -1))  # [*mesh, G, N, C, points]
        weight = kernel[(..., *at)]  # [*mesh, G, O, I]
        result = result + np.matmul(weight[..., None, :, :], rows)  # [*mesh, G, N, O, points]
    groups_first = np.moveaxis(result, k, k + 1)  # [*mesh, N, G, O, points]
    count = result.shape[k + 1] if p["batch_group_count"] > 1 else groups_first.shape[k]
    outputs = groups_first.shape[k + 1] * groups_first.shape[k + 2]
    result = groups_first.reshape((*groups_first.shape[:k], count, outputs, *sizes))
    return result.transpose(*range(k), *(k + int(axis) for axis in np.argsort(numbers.out_spec)))


def _split_groups(x: ndarray, axis: int, groups: int, k: int) -> ndarray:
    """Returns the array with the groups of an axis before its own axes."""
    x = x.reshape((*x.shape[:axis], groups, x.shape[axis] // groups, *x.shape[axis + 1 :]))
    return np.moveaxis(x, axis, k)


# Linear algebra: NumPy's functions work on the last two axes.


@rule("cholesky")
def cholesky(operation: Operation, x):
    """Reads the lower triangle; the factor of a matrix that is not positive definite is NaN."""
    symmetric = np.tril(x) + np.conj(np.swapaxes(np.tril(x, -1), -1, -2))
    result = np.full_like(symmetric, np.nan)
    for at in np.ndindex(x.shape[:-2]):
        with contextlib.suppress(np.linalg.LinAlgError):
            result[at] = np.linalg.cholesky(symmetric[at])
    return result


@rule("triangular_solve")
def solve_triangular(operation: Operation, a, b):
    p = operation.params
    a = np.tril(a) if p["lower"] else np.triu(a)
    if p["unit_diagonal"]:
        size = a.shape[-1]
        a = np.where(np.eye(size, dtype=bool), 1.0, a)
    if p["transpose_a"]:
        a = np.swapaxes(a, -1, -2)
    if p["conjugate_a"]:
        a = np.conj(a)
    if p["left_side"]:
        return np.linalg.solve(a, b)
    return np.swapaxes(np.linalg.solve(np.swapaxes(a, -1, -2), np.swapaxes(b, -1, -2)), -1, -2)


@rule("eigh")
def eigh(operation: Operation, x):
    values, vectors = np.linalg.eigh(x, "L" if operation.params["lower"] else "U")
    return vectors, values


@rule("svd")
def svd(operation: Operation, x):
    full = operation.params["full_matrices"]
    if not operation.params["compute_uv"]:
        return (np.linalg.svd(x, full, compute_uv=False),)
    u, s, v = np.linalg.svd(x, full)
    return s, u, v


@rule("qr")
def qr(operation: Operation, x):
    if operation.params["pivoting"]:
        raise NotImplementedError("pivoting")
    return tuple(np.linalg.qr(x, "complete" if operation.params["full_matrices"] else "reduced"))


@rule("lu")
def lu(operation: Operation, x):
    """Returns both triangles as one matrix, the exchanges of rows, and the permutation that they make."""
    rows, columns = x.shape[-2:]
    result = np.empty_like(x)
    pivots = np.empty((*x.shape[:-2], min(rows, columns)), np.int32)
    permutation = np.broadcast_to(np.arange(rows, dtype=np.int32), (*x.shape[:-2], rows)).copy()
    for at in np.ndindex(x.shape[:-2]):
        result[at], pivots[at] = scipy.linalg.lu_factor(x[at], check_finite=False)
        for row, other in enumerate(pivots[at]):
            permutation[(*at, [row, other])] = permutation[(*at, [other, row])]
    return result, pivots, permutation


@rule("fft")
def fft(operation: Operation, x):
    kind, lengths = operation.params["fft_type"].name, operation.params["fft_lengths"]
    axes = range(-len(lengths), 0)
    if kind == "IRFFT":
        return np.fft.irfftn(x, lengths, axes)
    if kind == "RFFT":
        return np.fft.rfftn(x, lengths, axes)
    return np.fft.ifftn(x, lengths, axes) if kind == "IFFT" else np.fft.fftn(x, lengths, axes)
