"""Dispatch and combine of the MoE layer: tokens to expert-major rows, quantised, and back in slot order."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import launch
from .moe_routing import BLOCK, Routing, expert_tile
from .moe_tiles import quantize_tile
from .operands import activation
from .tiles import row_offsets_tile

BLOCK_H = 1024


@triton.jit(do_not_specialize=["tokens"])
def _moe_dispatch_kernel(
    x_ptr,
    x_scale_ptr,
    topk_idx_ptr,
    topk_weights_ptr,
    rows_ptr,
    row_scales_ptr,
    row_weights_ptr,
    slot_rows_ptr,
    block_offsets_ptr,
    ranks_ptr,
    offsets_ptr,
    tokens,
    hidden,
    experts,
    stride_xt,
    stride_xh,
    stride_st,
    stride_sg,
    stride_it,
    stride_ik,
    stride_wt,
    stride_wk,
    TOP_K: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BINS: tl.constexpr,
):
    """Program (t, b): columns b * BLOCK_H.. of token t to the rows of its slots.

    Quantises where rows have scales and x has none; copies codes and scales where both have; else copies.
    """
    token = tl.program_id(0)
    slots = tl.arange(0, SLOTS)
    entries = token * TOP_K + slots
    count = tokens * TOP_K
    expert = expert_tile(topk_idx_ptr, entries, count, experts, TOP_K, stride_it, stride_ik)
    valid = (slots < TOP_K) & (expert < experts)
    row = tl.load(offsets_ptr + expert, mask=valid, other=0)
    row += tl.load(block_offsets_ptr + (entries // BLOCK) * BINS + expert, mask=valid, other=0)
    row += tl.load(ranks_ptr + entries, mask=valid, other=0)
    row = tl.where(valid, row, -1)
    if tl.program_id(1) == 0:
        tl.store(slot_rows_ptr + entries, row, mask=slots < TOP_K)
        weights = tl.load(
            topk_weights_ptr + token.to(tl.int64) * stride_wt + slots * stride_wk, mask=valid, other=0.0
        )
        tl.store(row_weights_ptr + row, weights, mask=valid)

    columns = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    groups = tl.program_id(1) * (BLOCK_H // 128) + tl.arange(0, BLOCK_H // 128)
    group_count = tl.cdiv(hidden, 128)
    pointers = x_ptr + token.to(tl.int64) * stride_xt + columns.to(tl.int64) * stride_xh
    value = tl.load(pointers, mask=columns < hidden, other=0.0)
    if row_scales_ptr is not None:
        if x_scale_ptr is None:
            value, scale = quantize_tile(tl.reshape(value.to(tl.float32), (1, BLOCK_H)), 128)
            value, scale = tl.reshape(value, (BLOCK_H,)), tl.reshape(scale, (BLOCK_H // 128,))
        else:
            pointers = x_scale_ptr + token.to(tl.int64) * stride_st + groups * stride_sg
            scale = tl.load(pointers, mask=groups < group_count, other=0.0)
    rows = tl.num_programs(0) * TOP_K
    for slot in tl.static_range(TOP_K):
        target = tl.sum(tl.where(slots == slot, row, 0), 0)
        pointers = rows_ptr + target.to(tl.int64) * hidden + columns
        tl.store(pointers, value, mask=(columns < hidden) & (target >= 0))
        if row_scales_ptr is not None:
            pointers = row_scales_ptr + groups.to(tl.int64) * rows + target
            tl.store(pointers, scale, mask=(groups < group_count) & (target >= 0))


@triton.jit
def _moe_combine_kernel(rows_ptr, slot_rows_ptr, y_ptr, hidden, TOP_K: tl.constexpr, BLOCK_H: tl.constexpr):
    """Program (t, b): the fp32 sum of token t's rows in slot order from +0, rounded once."""
    token = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    total = tl.zeros((BLOCK_H,), tl.float32)
    for slot in tl.static_range(TOP_K):
        row = tl.load(slot_rows_ptr + token * TOP_K + slot)
        pointers = rows_ptr + row.to(tl.int64) * hidden + columns
        value = tl.load(pointers, mask=(columns < hidden) & (row >= 0), other=0.0).to(tl.float32)
        total = tl.where(row >= 0, total + value, total)
    pointers = y_ptr + token.to(tl.int64) * hidden + columns
    tl.store(pointers, total.to(y_ptr.dtype.element_ty), mask=columns < hidden)


@triton.jit(do_not_specialize=["count"])
def _moe_combine_weights_kernel(
    partials_ptr, slot_rows_ptr, dweights_ptr, count, groups, BLOCK: tl.constexpr
):
    """One program per `BLOCK` entries: sums of 64 columns added ascending from +0; 0 for a masked slot."""
    entries = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(slot_rows_ptr + entries, mask=entries < count, other=-1)
    total = tl.zeros((BLOCK,), tl.float32)
    for group in range(groups):
        pointers = partials_ptr + group.to(tl.int64) * count + row
        total += tl.load(pointers, mask=row >= 0, other=0.0)
    tl.store(dweights_ptr + entries, total, mask=entries < count)


