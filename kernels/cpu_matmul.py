"""The GEMM of the profile `cpu-fp32-v1`: fp32 ATen products whose row bits do not depend on the batch."""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

BLOCK_ROWS = 32
"""Rows of every product: BLAS libraries take other code for few rows, so there never are few."""

CHUNK_K = 128
"""Part of the profile: k runs in chunks of this length, zero-padded.

Up to K 192 an MKL product was one chain of FMAs for each output, with AVX2 and AVX-512, at 1 to 32 threads.
Longer ones are cut where the library likes: at 192 with AVX2, by the thread count with AVX-512.
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
    rows, size_k = a.shape
    by_k = weight.t() if transpose_weight else weight
    columns = by_k.shape[1]
    padded_columns = _whole(columns, ALIGNMENT)
    a_blocks = a.new_zeros(_whole(rows, BLOCK_ROWS), _whole(size_k, CHUNK_K), dtype=torch.float32)
    a_blocks[:rows, :size_k] = a
    a_blocks = a_blocks.unflatten(0, (-1, BLOCK_ROWS))
    # One chunk [CHUNK_K, N], stored as the weight is. The whole weight in fp32 took twice the time at T = 1.
    if transpose_weight:
        weight_chunk = a_blocks.new_zeros(padded_columns, CHUNK_K).t()
    else:
        weight_chunk = a_blocks.new_zeros(CHUNK_K, padded_columns)
    total = a_blocks.new_zeros(a_blocks.shape[0], BLOCK_ROWS, padded_columns)
    chunk_sum = torch.empty_like(total)
    with _ieee_fp32_products():
        for start in range(0, size_k, CHUNK_K):
            length = min(CHUNK_K, size_k - start)
            weight_chunk[:length, :columns] = by_k[start : start + length]
            weight_chunk[length:].zero_()
            a_chunk = a_blocks[:, :, start : start + CHUNK_K]
            torch.bmm(a_chunk, weight_chunk.expand(a_blocks.shape[0], -1, -1), out=chunk_sum)
            total += chunk_sum
    return total.flatten(0, 1)[:rows, :columns].contiguous()


def _whole(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


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
