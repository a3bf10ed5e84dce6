"""The shared expert's mathematics as Triton device functions: every kernel and template is made of these.

An operand is a tuple of
    0 source: a pointer or, with `TMA`, a host-side tensor descriptor (strides and offsets are then unused)
    1 row_count, 2 column_count: `None` where every tile that is loaded lies inside
    3 row_stride, 4 column_stride
    5 row_offsets_ptr: int64 offsets that replace `row * row_stride`, or `None`
    6 range_ptr: int32 exponent ranges along k for `STRICT` (`kernels/operand_range.py`), or `None`

Triton may contract a multiplication that feeds an addition. What the contract rounds twice is therefore
written with `mul_rn` and `add_rn`; the other multiplications here feed no addition.
"""

import triton
import triton.language as tl
from triton.language.extra import libdevice


@triton.jit
def mul_rn(a, b):
    """a * b in fp32, rounded once, never contracted; subnormals kept (libdevice's version flushes them)."""
    return tl.inline_asm_elementwise("mul.rn.f32 $0, $1, $2;", "=f,f,f", [a, b], tl.float32, True, 1)


@triton.jit
def add_rn(a, b):
    """a + b in fp32, rounded once, never contracted; subnormals kept."""
    return tl.inline_asm_elementwise("add.rn.f32 $0, $1, $2;", "=f,f,f", [a, b], tl.float32, True, 1)


@triton.jit
def sigmoid_tile(x):
    """`torch.sigmoid` of fp32, bit for bit: libdevice's exp and a correctly rounded division.

    `tl.exp`, or a plain `/`, differs on 13 to 37 % of values (H200, torch 2.11, triton 3.6);
    `kernels/sigmoid_check.py` compares the two on the machine at hand.
    """
    return tl.div_rn(tl.full(x.shape, 1.0, tl.float32), 1.0 + libdevice.exp(-x))


@triton.jit
def clamp_tile(g, u, limit):
    """`min(g, limit)` and `clamp(u, -limit, limit)`; NaN passes. `limit` is `None` for no limit."""
    if limit is not None:
        g = tl.minimum(g, limit, propagate_nan=tl.PropagateNan.ALL)
        u = tl.minimum(u, limit, propagate_nan=tl.PropagateNan.ALL)
        u = tl.maximum(u, -limit, propagate_nan=tl.PropagateNan.ALL)
    return g, u


@triton.jit
def swiglu_tile(g, u, limit):
    """h = (g * sigmoid(g)) * u in fp32, not yet rounded."""
    g, u = clamp_tile(g, u, limit)
    return (g * sigmoid_tile(g)) * u


@triton.jit
def swiglu_backward_tile(dh, g, u, limit):
    """The gradients (dgate, dup), fp32, not yet rounded. dh: fp32 of bf16 values; g, u: before the limit.

    The limit is a select: zero exactly at the bound; NaN passes.
    """
    gc, uc = clamp_tile(g, u, limit)
    sig = sigmoid_tile(gc)
    dsilu = sig * (1.0 + mul_rn(gc, 1.0 - sig))
    dgate = (dh * uc) * dsilu
    dup = dh * (gc * sig)
    if limit is not None:
        dgate = tl.where(g >= limit, 0.0, dgate)
        dup = tl.where(tl.abs(u) >= limit, 0.0, dup)
    return dgate, dup


@triton.jit
def row_offsets_tile(rows, row_count, row_stride, row_offsets_ptr):
    """Element offsets of `rows`, int64."""
    if row_offsets_ptr is None:
        return rows.to(tl.int64) * row_stride
    else:
        return tl.load(row_offsets_ptr + rows, mask=rows < row_count, other=0)


@triton.jit
def inside_tile(operand, rows, columns):
    """Which elements of a tile lie inside the matrix; `None` where all do."""
    if operand[1] is None and operand[2] is None:
        return None
    elif operand[1] is None:
        return (columns < operand[2])[None, :]
    elif operand[2] is None:
        return (rows < operand[1])[:, None]
    else:
        return (rows < operand[1])[:, None] & (columns < operand[2])[None, :]


