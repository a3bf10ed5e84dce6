"""The shared expert's forward: two GEMMs, SwiGLU in the epilogue of the first."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import configs
from .launch import device_facts, launch
from .operand_range import with_range
from .operands import Operand, matrix
from .tiles import gate_up_tile, halves_tile, product_tile, store_tile, swiglu_tile, tile_position


@triton.jit(do_not_specialize=["tokens"])
def _shared_expert_gate_up_kernel(
    x,
    w_gate,
    w_up,
    h,
    g_ptr,
    u_ptr,
    x_offsets_ptr,
    x_range_ptr,
    gate_range_ptr,
    up_range_ptr,
    tokens,
    intermediate,
    hidden,
    limit,
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
    """Persistent: program p computes the tiles p, p + programs, ... of h [tokens, intermediate].

    g_ptr, u_ptr: [tokens, intermediate] fp32 to keep the pre-activations in, or `None`.
    """
    x = (x, tokens, hidden, stride_xm, stride_xk, x_offsets_ptr, x_range_ptr)
    w_gate = (w_gate, intermediate, hidden, stride_gn, stride_gk, None, gate_range_ptr)
    w_up = (w_up, intermediate, hidden, stride_un, stride_uk, None, up_range_ptr)
    h = (h, tokens, intermediate, intermediate, 1, None, None)
    saved_g = (g_ptr, tokens, intermediate, intermediate, 1, None, None)
    saved_u = (u_ptr, tokens, intermediate, intermediate, 1, None, None)
    gate_up_loop(
        x,
        w_gate,
        w_up,
        h,
        saved_g,
        saved_u,
        tokens,
        intermediate,
        hidden,
        limit,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
        GROUP_M,
        TMA,
        STRICT,
    )


@triton.jit
def gate_up_loop(
    x,
    w_gate,
    w_up,
    h,
    saved_g,
    saved_u,
    tokens,
    intermediate,
    hidden,
    limit,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    TMA: tl.constexpr,
    STRICT: tl.constexpr,
    STAGES: tl.constexpr = None,
):
    """The tiles p, p + programs, ... of h, and of g and u where there is a place for them."""
    row_tiles = tl.cdiv(tokens, BLOCK_M)
    column_tiles = tl.cdiv(intermediate, BLOCK_N)
    for tile in tl.range(tl.program_id(0), row_tiles * column_tiles, tl.num_programs(0), num_stages=1):
        row_tile, column_tile = tile_position(tile, row_tiles, column_tiles, GROUP_M)
        row, column = row_tile * BLOCK_M, column_tile * BLOCK_N
        g, u = gate_up_tile(
            x, w_gate, w_up, row, column, hidden, BLOCK_M, BLOCK_N, BLOCK_K, TMA, STRICT, STAGES
        )
        if BLOCK_N < 128:
            store_activation(g, u, h, saved_g, saved_u, row, column, limit, TMA)
        else:  # in halves, which need fewer registers
            g_left, g_right = halves_tile(g)
            u_left, u_right = halves_tile(u)
            middle = column + BLOCK_N // 2
            store_activation(g_left, u_left, h, saved_g, saved_u, row, column, limit, TMA)
            store_activation(g_right, u_right, h, saved_g, saved_u, row, middle, limit, TMA)


@triton.jit
def store_activation(g, u, h, saved_g, saved_u, row, column, limit, TMA: tl.constexpr):
    """h of one tile, and g and u themselves where there is a place for them."""
    if saved_g[0] is not None:
        store_tile(saved_g, row, column, g, False)
        store_tile(saved_u, row, column, u, False)
    store_tile(h, row, column, swiglu_tile(g, u, limit), TMA)


@triton.jit(do_not_specialize=["tokens"])
def _shared_expert_down_kernel(
    h,
    w_down,
    y,
    h_range_ptr,
    down_range_ptr,
    tokens,
    hidden,
    intermediate,
    stride_dn,
    stride_dk,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    TMA: tl.constexpr,
    STRICT: tl.constexpr,
):
    """Persistent: program p computes the tiles p, p + programs, ... of y [tokens, hidden]."""
    h = (h, tokens, intermediate, intermediate, 1, None, h_range_ptr)
    w_down = (w_down, hidden, intermediate, stride_dn, stride_dk, None, down_range_ptr)
    row_tiles = tl.cdiv(tokens, BLOCK_M)
    column_tiles = tl.cdiv(hidden, BLOCK_N)
    for tile in tl.range(tl.program_id(0), row_tiles * column_tiles, tl.num_programs(0), num_stages=1):
        row_tile, column_tile = tile_position(tile, row_tiles, column_tiles, GROUP_M)
        row, column = row_tile * BLOCK_M, column_tile * BLOCK_N
        value = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        value = product_tile(
            value, h, w_down, row, column, intermediate, BLOCK_M, BLOCK_N, BLOCK_K, True, TMA, STRICT
        )
        store_tile((y, tokens, hidden, hidden, 1, None, None), row, column, value, TMA)


def launch_shared_expert_gate_up(
    x: Operand, w_gate: Operand, w_up: Operand, limit: float | None, *, strict: bool, save: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """h [T, I] bf16 and, with `save`, the pre-activations g, u [T, I] fp32."""
    tokens, hidden, intermediate = x.rows, x.columns, w_gate.rows
    h = x.tensor.new_empty(tokens, intermediate)
    g = u = None
    if save:
        g, u = (x.tensor.new_empty(tokens, intermediate, dtype=torch.float32) for _ in range(2))
    if tokens == 0:
        return h, g, u
    if strict:
        x, w_gate, w_up = (with_range(operand, along_rows=True) for operand in (x, w_gate, w_up))
    facts = device_facts(x.tensor.device)
    tma = all(operand.has_tma_layout for operand in (x, w_gate, w_up, matrix(h)))
    tile = configs.choose("gate_up", facts, tokens, intermediate, strict=strict, tma=tma)
    launch(
        _shared_expert_gate_up_kernel,
        tile.grid(facts, tokens, intermediate),
        x.source([tile.block_m, tile.block_k], tile.tma),
        w_gate.source([tile.block_n, tile.block_k], tile.tma),
        w_up.source([tile.block_n, tile.block_k], tile.tma),
        matrix(h).source([tile.block_m, tile.epilogue_n], tile.tma),
        g,
        u,
        x.row_offsets,
        x.exponent_range,
        w_gate.exponent_range,
        w_up.exponent_range,
        tokens,
        intermediate,
        hidden,
        limit,
        x.row_stride,
        x.column_stride,
        w_gate.row_stride,
        w_gate.column_stride,
        w_up.row_stride,
        w_up.column_stride,
        STRICT=strict,
        **tile.options,
    )
    return h, g, u


def launch_shared_expert_down(h: Tensor, w_down: Operand, *, strict: bool) -> Tensor:
    """y [T, H] bf16."""
    (tokens, intermediate), hidden = h.shape, w_down.rows
    y = h.new_empty(tokens, hidden)
    if tokens == 0:
        return y
    h = matrix(h)
    if strict:
        h, w_down = (with_range(operand, along_rows=True) for operand in (h, w_down))
    facts = device_facts(y.device)
    tma = all(operand.has_tma_layout for operand in (h, w_down, matrix(y)))
    tile = configs.choose("down", facts, tokens, hidden, strict=strict, tma=tma)
    launch(
        _shared_expert_down_kernel,
        tile.grid(facts, tokens, hidden),
        h.source([tile.block_m, tile.block_k], tile.tma),
        w_down.source([tile.block_n, tile.block_k], tile.tma),
        matrix(y).source([tile.block_m, tile.block_n], tile.tma),
        h.exponent_range,
        w_down.exponent_range,
        tokens,
        hidden,
        intermediate,
        w_down.row_stride,
        w_down.column_stride,
        STRICT=strict,
        **tile.options,
    )
    return y
