"""The shared expert's gradient of x: two GEMMs, the backward of SwiGLU in the epilogue of the first."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import configs
from .launch import device_facts, launch
from .operand_range import with_range
from .operands import Operand, matrix
from .tiles import (
    gate_up_tile,
    halves_tile,
    load_tile,
    product_tile,
    store_tile,
    swiglu_backward_tile,
    tile_position,
)


@triton.jit(do_not_specialize=["tokens"])
def _shared_expert_swiglu_backward_kernel(
    dy,
    w_down,
    x,
    w_gate,
    w_up,
    g_ptr,
    u_ptr,
    dgate,
    dup,
    dy_offsets_ptr,
    x_offsets_ptr,
    dy_range_ptr,
    down_range_ptr,
    x_range_ptr,
    gate_range_ptr,
    up_range_ptr,
    tokens,
    intermediate,
    hidden,
    limit,
    stride_ym,
    stride_yk,
    stride_dk,
    stride_dn,
    stride_xm,
    stride_xk,
    stride_gn,
    stride_gk,
    stride_un,
    stride_uk,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    TMA: tl.constexpr,
    STRICT: tl.constexpr,
):
    """Persistent: program p computes the tiles p, p + programs, ... of dgate and dup, [tokens, intermediate].

    g and u are read from g_ptr and u_ptr, [tokens, intermediate] fp32, or computed again if g_ptr is `None`.
    dgate and dup are the halves of one [tokens, 2 * intermediate] bf16 tensor.
    """
    dy = (dy, tokens, hidden, stride_ym, stride_yk, dy_offsets_ptr, dy_range_ptr)
    w_down = (w_down, hidden, intermediate, stride_dk, stride_dn, None, down_range_ptr)
    x = (x, tokens, hidden, stride_xm, stride_xk, x_offsets_ptr, x_range_ptr)
    w_gate = (w_gate, intermediate, hidden, stride_gn, stride_gk, None, gate_range_ptr)
    w_up = (w_up, intermediate, hidden, stride_un, stride_uk, None, up_range_ptr)
    saved_g = (g_ptr, tokens, intermediate, intermediate, 1, None, None)
    saved_u = (u_ptr, tokens, intermediate, intermediate, 1, None, None)
    dgate = (dgate, tokens, intermediate, 2 * intermediate, 1, None, None)
    dup = (dup, tokens, intermediate, 2 * intermediate, 1, None, None)
    swiglu_backward_loop(
        dy,
        w_down,
        x,
        w_gate,
        w_up,
        saved_g,
        saved_u,
        dgate,
        dup,
        tokens,
        intermediate,
        hidden,
        limit,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
        GROUP_M,
        g_ptr is None,
        TMA,
        STRICT,
    )


@triton.jit
def swiglu_backward_loop(
    dy,
    w_down,
    x,
    w_gate,
    w_up,
    saved_g,
    saved_u,
    dgate,
    dup,
    tokens,
    intermediate,
    hidden,
    limit,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    RECOMPUTE: tl.constexpr,
    TMA: tl.constexpr,
    STRICT: tl.constexpr,
    STAGES: tl.constexpr = None,
):
    """The tiles p, p + programs, ... of dgate and dup.

    `RECOMPUTE`: g and u come from x, w_gate and w_up; else from saved_g and saved_u. The others are not used.
    """
    row_tiles = tl.cdiv(tokens, BLOCK_M)
    column_tiles = tl.cdiv(intermediate, BLOCK_N)
    for tile in tl.range(tl.program_id(0), row_tiles * column_tiles, tl.num_programs(0), num_stages=1):
        row_tile, column_tile = tile_position(tile, row_tiles, column_tiles, GROUP_M)
        row, column = row_tile * BLOCK_M, column_tile * BLOCK_N
        dh = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        dh = product_tile(
            dh, dy, w_down, row, column, hidden, BLOCK_M, BLOCK_N, BLOCK_K, False, TMA, STRICT, STAGES
        )
        dh = dh.to(tl.bfloat16)
        g, u = None, None
        if RECOMPUTE:
            g, u = gate_up_tile(
                x, w_gate, w_up, row, column, hidden, BLOCK_M, BLOCK_N, BLOCK_K, TMA, STRICT, STAGES
            )
        if BLOCK_N < 128:
            store_gradients(dh, g, u, saved_g, saved_u, dgate, dup, row, column, limit, TMA)
        else:  # in halves: the whole of g and u beside dh would not fit the registers
            left, right = halves_tile(dh)
            g_left, g_right, u_left, u_right = None, None, None, None
            if RECOMPUTE:
                g_left, g_right = halves_tile(g)
                u_left, u_right = halves_tile(u)
            middle = column + BLOCK_N // 2
            store_gradients(left, g_left, u_left, saved_g, saved_u, dgate, dup, row, column, limit, TMA)
            store_gradients(right, g_right, u_right, saved_g, saved_u, dgate, dup, row, middle, limit, TMA)


@triton.jit
def store_gradients(dh, g, u, saved_g, saved_u, dgate, dup, row, column, limit, TMA: tl.constexpr):
    """dgate and dup of one tile from dh (bf16) and g, u, which are read from memory where they are `None`."""
    if g is None:
        g = load_tile(saved_g, row, column, dh.shape[0], dh.shape[1], False)
        u = load_tile(saved_u, row, column, dh.shape[0], dh.shape[1], False)
    gate_value, up_value = swiglu_backward_tile(dh.to(tl.float32), g, u, limit)
    store_tile(dgate, row, column, gate_value, TMA)
    store_tile(dup, row, column, up_value, TMA)


@triton.jit(do_not_specialize=["tokens"])
def _shared_expert_dx_kernel(
    dgate,
    dup,
    w_gate,
    w_up,
    dx,
    dgate_range_ptr,
    dup_range_ptr,
    gate_range_ptr,
    up_range_ptr,
    tokens,
    hidden,
    intermediate,
    stride_gk,
    stride_gn,
    stride_uk,
    stride_un,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    TMA: tl.constexpr,
    STRICT: tl.constexpr,
):
    """Persistent: program p computes the tiles p, p + programs, ... of dx [tokens, hidden], fp32 or bf16.

    One accumulator runs over the gate rows, then over the up rows.
    """
    dgate = (dgate, tokens, intermediate, 2 * intermediate, 1, None, dgate_range_ptr)
    dup = (dup, tokens, intermediate, 2 * intermediate, 1, None, dup_range_ptr)
    w_gate = (w_gate, intermediate, hidden, stride_gk, stride_gn, None, gate_range_ptr)
    w_up = (w_up, intermediate, hidden, stride_uk, stride_un, None, up_range_ptr)
    row_tiles = tl.cdiv(tokens, BLOCK_M)
    column_tiles = tl.cdiv(hidden, BLOCK_N)
    for tile in tl.range(tl.program_id(0), row_tiles * column_tiles, tl.num_programs(0), num_stages=1):
        row_tile, column_tile = tile_position(tile, row_tiles, column_tiles, GROUP_M)
        row, column = row_tile * BLOCK_M, column_tile * BLOCK_N
        value = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        value = product_tile(
            value, dgate, w_gate, row, column, intermediate, BLOCK_M, BLOCK_N, BLOCK_K, False, TMA, STRICT
        )
        value = product_tile(
            value, dup, w_up, row, column, intermediate, BLOCK_M, BLOCK_N, BLOCK_K, False, TMA, STRICT
        )
        store_tile((dx, tokens, hidden, hidden, 1, None, None), row, column, value, TMA)


def launch_shared_expert_swiglu_backward(
    dy: Operand,
    w_down: Operand,
    recompute: tuple[Operand, Operand, Operand] | None,
    saved: tuple[Tensor, Tensor] | None,
    limit: float | None,
    *,
    strict: bool,
) -> Tensor:
    """[dgate | dup], [T, 2I] bf16.

    Args:
        dy: [T, H] bf16. w_down: [H, I] bf16.
        recompute: (x, w_gate, w_up) to compute g and u again, or `None`.
        saved: contiguous (g, u), [T, I] fp32, or `None`.
    """
    tokens, hidden, intermediate = dy.rows, dy.columns, w_down.columns
    dz = dy.tensor.new_empty(tokens, 2 * intermediate)
    if tokens == 0:
        return dz
    if strict:
        dy, w_down = with_range(dy, along_rows=True), with_range(w_down, along_rows=False)
    if strict and recompute:
        recompute = tuple(with_range(operand, along_rows=True) for operand in recompute)
    # Without recomputation these three are never read.
    x, w_gate, w_up = recompute or (dy, w_down, w_down)
    g, u = saved or (None, None)
    dgate, dup = (matrix(half) for half in dz.chunk(2, 1))
    facts = device_facts(dz.device)
    operands = (dy, w_down, x, w_gate, w_up, dgate, dup)
    tma = all(operand.has_tma_layout for operand in operands)
    family = "swiglu_backward" if saved else "swiglu_backward_recompute"
    tile = configs.choose(family, facts, tokens, intermediate, strict=strict, tma=tma)
    a_block, nk_block = [tile.block_m, tile.block_k], [tile.block_n, tile.block_k]
    out_block = [tile.block_m, tile.epilogue_n]
    launch(
        _shared_expert_swiglu_backward_kernel,
        tile.grid(facts, tokens, intermediate),
        dy.source(a_block, tile.tma),
        w_down.source([tile.block_k, tile.block_n], tile.tma),
        x.source(a_block, tile.tma) if recompute else None,
        w_gate.source(nk_block, tile.tma) if recompute else None,
        w_up.source(nk_block, tile.tma) if recompute else None,
        g,
        u,
        dgate.source(out_block, tile.tma),
        dup.source(out_block, tile.tma),
        dy.row_offsets,
        x.row_offsets,
        dy.exponent_range,
        w_down.exponent_range,
        x.exponent_range,
        w_gate.exponent_range,
        w_up.exponent_range,
        tokens,
        intermediate,
        hidden,
        limit,
        dy.row_stride,
        dy.column_stride,
        w_down.row_stride,
        w_down.column_stride,
        x.row_stride,
        x.column_stride,
        w_gate.row_stride,
        w_gate.column_stride,
        w_up.row_stride,
        w_up.column_stride,
        STRICT=strict,
        **tile.options,
    )
    return dz


def launch_shared_expert_dx(
    dz: Tensor, w_gate: Operand, w_up: Operand, out_dtype: torch.dtype, *, strict: bool
) -> Tensor:
    """dx [T, H] in `out_dtype`, fp32 or bf16. dz: [T, 2I] bf16, row-major."""
    tokens, (intermediate, hidden) = dz.shape[0], (w_gate.rows, w_gate.columns)
    dx = dz.new_empty(tokens, hidden, dtype=out_dtype)
    if tokens == 0:
        return dx
    dgate, dup = (matrix(half) for half in dz.chunk(2, 1))
    if strict:
        dgate, dup = (with_range(operand, along_rows=True) for operand in (dgate, dup))
        w_gate, w_up = (with_range(operand, along_rows=False) for operand in (w_gate, w_up))
    facts = device_facts(dx.device)
    tma = all(operand.has_tma_layout for operand in (dgate, dup, w_gate, w_up, matrix(dx)))
    tile = configs.choose(
        "dx", facts, tokens, hidden, strict=strict, tma=tma, output_bytes=out_dtype.itemsize
    )
    a_block, kn_block = [tile.block_m, tile.block_k], [tile.block_k, tile.block_n]
    launch(
        _shared_expert_dx_kernel,
        tile.grid(facts, tokens, hidden),
        dgate.source(a_block, tile.tma),
        dup.source(a_block, tile.tma),
        w_gate.source(kn_block, tile.tma),
        w_up.source(kn_block, tile.tma),
        matrix(dx).source([tile.block_m, tile.block_n], tile.tma),
        dgate.exponent_range,
        dup.exponent_range,
        w_gate.exponent_range,
        w_up.exponent_range,
        tokens,
        hidden,
        intermediate,
        w_gate.row_stride,
        w_gate.column_stride,
        w_up.row_stride,
        w_up.column_stride,
        STRICT=strict,
        **tile.options,
    )
    return dx
