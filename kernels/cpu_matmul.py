"""The GEMM of the profile `cpu-fp32-v1`: fp32 ATen products whose row bits do not depend on the batch."""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

BLOCK_ROWS = 64
"""Rows of every product. Part of the profile: another height may select another BLAS code path."""

ALIGNMENT = 64
"""N and K are zero-padded to a multiple of this. Part of the profile.

A row's bits depended on its position inside the block when N or K was not a multiple of 8 or 16, with one
thread even (K 50): BLAS kernels treat the edges of a matrix otherwise.
"""


def blocked_matmul(a: Tensor, weight: Tensor, *, transpose_weight: bool) -> Tensor:
    """`a @ weight.T` or `a @ weight` in fp32, the same bits for a row whatever the other rows are.

    Every block of rows is one single-threaded BLAS product of one shape, on operands laid out anew: neither
    the number of rows, nor the caller's strides, nor the thread count reach the library's choice of code.
    ATen has one call for such a batch, the 1 x 1 convolution without im2col: it shares the images among
    threads, and a product inside a parallel region runs on one thread. `torch.mm` and `torch.bmm` let the
    library thread each product, and then a row's bits depend on its position in the block or on the number of
    blocks (AVX-512, 16 threads, K 1024, N 64; `tests/test_bits.py` covers the shapes).

    Args:
        a: [M, K], any floating dtype and strides.
        weight: [N, K] if `transpose_weight`, else [K, N]; any floating dtype and strides.
        transpose_weight: whether `weight` is stored with the reduction axis last.

    Returns:
        [M, N] fp32, row-major.
    """
    rows, columns = a.shape[0], weight.shape[0] if transpose_weight else weight.shape[1]
    blocks = max(2, -(-rows // BLOCK_ROWS))  # a lone block would run outside the parallel region
    a = _zero_padded(a, blocks * BLOCK_ROWS)
    weight = _zero_padded(weight if transpose_weight else weight.t(), _aligned(columns))
    images = a.view(blocks, 1, BLOCK_ROWS, a.shape[1]).permute(0, 3, 1, 2)
    filters = weight[:, :, None, None]
    with _ieee_fp32_products():
        out = torch.ops.aten._slow_conv2d_forward(images, filters, [1, 1], None, [1, 1], [0, 0])
    out = out.permute(0, 2, 3, 1).reshape(blocks * BLOCK_ROWS, weight.shape[0])
    return out[:rows, :columns].contiguous()


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _zero_padded(matrix: Tensor, padded_rows: int) -> Tensor:
    """A row-major fp32 copy of `matrix` with zeros below it, and beside it up to an aligned width."""
    rows, columns = matrix.shape
    padded = matrix.new_empty(padded_rows, _aligned(columns), dtype=torch.float32)
    padded[:rows, :columns] = matrix
    padded[rows:].zero_()
    padded[:rows, columns:].zero_()
    return padded


@contextlib.contextmanager
def _ieee_fp32_products() -> Iterator[None]:
    """Keep `torch.set_float32_matmul_precision`, which users set for their GPU, away from the CPU's bits.

    With "medium", oneDNN took half of the outputs to other bits on an AVX-512 machine.
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