@triton.jit
def load_tile(operand, row, column, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, TMA: tl.constexpr):
    """The tile of `operand` whose corner is (row, column); zero outside."""
    if TMA:
        return operand[0].load([row, column])
    else:
        rows = row + tl.arange(0, BLOCK_ROWS)
        columns = column + tl.arange(0, BLOCK_COLUMNS)
        offsets = row_offsets_tile(rows, operand[1], operand[3], operand[5])
        pointers = operand[0] + offsets[:, None] + columns.to(tl.int64)[None, :] * operand[4]
        if operand[1] is None and operand[2] is None:
            return tl.load(pointers)
        else:
            return tl.load(pointers, mask=inside_tile(operand, rows, columns), other=0.0)


@triton.jit
def store_tile(operand, row, column, value, TMA: tl.constexpr):
    """Store fp32 `value`, rounded to the operand's dtype, at the corner (row, column); nothing outside."""
    if TMA:
        operand[0].store([row, column], value.to(operand[0].dtype))
    else:
        rows = row + tl.arange(0, value.shape[0])
        columns = column + tl.arange(0, value.shape[1])
        offsets = row_offsets_tile(rows, operand[1], operand[3], operand[5])
        pointers = operand[0] + offsets[:, None] + columns.to(tl.int64)[None, :] * operand[4]
        value = value.to(operand[0].dtype.element_ty)
        tl.store(pointers, value, mask=inside_tile(operand, rows, columns))


@triton.jit
def load_weight_tile(
    w,
    column,
    k,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WEIGHT_NK: tl.constexpr,
    TMA: tl.constexpr,
):
    """[BLOCK_K, BLOCK_N] of a weight stored [N, K] (`WEIGHT_NK`) or [K, N]."""
    if WEIGHT_NK:
        return tl.trans(load_tile(w, column, k, BLOCK_N, BLOCK_K, TMA))
    else:
        return load_tile(w, k, column, BLOCK_K, BLOCK_N, TMA)


@triton.jit
def dot_tile(a, w, accumulator, STRICT: tl.constexpr):
    """accumulator + a @ w, k ascending in one accumulator, by fp32 FMAs (`STRICT`) or on tensor cores."""
    if STRICT:
        return tl.dot(a.to(tl.float32), w.to(tl.float32), accumulator, input_precision="ieee")
    else:
        return tl.dot(a, w, accumulator)


@triton.jit
def serial_product_tile(
    accumulator,
    a,
    w,
    row,
    column,
    size_k,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WEIGHT_NK: tl.constexpr,
):
    """accumulator + a @ w with each product and each sum rounded: the oracle's bits for any operands."""
    for k in range(size_k):
        a_tile = load_tile(a, row, k, BLOCK_M, 1, False).to(tl.float32)
        w_tile = load_weight_tile(w, column, k, BLOCK_N, 1, WEIGHT_NK, False).to(tl.float32)
        a_tile, w_tile = tl.broadcast(a_tile, w_tile)
        accumulator = add_rn(accumulator, mul_rn(a_tile, w_tile))
    return accumulator


@triton.jit
def fma_is_exact(a, w, row, column, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WEIGHT_NK: tl.constexpr):
    """Whether every product of these rows and columns is exact in fp32, so that an FMA rounds like two steps.

    Ranges are biased bf16 exponents. A product of bf16 values a and b is a multiple of 2^(ea + eb - 268), at
    least 2^-149 from ea + eb = 119 on, and below 2^(ea + eb - 252), at most 2^128 up to ea + eb = 380.
    """
    rows = row + tl.arange(0, BLOCK_M)
    columns = column + tl.arange(0, BLOCK_N)
    row_count = a[1]
    column_count = w[1] if WEIGHT_NK else w[2]
    a_low = tl.min(tl.load(a[6] + rows, mask=rows < row_count, other=255), 0)
    w_low = tl.min(tl.load(w[6] + columns, mask=columns < column_count, other=255), 0)
    a_high = tl.max(tl.load(a[6] + row_count + rows, mask=rows < row_count, other=0), 0)
    w_high = tl.max(tl.load(w[6] + column_count + columns, mask=columns < column_count, other=0), 0)
    return (a_low + w_low >= 119) & (a_high + w_high <= 380)