@triton.jit
def _moe_quantize_kernel(
    x_ptr,
    row_offsets_ptr,
    codes_ptr,
    scales_ptr,
    rows,
    columns,
    stride_row,
    stride_column,
    GROUP: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Program (r, b): columns b * BLOCK_H.. of row r."""
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    offset = row_offsets_tile(row, rows, stride_row, row_offsets_ptr)
    x = tl.load(x_ptr + offset + column.to(tl.int64) * stride_column, mask=column < columns, other=0.0)
    codes, scales = quantize_tile(tl.reshape(x.to(tl.float32), (1, BLOCK_H)), GROUP)
    tl.store(
        codes_ptr + row.to(tl.int64) * columns + column, tl.reshape(codes, (BLOCK_H,)), mask=column < columns
    )
    group = tl.program_id(1) * (BLOCK_H // GROUP) + tl.arange(0, BLOCK_H // GROUP)
    groups = tl.cdiv(columns, GROUP)
    scales = tl.reshape(scales, (BLOCK_H // GROUP,))
    tl.store(scales_ptr + row.to(tl.int64) * groups + group, scales, mask=group < groups)


def launch_moe_dispatch(
    x: Tensor, x_scale: Tensor | None, topk_idx: Tensor, topk_weights: Tensor, routing: Routing, *, fp8: bool
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """(rows, row_scales, row_weights, slot_rows) of the expert-major order.

    rows: [R, H], e4m3 with `fp8`, else x's dtype; row_scales: [ceil(H/128), R] fp32 or `None`; row_weights:
    [R] fp32; slot_rows: [T, top_k] int32, -1 for a masked slot. Rows that no slot has stay uninitialised.

    Args:
        x: [T, H] bf16, or e4m3 with x_scale [T, ceil(H/128)] fp32; any strides.
        topk_idx, topk_weights: [T, top_k], any strides.
        routing: of topk_idx.
    """
    (tokens, hidden), top_k = x.shape, topk_idx.shape[1]
    count = tokens * top_k
    rows = x.new_empty(count, hidden, dtype=torch.float8_e4m3fn if fp8 else x.dtype)
    row_scales = x.new_empty(triton.cdiv(hidden, 128), count, dtype=torch.float32) if fp8 else None
    row_weights = topk_weights.new_empty(count)
    slot_rows = routing.ranks.new_empty(tokens, top_k)
    launch(
        _moe_dispatch_kernel,
        (tokens, triton.cdiv(hidden, BLOCK_H)),
        x,
        x_scale,
        topk_idx,
        topk_weights,
        rows,
        row_scales,
        row_weights,
        slot_rows,
        routing.block_offsets,
        routing.ranks,
        routing.offsets,
        tokens,
        hidden,
        routing.offsets.numel(),
        *x.stride(),
        *((0, 0) if x_scale is None else x_scale.stride()),
        *topk_idx.stride(),
        *topk_weights.stride(),
        TOP_K=top_k,
        SLOTS=triton.next_power_of_2(top_k),
        BLOCK=BLOCK,
        BLOCK_H=BLOCK_H,
        BINS=routing.bins,
        num_warps=4,
    )
    return rows, row_scales, row_weights, slot_rows


def launch_moe_combine(rows: Tensor, slot_rows: Tensor) -> Tensor:
    """[T, H] bf16, the sums of rows [R, H] bf16 in slot order."""
    (tokens, top_k), hidden = slot_rows.shape, rows.shape[1]
    y = rows.new_empty(tokens, hidden)
    grid = (tokens, triton.cdiv(hidden, BLOCK_H))
    launch(_moe_combine_kernel, grid, rows, slot_rows, y, hidden, TOP_K=top_k, BLOCK_H=BLOCK_H, num_warps=4)
    return y


def launch_moe_combine_weights(partials: Tensor, slot_rows: Tensor) -> Tensor:
    """d topk_weights [T, top_k] fp32 from partials [ceil(I/64), R] fp32."""
    dweights = partials.new_empty(slot_rows.shape)
    count, block = slot_rows.numel(), 128
    grid = (triton.cdiv(count, block),)
    launch(
        _moe_combine_weights_kernel,
        grid,
        partials,
        slot_rows,
        dweights,
        count,
        partials.shape[0],
        BLOCK=block,
        num_warps=4,
    )
    return dweights


def launch_quantize(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """(codes [..., K] e4m3, scales [..., ceil(K / group)] fp32) of x [..., K]; group 64 or 128."""
    operand = activation(x)
    codes = x.new_empty(x.shape, dtype=torch.float8_e4m3fn)
    scales = x.new_empty((*x.shape[:-1], triton.cdiv(operand.columns, group)), dtype=torch.float32)
    with torch.cuda.device(x.device):
        launch(
            _moe_quantize_kernel,
            (operand.rows, triton.cdiv(operand.columns, BLOCK_H)),
            x,
            operand.row_offsets,
            codes,
            scales,
            operand.rows,
            operand.columns,
            operand.row_stride,
            operand.column_stride,
            GROUP=group,
            BLOCK_H=BLOCK_H,
            num_warps=4,
        )
    return codes, scales
