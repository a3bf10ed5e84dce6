"""The GEMM of the profile `cpu-fp32-v1`: fp32 ATen products whose row bits do not depend on the batch."""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

BLOCK_ROWS = 32
"""Rows of every product: BLAS libraries take other code for few rows, so there never are few."""

CHUNK_K = 128
"""Part of the profile: k runs in chunks of this length, zero-padded.

Up to K 192 the product was one chain of FMAs for each output on every machine, at every thread count; longer
ones are cut where the library likes (192 with AVX2; by the thread count with AVX-512).
"""

ALIGNMENT = 64
"""N is zero-padded to a multiple of this: BLAS libraries take other code at the edges of a matrix."""


def blocked_matmul(a: Tensor, weight: Tensor, *, transpose_weight: bool) -> Tensor:
    """`a @ weight.T` or `a @ weight` in fp32, the same bits for a row whatever the other rows are.

    Each output is a sum over chunks of `CHUNK_K`, ascending from +0; each chunk is one chain of FMAs,
    ascending from +0. That order is what the BLAS library computes for products of this form
    (`tests/test_bits.py` compares the bits with the chain itself), while the order of one long product
    depends on the machine, the thread count, the number of rows and a row's position.

    Args:
        a: [M, K], any floating dtype and strides.
        weight: [N, K] if `transpose_weight`, else [K, N]; any floating dtype and strides.
        transpose_weight: whether `weight` is stored with the reduction axis last.

    Returns:
        [M, N] fp32, row-major.
    """
    rows, columns = a.shape[0], weight.shape[0] if transpose_weight else weight.shape[1]
    a = _zero_padded(a, BLOCK_ROWS, CHUNK_K).unflatten(0, (-1, BLOCK_ROWS))
    if transpose_weight:
        weight = _zero_padded(weight, ALIGNMENT, CHUNK_K).t()
    else:
        weight = _zero_padded(weight, CHUNK_K, ALIGNMENT)
    total = a.new_zeros(a.shape[0], BLOCK_ROWS, weight.shape[1])
    chunk_sum = torch.empty_like(total)
    with _ieee_fp32_products():
        for start in range(0, weight.shape[0], CHUNK_K):
            chunk = slice(start, start + CHUNK_K)
            torch.bmm(a[:, :, chunk], weight[chunk].expand(a.shape[0], -1, -1), out=chunk_sum)
            total += chunk_sum
    return total.flatten(0, 1)[:rows, :columns].contiguous()


def _zero_padded(matrix: Tensor, row_multiple: int, column_multiple: int) -> Tensor:
    """A row-major fp32 copy of `matrix`, its sizes padded with zeros to whole multiples."""
    rows, columns = matrix.shape
    padded_rows, padded_columns = -(-rows // row_multiple), -(-columns // column_multiple)
    shape = (padded_rows * row_multiple, padded_columns * column_multiple)
    padded = matrix.new_empty(shape, dtype=torch.float32)
    padded[:rows, :columns] = matrix
    padded[rows:].zero_()
    padded[:rows, columns:].zero_()
    return padded


@contextlib.contextmanager
def _ieee_fp32_products() -> Iterator[None]:
    """Keep `torch.set_float32_matmul_precision`, which users set for their GPU, away from the CPU's bits.

    With "medium", oneDNN changed the bits of most outputs on an AVX-512 machine.
    """
    matmul = torch.backends.mkldnn.matmul
    saved = matmul.fp32_precision
    if saved in ("none", "ieee"):
        yield
        return
    matmul.fp32_precision = "ieee"
    try:
        yield
    finally:
        matmul.fp32_precision = saved
