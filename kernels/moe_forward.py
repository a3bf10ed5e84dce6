"""The MoE layer's two grouped products; SwiGLU, routing weight and requantisation end the first."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import moe_configs
from .launch import device_facts, launch
from .moe_operands import ExpertWeight
from .moe_routing import Routing
from .moe_tiles import expert_tile_ends, locate_tile, moe_gate_up_tile, moe_product_tile, requantize_tile
from .operands import matrix
from .tiles import swiglu_tile, tile_position


@triton.jit(do_not_specialize=["rows"])
def _moe_gate_up_kernel(
    x,
    x_scale_ptr,
    w,
    w_scale_ptr,
    h_ptr,
    h_scale_ptr,
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
    GROUP: tl.constexpr,
    ALIGNED: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    SWAP: tl.constexpr,
    TMA: tl.constexpr,
):
    """Persistent over the row tiles of all experts times the column tiles of h [rows, intermediate].

    GROUP: columns of a scale group of h, or 0 for bf16.
    """
    x = (x, rows, hidden, hidden, 1, None, None)
    w = (w, 2 * intermediate, hidden, stride_we, stride_wn, stride_wk, w_scale_ptr, stride_se, stride_sn)
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
        tile_rows = row + tl.arange(0, BLOCK_M)
        weights = tl.load(row_weights_ptr + tile_rows, mask=tile_rows < end, other=0.0)
        a = swiglu_tile(g, u, limit) * weights[:, None]
        _store_activation(a, h_ptr, h_scale_ptr, row, end, column, rows, intermediate, GROUP)


@triton.jit
def _store_activation(a, h_ptr, h_scale_ptr, row, end, column, rows, intermediate, GROUP: tl.constexpr):
    """Rows row .. end - 1 of one tile of h: bf16, or codes and the scales of `GROUP` columns."""
    h_rows = row + tl.arange(0, a.shape[0])
    columns = column + tl.arange(0, a.shape[1])
    inside = columns < intermediate
    pointers = h_ptr + h_rows.to(tl.int64)[:, None] * intermediate + columns[None, :]
    mask = (h_rows < end)[:, None] & inside[None, :]
    if GROUP == 0:
        tl.store(pointers, a.to(tl.bfloat16), mask=mask)
    else:
        codes, scales = requantize_tile(tl.where(inside[None, :], a, 0.0), GROUP)
        tl.store(pointers, codes, mask=mask)
        groups = column // GROUP + tl.arange(0, a.shape[1] // GROUP)
        pointers = h_scale_ptr + groups.to(tl.int64)[None, :] * rows + h_rows[:, None]
        mask = (h_rows < end)[:, None] & (groups < tl.cdiv(intermediate, GROUP))[None, :]
        tl.store(pointers, scales, mask=mask)


@triton.jit(do_not_specialize=["rows"])
def _moe_product_kernel(
    a,
    a_scale_ptr,
    w,
    w_scale_ptr,
    out_ptr,
    counts_ptr,
    offsets_ptr,
    rows,
    experts,
    size_k,
    columns,
    stride_we,
    stride_wr,
    stride_wc,
    stride_se,
    stride_sr,
    WEIGHT_NK: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    SWAP: tl.constexpr,
    TMA: tl.constexpr,
):
    """Persistent over the row tiles of all experts times the column tiles of out [rows, columns] bf16.

    a: [rows, size_k]; w: [E, columns, size_k] with `WEIGHT_NK`, else [E, size_k, columns].
    """
    a = (a, rows, size_k, size_k, 1, None, None)
    w_rows = columns if WEIGHT_NK else size_k
    w_columns = size_k if WEIGHT_NK else columns
    w = (w, w_rows, w_columns, stride_we, stride_wr, stride_wc, w_scale_ptr, stride_se, stride_sr)
    ends = expert_tile_ends(counts_ptr, experts, BLOCK_M, BINS)
    row_tiles = tl.max(ends, 0)
    column_tiles = tl.cdiv(columns, BLOCK_N)
    for tile in tl.range(tl.program_id(0), row_tiles * column_tiles, tl.num_programs(0)):
        row_tile, column_tile = tile_position(tile, row_tiles, column_tiles, GROUP_M)
        expert, row, end = locate_tile(row_tile, ends, counts_ptr, offsets_ptr, BLOCK_M)
        column = column_tile * BLOCK_N
        value = moe_product_tile(
            a, a_scale_ptr, w, expert, row, column, size_k, BLOCK_M, BLOCK_N, BLOCK_K, WEIGHT_NK, SWAP, TMA
        )
        out_rows = row + tl.arange(0, BLOCK_M)
        out_columns = column + tl.arange(0, BLOCK_N)
        pointers = out_ptr + out_rows.to(tl.int64)[:, None] * columns + out_columns[None, :]
        mask = (out_rows < end)[:, None] & (out_columns < columns)[None, :]
        tl.store(pointers, value.to(tl.bfloat16), mask=mask)


def launch_moe_gate_up(
    x: Tensor,
    x_scale: Tensor | None,
    w_gate_up: ExpertWeight,
    row_weights: Tensor,
    routing: Routing,
    limit: float | None,
    group: int | None,
) -> tuple[Tensor, Tensor | None]:
    """(h [R, I], its scales [ceil(I / group), R] fp32): e4m3, or bf16 and `None` without a group.

    Args:
        x: [R, H] expert-major, e4m3 with x_scale [ceil(H/128), R] fp32, or bf16.
        w_gate_up: [E, 2I, H].
        row_weights: [R] fp32, the routing weights.
        group: columns of a scale group, 64 or 128, or `None` for bf16.
    """
    rows, hidden = x.shape
    intermediate = w_gate_up.rows // 2
    h = x.new_empty(rows, intermediate, dtype=x.dtype)
    h_scale = None if group is None else row_weights.new_empty(triton.cdiv(intermediate, group), rows)
    facts = device_facts(x.device)
    name = {None: "gate_up_bf16", 64: "gate_up_fp8", 128: "gate_up_fp8_wide"}[group]
    tma = matrix(x).has_tma_layout and w_gate_up.has_tma_layout
    tile = moe_configs.choose(name, facts, rows, w_gate_up.experts, tma=tma)
    launch(
        _moe_gate_up_kernel,
        tile.grid(facts, rows, w_gate_up.experts, intermediate),
        matrix(x).source([tile.block_m, tile.block_k], tile.tma),
        x_scale,
        w_gate_up.source([tile.block_n, tile.block_k], tile.tma),
        w_gate_up.scale,
        h,
        h_scale,
        row_weights,
        routing.counts,
        routing.offsets,
        rows,
        w_gate_up.experts,
        hidden,
        intermediate,
        limit,
        *w_gate_up.strides,
        *w_gate_up.scale_strides,
        GROUP=group or 0,
        ALIGNED=intermediate % tile.block_n == 0,
        BINS=routing.bins,
        **tile.options,
    )
    return h, h_scale


def launch_moe_product(
    name: str,
    a: Tensor,
    a_scale: Tensor | None,
    w: ExpertWeight,
    routing: Routing,
    out: Tensor,
    *,
    weight_nk: bool,
) -> Tensor:
    """out [R, N] bf16 = a [R, K] @ each row's expert weight, and returns it.

    Args:
        name: of the tiles' family.
        a: expert-major rows, e4m3 with a_scale [ceil(K / block_k), R] fp32, or bf16.
        w: [E, N, K] with `weight_nk`, else [E, K, N].
    """
    rows, size_k = a.shape
    columns = w.rows if weight_nk else w.columns
    facts = device_facts(a.device)
    tma = matrix(a).has_tma_layout and w.has_tma_layout
    tile = moe_configs.choose(name, facts, rows, w.experts, tma=tma)
    w_block = [tile.block_n, tile.block_k] if weight_nk else [tile.block_k, tile.block_n]
    launch(
        _moe_product_kernel,
        tile.grid(facts, rows, w.experts, columns),
        matrix(a).source([tile.block_m, tile.block_k], tile.tma),
        a_scale,
        w.source(w_block, tile.tma),
        w.scale,
        out,
        routing.counts,
        routing.offsets,
        rows,
        w.experts,
        size_k,
        columns,
        *w.strides,
        *w.scale_strides,
        WEIGHT_NK=weight_nk,
        BINS=routing.bins,
        **tile.options,
    )
    return out


def new_rows(x: Tensor, hidden: int) -> Tensor:
    """[R, H] bf16, one row per slot."""
    return x.new_empty(x.shape[0], hidden, dtype=torch.bfloat16)
