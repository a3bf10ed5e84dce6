"""Exponent ranges of an operand's rows or columns: by them the device decides how to sum a strict product."""

import torch
import triton
import triton.language as tl

from .launch import launch
from .operands import Operand
from .tiles import load_tile

BLOCK_ROWS, BLOCK_K = 16, 256


@triton.jit(do_not_specialize=["row_count"])
def _operand_range_kernel(
    source_ptr,
    row_offsets_ptr,
    range_ptr,
    row_count,
    size_k,
    row_stride,
    k_stride,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program per `BLOCK_ROWS` rows of [row_count, size_k] bf16.

    range_ptr: [2, row_count] int32: the lowest biased exponent of a row's nonzero finite values (a subnormal
    has 1; 255 if there is none) and the highest one of its finite values.
    """
    row = tl.program_id(0) * BLOCK_ROWS
    source = (source_ptr, row_count, size_k, row_stride, k_stride, row_offsets_ptr)
    low = tl.full((BLOCK_ROWS,), 255, tl.int32)
    high = tl.zeros((BLOCK_ROWS,), tl.int32)
    for k in range(0, size_k, BLOCK_K):
        bits = load_tile(source, row, k, BLOCK_ROWS, BLOCK_K, False).to(tl.int16, bitcast=True).to(tl.int32)
        exponent = (bits >> 7) & 0xFF
        finite = exponent != 255
        nonzero = (bits & 0x7FFF) != 0
        low = tl.minimum(low, tl.min(tl.where(finite & nonzero, tl.maximum(exponent, 1), 255), 1))
        high = tl.maximum(high, tl.max(tl.where(finite, exponent, 0), 1))
    rows = row + tl.arange(0, BLOCK_ROWS)
    tl.store(range_ptr + rows, low, mask=rows < row_count)
    tl.store(range_ptr + row_count + rows, high, mask=rows < row_count)


def with_range(operand: Operand, *, along_rows: bool) -> Operand:
    """The operand with its exponent ranges: of each row over its columns, or of each column over its rows.

    Args:
        operand: bf16.
        along_rows: whether k is the operand's column axis.
    """
    tensor, rows, columns, row_stride, column_stride, row_offsets, _ = operand
    if not along_rows:
        rows, columns, row_stride, column_stride = columns, rows, column_stride, row_stride
    exponent_range = torch.empty(2, rows, dtype=torch.int32, device=tensor.device)
    launch(
        _operand_range_kernel,
        (triton.cdiv(rows, BLOCK_ROWS),),
        tensor,
        row_offsets,
        exponent_range,
        rows,
        columns,
        row_stride,
        column_stride,
        BLOCK_ROWS=BLOCK_ROWS,
        BLOCK_K=BLOCK_K,
        num_warps=4,
    )
    return operand._replace(exponent_range=exponent_range)
