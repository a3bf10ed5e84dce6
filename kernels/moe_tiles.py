"""The MoE layer's mathematics as Triton device functions: quantisers, grouped products, the tree of pairs.

An expert weight is a tuple of
    0 source: a pointer or, with `TMA`, a host-side descriptor of [E, rows, columns] with blocks [1, ., .]
    1 row_count, 2 column_count of one expert, 3 expert_stride, 4 row_stride, 5 column_stride
    6 scale_ptr: fp32 scales of 128 x 128 blocks, or `None` for a bf16 weight
    7 scale_expert_stride, 8 scale_row_stride
An operand of rows is one of `tiles.py`; its scales lie [groups, rows].
"""

import triton
import triton.language as tl

from .tiles import load_tile

_INFINITY = tl.constexpr(0x7F800000)


@triton.jit
def _grouped(x, GROUP: tl.constexpr):
    """[M, N] as [M, N / GROUP, GROUP], and the bits of each group's largest magnitude: NaN > inf > finite."""
    x = tl.reshape(x, (x.shape[0], x.shape[1] // GROUP, GROUP))
    return x, tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 2)


@triton.jit
def quantize_tile(x, GROUP: tl.constexpr):
    """Step 1: (e4m3 codes [M, N], scales [M, N / GROUP]) of fp32 x; `scale = max(amax / 448, 2^-126)`."""
    groups, bits = _grouped(x, GROUP)
    amax = bits.to(tl.float32, bitcast=True)
    scale = tl.maximum(tl.div_rn(amax, tl.full(amax.shape, 448.0, tl.float32)), 1.1754943508222875e-38)
    scale = tl.where(bits == 0, 1.0, tl.where(bits < _INFINITY, scale, float("nan")))
    codes = tl.div_rn(groups, tl.broadcast_to(scale[:, :, None], groups.shape))
    codes = tl.minimum(codes, 448.0, propagate_nan=tl.PropagateNan.ALL)
    codes = tl.maximum(codes, -448.0, propagate_nan=tl.PropagateNan.ALL)
    return tl.reshape(codes.to(tl.float8e4nv), x.shape), scale


@triton.jit
def requantize_tile(a, GROUP: tl.constexpr):
    """Step 5: as `quantize_tile`, the scale being the smallest power of two not below amax / 448."""
    groups, bits = _grouped(a, GROUP)
    exponent = (bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)
    exponent = tl.where(bits == 0, 127, tl.maximum(exponent, 1))  # biased; amax = 0 has scale 1
    scale = tl.where(bits < _INFINITY, (exponent << 23).to(tl.float32, bitcast=True), float("nan"))
    inverse = tl.where(bits < _INFINITY, ((254 - exponent) << 23).to(tl.float32, bitcast=True), float("nan"))
    codes = (groups * inverse[:, :, None]).to(tl.float8e4nv)
    return tl.reshape(codes, a.shape), scale


@triton.jit
def pair_tree_tile(products):
    """Sums [M, N / 64] of fp32 products [M, N]: inside each 64 columns a tree over adjacent pairs."""
    value = tl.reshape(products, (products.shape[0], products.shape[1] // 64, 64))
    for _ in tl.static_range(6):
        value = tl.reshape(value, (value.shape[0], value.shape[1], value.shape[2] // 2, 2))
        left, right = tl.split(value)
        value = left + right
    return tl.reshape(value, (value.shape[0], value.shape[1]))


@triton.jit
def expert_tile_ends(counts_ptr, experts, BLOCK_M: tl.constexpr, BINS: tl.constexpr):
    """[BINS] int32: how many row tiles the experts up to each one have; the last is the number of all."""
    bins = tl.arange(0, BINS)
    counts = tl.load(counts_ptr + bins, mask=bins < experts, other=0)
    return tl.cumsum((counts + BLOCK_M - 1) // BLOCK_M, 0)


@triton.jit
def locate_tile(row_tile, ends, counts_ptr, offsets_ptr, BLOCK_M: tl.constexpr):
    """(expert, first row, end of the expert's rows) of a row tile."""
    before = ends <= row_tile
    expert = tl.sum(before.to(tl.int32), 0)
    first_tile = tl.max(tl.where(before, ends, 0), 0)
    start = tl.load(offsets_ptr + expert)
    return expert, start + (row_tile - first_tile) * BLOCK_M, start + tl.load(counts_ptr + expert)


@triton.jit
def load_expert_tile(
    w, expert, row, column, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, TMA: tl.constexpr
):
    """The tile of one expert's weight whose corner is (row, column); zero outside."""
    if TMA:
        return tl.reshape(w[0].load([expert, row, column]), (BLOCK_ROWS, BLOCK_COLUMNS))
    else:
        rows = row + tl.arange(0, BLOCK_ROWS)
        columns = column + tl.arange(0, BLOCK_COLUMNS)
        pointers = w[0] + expert.to(tl.int64) * w[3] + rows.to(tl.int64)[:, None] * w[4]
        pointers += columns.to(tl.int64)[None, :] * w[5]
        mask = (rows < w[1])[:, None] & (columns < w[2])[None, :]
        return tl.load(pointers, mask=mask, other=0.0)


@triton.jit
def weight_scale_tile(w, expert, n, k, BLOCK_N: tl.constexpr, WEIGHT_NK: tl.constexpr, ALIGNED: tl.constexpr):
    """The scale of columns n.. at k: one number where `ALIGNED` (no 128-block border inside), else [BLOCK_N].

    At most one border lies inside, so that two scalar loads do.
    """
    pointer = w[6] + expert.to(tl.int64) * w[7]
    block = n // 128
    column_count = w[1] if WEIGHT_NK else w[2]
    last = tl.minimum(block + 1, (column_count - 1) // 128)
    if WEIGHT_NK:
        first_pointer = pointer + block * w[8] + k // 128
        last_pointer = pointer + last * w[8] + k // 128
    else:
        first_pointer = pointer + (k // 128) * w[8] + block
        last_pointer = pointer + (k // 128) * w[8] + last
    if ALIGNED:
        return tl.load(first_pointer)
    else:
        columns = n + tl.arange(0, BLOCK_N)
        return tl.where(columns < (block + 1) * 128, tl.load(first_pointer), tl.load(last_pointer))


@triton.jit
def promote_tile(accumulator, partial, a_scale, w_scale, SWAP: tl.constexpr, ALIGNED: tl.constexpr):
    """fma(partial, a_scale * w_scale, accumulator); `a_scale` [M]; transposed with `SWAP`."""
    if ALIGNED:
        scale = a_scale * w_scale
        scale = scale[None, :] if SWAP else scale[:, None]
    else:
        scale = w_scale[:, None] * a_scale[None, :] if SWAP else a_scale[:, None] * w_scale[None, :]
    return tl.fma(partial, tl.broadcast_to(scale, partial.shape), accumulator)


@triton.jit
def _dot(a_tile, w_tile, accumulator, WEIGHT_NK: tl.constexpr, SWAP: tl.constexpr):
    """accumulator + a @ w, transposed with `SWAP`; `accumulator` may be `None`. w is [N, K] or [K, N]."""
    if w_tile.dtype != a_tile.dtype:
        w_tile = w_tile.to(a_tile.dtype)  # e4m3 widened to bf16, exactly
    if SWAP:
        left = w_tile if WEIGHT_NK else tl.trans(w_tile)
        return tl.dot(left, tl.trans(a_tile), accumulator)
    else:
        right = tl.trans(w_tile) if WEIGHT_NK else w_tile
        return tl.dot(a_tile, right, accumulator)


@triton.jit
def moe_product_tile(
    a,
    a_scale_ptr,
    w,
    expert,
    row,
    column,
    size_k,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WEIGHT_NK: tl.constexpr,
    SWAP: tl.constexpr,
    TMA: tl.constexpr,
):
    """One tile of rows @ expert weight in fp32, [BLOCK_M, BLOCK_N].

    A scaled weight: for each `BLOCK_K` of k, ascending, a tensor-core partial from +0, promoted by an fma.
    Else one accumulator over all of k. Columns start at multiples of BLOCK_N, which divides 128.
    """
    if SWAP:
        accumulator = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    else:
        accumulator = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if w[6] is None:
        for k in range(0, size_k, BLOCK_K):
            a_tile = load_tile(a, row, k, BLOCK_M, BLOCK_K, TMA)
            w_tile = _load_weight(w, expert, column, k, BLOCK_N, BLOCK_K, WEIGHT_NK, TMA)
            accumulator = _dot(a_tile, w_tile, accumulator, WEIGHT_NK, SWAP)
    else:
        last = (tl.cdiv(size_k, BLOCK_K) - 1) * BLOCK_K
        a_scale = row_scale_tile(a, a_scale_ptr, row, 0, BLOCK_M)
        w_scale = weight_scale_tile(w, expert, column, 0, BLOCK_N, WEIGHT_NK, True)
        for k in range(0, size_k, BLOCK_K):
            a_tile = load_tile(a, row, k, BLOCK_M, BLOCK_K, TMA)
            w_tile = _load_weight(w, expert, column, k, BLOCK_N, BLOCK_K, WEIGHT_NK, TMA)
            partial = _dot(a_tile, w_tile, None, WEIGHT_NK, SWAP)
            accumulator = promote_tile(accumulator, partial, a_scale, w_scale, SWAP, True)
            following = tl.minimum(k + BLOCK_K, last)  # one block ahead, behind the product
            a_scale = row_scale_tile(a, a_scale_ptr, row, following // BLOCK_K, BLOCK_M)
            w_scale = weight_scale_tile(w, expert, column, following, BLOCK_N, WEIGHT_NK, True)
    if SWAP:
        accumulator = tl.trans(accumulator)
    return accumulator


@triton.jit
def moe_gate_up_tile(
    x,
    x_scale_ptr,
    w,
    expert,
    row,
    column,
    size_k,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SWAP: tl.constexpr,
    TMA: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """The pre-activations (g, u) of one tile, fp32: products with the gate and the up rows of one weight.

    ALIGNED: whether up rows start at a multiple of BLOCK_N, so that a tile of them has one scale.
    """
    up = w[1] // 2 + column
    if SWAP:
        g = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        u = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    else:
        g = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        u = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if w[6] is None:
        for k in range(0, size_k, BLOCK_K):
            x_tile = load_tile(x, row, k, BLOCK_M, BLOCK_K, TMA)
            g = _dot(x_tile, load_expert_tile(w, expert, column, k, BLOCK_N, BLOCK_K, TMA), g, True, SWAP)
            u = _dot(x_tile, load_expert_tile(w, expert, up, k, BLOCK_N, BLOCK_K, TMA), u, True, SWAP)
    else:
        last = (tl.cdiv(size_k, BLOCK_K) - 1) * BLOCK_K
        x_scale = row_scale_tile(x, x_scale_ptr, row, 0, BLOCK_M)
        g_scale = weight_scale_tile(w, expert, column, 0, BLOCK_N, True, True)
        u_scale = weight_scale_tile(w, expert, up, 0, BLOCK_N, True, ALIGNED)
        for k in range(0, size_k, BLOCK_K):
            x_tile = load_tile(x, row, k, BLOCK_M, BLOCK_K, TMA)
            gate_tile = load_expert_tile(w, expert, column, k, BLOCK_N, BLOCK_K, TMA)
            up_tile = load_expert_tile(w, expert, up, k, BLOCK_N, BLOCK_K, TMA)
            g = promote_tile(g, _dot(x_tile, gate_tile, None, True, SWAP), x_scale, g_scale, SWAP, True)
            u = promote_tile(u, _dot(x_tile, up_tile, None, True, SWAP), x_scale, u_scale, SWAP, ALIGNED)
            following = tl.minimum(k + BLOCK_K, last)  # one block ahead, behind the products
            x_scale = row_scale_tile(x, x_scale_ptr, row, following // BLOCK_K, BLOCK_M)
            g_scale = weight_scale_tile(w, expert, column, following, BLOCK_N, True, True)
            u_scale = weight_scale_tile(w, expert, up, following, BLOCK_N, True, ALIGNED)
    if SWAP:
        g, u = tl.trans(g), tl.trans(u)
    return g, u


@triton.jit
def row_scale_tile(a, scale_ptr, row, group, BLOCK_M: tl.constexpr):
    """The scales of a tile's rows in one group of k; ones, which multiply exactly, for rows without."""
    if scale_ptr is None:
        return tl.full((BLOCK_M,), 1.0, tl.float32)
    else:
        rows = row + tl.arange(0, BLOCK_M)
        return tl.load(scale_ptr + a[1].to(tl.int64) * group + rows, mask=rows < a[1], other=0.0)


@triton.jit
def _load_weight(
    w,
    expert,
    column,
    k,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WEIGHT_NK: tl.constexpr,
    TMA: tl.constexpr,
):
    """[BLOCK_N, BLOCK_K] of a weight stored [N, K] (`WEIGHT_NK`); [BLOCK_K, BLOCK_N] of one stored [K, N]."""
    if WEIGHT_NK:
        return load_expert_tile(w, expert, column, k, BLOCK_N, BLOCK_K, TMA)
    else:
        return load_expert_tile(w, expert, k, column, BLOCK_K, BLOCK_N, TMA)