@triton.jit
def product_tile(
    accumulator,
    a,
    w,
    row,
    column,
    size_k,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WEIGHT_NK: tl.constexpr,
    TMA: tl.constexpr,
    STRICT: tl.constexpr,
    STAGES: tl.constexpr = None,
):
    """accumulator + a @ w of one tile, over the whole of k; w is stored [N, K] (`WEIGHT_NK`) or [K, N].

    `STAGES`: of this loop's pipeline; `None` for the launch's `num_stages`.
    """
    if not STRICT or fma_is_exact(a, w, row, column, BLOCK_M, BLOCK_N, WEIGHT_NK):
        for k in tl.range(0, size_k, BLOCK_K, num_stages=STAGES):
            a_tile = load_tile(a, row, k, BLOCK_M, BLOCK_K, TMA)
            w_tile = load_weight_tile(w, column, k, BLOCK_N, BLOCK_K, WEIGHT_NK, TMA)
            accumulator = dot_tile(a_tile, w_tile, accumulator, STRICT)
    else:
        accumulator = serial_product_tile(accumulator, a, w, row, column, size_k, BLOCK_M, BLOCK_N, WEIGHT_NK)
    return accumulator


@triton.jit
def gate_up_tile(
    x,
    w_gate,
    w_up,
    row,
    column,
    size_k,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TMA: tl.constexpr,
    STRICT: tl.constexpr,
    STAGES: tl.constexpr = None,
):
    """The pre-activations (g, u) of one tile, fp32: two products that share the tiles of x."""
    g = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    u = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if not STRICT or (
        fma_is_exact(x, w_gate, row, column, BLOCK_M, BLOCK_N, True)
        & fma_is_exact(x, w_up, row, column, BLOCK_M, BLOCK_N, True)
    ):
        for k in tl.range(0, size_k, BLOCK_K, num_stages=STAGES):
            x_tile = load_tile(x, row, k, BLOCK_M, BLOCK_K, TMA)
            gate_tile = load_weight_tile(w_gate, column, k, BLOCK_N, BLOCK_K, True, TMA)
            up_tile = load_weight_tile(w_up, column, k, BLOCK_N, BLOCK_K, True, TMA)
            g = dot_tile(x_tile, gate_tile, g, STRICT)
            u = dot_tile(x_tile, up_tile, u, STRICT)
    else:
        g = serial_product_tile(g, x, w_gate, row, column, size_k, BLOCK_M, BLOCK_N, True)
        u = serial_product_tile(u, x, w_up, row, column, size_k, BLOCK_M, BLOCK_N, True)
    return g, u


@triton.jit
def halves_tile(value):
    """The left and the right half of a tile's columns; free where a thread holds whole rows."""
    value = tl.reshape(value, (value.shape[0], 2, value.shape[1] // 2))
    return tl.split(tl.permute(value, (0, 2, 1)))


@triton.jit
def tile_position(tile, row_tiles, column_tiles, GROUP_M: tl.constexpr):
    """(row tile, column tile): down `GROUP_M` row tiles, then across, so that operands stay in L2."""
    group_size = GROUP_M * column_tiles
    first = (tile // group_size) * GROUP_M
    height = min(row_tiles - first, GROUP_M)
    inside = tile % group_size
    return first + inside % height, inside // height


@triton.jit
def tile_cost(rows, columns, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, COST: tl.constexpr):
    """What `configs.choose` minimises, for a kernel that chooses by itself: waves of tiles, times a cost."""
    tiles = tl.cdiv(rows, BLOCK_M) * tl.cdiv(columns, BLOCK_N)
    return tl.cdiv(tiles, tl.num_programs(0)) * COST
