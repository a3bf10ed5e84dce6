"""The MoE layer's backward of SwiGLU: da' in a grouped product, g and u computed again, all in one kernel."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import moe_configs
from .launch import device_facts, launch
from .moe_operands import ExpertWeight
from .moe_routing import Routing
from .moe_tiles import expert_tile_ends, locate_tile, moe_gate_up_tile, moe_product_tile, pair_tree_tile
from .operands import matrix
from .tiles import mul_rn, swiglu_backward_tile, swiglu_tile, tile_position


@triton.jit(do_not_specialize=["rows"])
def _moe_swiglu_backward_kernel(
    dy,
    x,
    x_scale_ptr,
    w,
    w_scale_ptr,
    w_down,
    w_down_scale_ptr,
    dz_ptr,
    partials_ptr,
    row_weights_ptr,
    counts_ptr,
    offsets_ptr,
    rows,
    experts,
    hidden,
    intermediate,
    limit,
    stride_we,
    stride_wn,
    stride_wk,
    stride_se,
    stride_sn,
    stride_de,
    stride_dh,
    stride_di,
    stride_te,
    stride_th,
    ALIGNED: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    SWAP: tl.constexpr,
    TMA: tl.constexpr,
):
    """Persistent over the row tiles of all experts times the column tiles of dgate [rows, intermediate].

    dz_ptr: [rows, 2 * intermediate] for [dgate | dup], or `None`. partials_ptr: [ceil(intermediate / 64),
    rows] for the sums of da' * a over 64 columns, or `None`.
    """
    x = (x, rows, hidden, hidden, 1, None, None)
    dy = (dy, rows, hidden, hidden, 1, None, None)
    w = (w, 2 * intermediate, hidden, stride_we, stride_wn, stride_wk, w_scale_ptr, stride_se, stride_sn)
    w_down = (
        w_down,
        hidden,
        intermediate,
        stride_de,
        stride_dh,
        stride_di,
        w_down_scale_ptr,
        stride_te,
        stride_th,
    )
    ends = expert_tile_ends(counts_ptr, experts, BLOCK_M, BINS)
    row_tiles = tl.max(ends, 0)
    column_tiles = tl.cdiv(intermediate, BLOCK_N)
    for tile in tl.range(tl.program_id(0), row_tiles * column_tiles, tl.num_programs(0)):
        row_tile, column_tile = tile_position(tile, row_tiles, column_tiles, GROUP_M)
        expert, row, end = locate_tile(row_tile, ends, counts_ptr, offsets_ptr, BLOCK_M)
        column = column_tile * BLOCK_N
        g, u = moe_gate_up_tile(
            x, x_scale_ptr, w, expert, row, column, hidden, BLOCK_M, BLOCK_N, BLOCK_K, SWAP, TMA, ALIGNED
        )
        da = moe_product_tile(
            dy, None, w_down, expert, row, column, hidden, BLOCK_M, BLOCK_N, BLOCK_K, False, SWAP, TMA
        )
        z_rows = row + tl.arange(0, BLOCK_M)
        columns = column + tl.arange(0, BLOCK_N)
        inside = columns < intermediate
        if partials_ptr is not None:
            products = tl.where(inside[None, :], mul_rn(da, swiglu_tile(g, u, limit)), 0.0)
            groups = column // 64 + tl.arange(0, BLOCK_N // 64)
            pointers = partials_ptr + groups.to(tl.int64)[None, :] * rows + z_rows[:, None]
            mask = (z_rows < end)[:, None] & (groups < tl.cdiv(intermediate, 64))[None, :]
            tl.store(pointers, pair_tree_tile(products), mask=mask)
        if dz_ptr is not None:
            weights = tl.load(row_weights_ptr + z_rows, mask=z_rows < end, other=0.0)
            dgate, dup = swiglu_backward_tile(da * weights[:, None], g, u, limit)
            pointers = dz_ptr + z_rows.to(tl.int64)[:, None] * (2 * intermediate) + columns[None, :]
            mask = (z_rows < end)[:, None] & inside[None, :]
            tl.store(pointers, dgate.to(tl.bfloat16), mask=mask)
            tl.store(pointers + intermediate, dup.to(tl.bfloat16), mask=mask)


def launch_moe_swiglu_backward(
    dy: Tensor,
    x: Tensor,
    x_scale: Tensor | None,
    w_gate_up: ExpertWeight,
    w_down: ExpertWeight,
    row_weights: Tensor,
    routing: Routing,
    limit: float | None,
    *,
    dz: bool,
    partials: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """([dgate | dup] [R, 2I] bf16, sums of da' * a over 64 columns [ceil(I/64), R] fp32), those asked for.

    Args:
        dy: [R, H] bf16, expert-major.
        x, x_scale, w_gate_up, row_weights: as for the forward. w_down: [E, H, I].
    """
    rows, hidden = x.shape
    intermediate = w_down.columns
    dz = dy.new_empty(rows, 2 * intermediate) if dz else None
    groups = triton.cdiv(intermediate, 64)
    partials = dy.new_empty(groups, rows, dtype=torch.float32) if partials else None
    facts = device_facts(x.device)
    tma = all(operand.has_tma_layout for operand in (matrix(x), matrix(dy), w_gate_up, w_down))
    name = "swiglu_backward_bf16" if x_scale is None else "swiglu_backward_fp8"
    tile = moe_configs.choose(name, facts, rows, w_down.experts, tma=tma)
    launch(
        _moe_swiglu_backward_kernel,
        tile.grid(facts, rows, w_down.experts, intermediate),
        matrix(dy).source([tile.block_m, tile.block_k], tile.tma),
        matrix(x).source([tile.block_m, tile.block_k], tile.tma),
        x_scale,
        w_gate_up.source([tile.block_n, tile.block_k], tile.tma),
        w_gate_up.scale,
        w_down.source([tile.block_k, tile.block_n], tile.tma),
        w_down.scale,
        dz,
        partials,
        row_weights,
        routing.counts,
        routing.offsets,
        rows,
        w_down.experts,
        hidden,
        intermediate,
        limit,
        *w_gate_up.strides,
        *w_gate_up.scale_strides,
        *w_down.strides,
        *w_down.scale_strides,
        ALIGNED=intermediate % tile.block_n == 0,
        BINS=routing.bins,
        **tile.options,
    )
    return dz, partials
