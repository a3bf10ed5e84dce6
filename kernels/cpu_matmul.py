"""The GEMM of the profile `cpu-fp32-v1`: fp32 ATen products whose row bits do not depend on the batch."""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

BLOCK_ROWS = 64
"""Rows of every ATen call. Part of the profile: another height may select another BLAS code path."""

ALIGNMENT = 64
"""N and K are zero-padded to a multiple of this. Part of the profile.

A row's bits depended on its position inside the block when N or K was not a multiple of 8 or 16 (K 50 with
one thread, N 37 with three or more threads; BLAS edge kernels), and never when both were multiples of 16
(`tests/test_bits.py`).
"""


def blocked_matmul(a: Tensor, weight: Tensor, *, transpose_weight: bool) -> Tensor:
    """`a @ weight.T` or `a @ weight` in fp32, the same bits for a row whatever the other rows are.

    Every product is one `[BLOCK_ROWS, K] x [K, N]` call on freshly laid out operands, so neither the number
    of rows, nor the strides of the caller's tensors, nor a row's neighbours reach the BLAS library's choice
    of code.

    Args:
        a: [M, K], any floating dtype and strides.
        weight: [N, K] if `transpose_weight`, else [K, N]; any floating dtype and strides.
        transpose_weight: whether `weight` is stored with the reduction axis last.

    Returns:
        [M, N] fp32, row-major.
    """
    rows = a.shape[0]
    columns = weight.shape[0] if transpose_weight else weight.shape[1]
    a = _zero_padded(a, BLOCK_ROWS)
    weight = _zero_padded(weight, ALIGNMENT)
    if transpose_weight:
        weight = weight.t()
    out = a.new_empty(a.shape[0], weight.shape[1])
    with _ieee_fp32_products():
        for start in range(0, a.shape[0], BLOCK_ROWS):
            block = slice(start, start + BLOCK_ROWS)
            torch.mm(a[block], weight, out=out[block])
    return out[:rows, :columns].contiguous()


def _zero_padded(matrix: Tensor, row_multiple: int) -> Tensor:
    """An fp32 copy of `matrix`, row-major, rows and columns padded with zeros to whole multiples."""
    rows, columns = matrix.shape
    padded_rows = -(-rows // row_multiple) * row_multiple
    padded_columns = -(-columns // ALIGNMENT) * ALIGNMENT
    padded = matrix.new_empty(padded_rows, padded_columns, dtype=torch.float32)
    padded[:rows, :columns] = matrix
    padded[rows:].zero_()
    padded[:rows, columns:].zero_()
    return padded


@contextlib.contextmanager
def _ieee_fp32_products() -> Iterator[None]:
    """Keep `torch.set_float32_matmul_precision`, which users set for their GPU, away from the CPU's bits."""
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
