"""The MoE kernels, stage by stage: quantisers to the bit, products against fp64, routing, every tile."""

import pytest
import torch

import moe_ops
from moe_ops import moe_reference, quant
from moe_ops.testing import bit_mismatches, bits_equal, mega_moe_inputs

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
if torch.cuda.is_available():
    from moe_ops.kernels import moe, moe_configs, moe_dispatch, moe_routing
    from moe_ops.kernels.launch import device_facts
    from moe_ops.kernels.moe_operands import ExpertWeight
    from moe_ops.kernels.moe_tiles import (
        expert_tile_ends,
        locate_tile,
        moe_gate_up_tile,
        pair_tree_tile,
        quantize_tile,
        requantize_tile,
    )

    HOPPER = torch.cuda.get_device_capability() == (9, 0)
else:
    HOPPER = False

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="fp8 profiles are Hopper's")]
DEVICE = "cuda"


@triton.jit
def _quantize_kernel(x_ptr, codes_ptr, scales_ptr, N: tl.constexpr, GROUP: tl.constexpr, AGAIN: tl.constexpr):
    row = tl.program_id(0) * 16 + tl.arange(0, 16)
    column = tl.arange(0, N)
    x = tl.load(x_ptr + row[:, None] * N + column[None, :])
    if AGAIN:
        codes, scales = requantize_tile(x, GROUP)
    else:
        codes, scales = quantize_tile(x, GROUP)
    tl.store(codes_ptr + row[:, None] * N + column[None, :], codes)
    group = tl.arange(0, N // GROUP)
    tl.store(scales_ptr + row[:, None] * (N // GROUP) + group[None, :], scales)


@triton.jit
def _tree_kernel(x_ptr, sums_ptr, N: tl.constexpr):
    row = tl.program_id(0) * 16 + tl.arange(0, 16)
    x = tl.load(x_ptr + row[:, None] * N + tl.arange(0, N)[None, :])
    tl.store(sums_ptr + row[:, None] * (N // 64) + tl.arange(0, N // 64)[None, :], pair_tree_tile(x))


def every_kind_of_fp32(rows, columns):
    """Bit patterns at random, each row in a band of exponents; zeros, subnormals, inf, NaN, borders."""
    generator = torch.Generator().manual_seed(1)
    bits = torch.randint(0, 2**31 - 1, (rows, columns), generator=generator, dtype=torch.int64)
    exponent = torch.randint(0, 255, (rows, 1), generator=generator)
    spread = torch.randint(0, 12, (rows, columns), generator=generator)
    bits = (bits & 0x7FFFFF) | ((exponent - spread).clamp(0, 254) << 23)
    sign = torch.randint(0, 2, (rows, columns), generator=generator) << 31
    x = (bits | sign).to(torch.int32).view(torch.float32)
    x[0], x[1], x[2, 5], x[3, 7] = 0.0, -0.0, torch.nan, -torch.inf
    x[4] = torch.linspace(-448, 448, columns)
    for row, amax_bits in enumerate(
        (0x43E00000, 0x43E00001, 0x43DFFFFF, 0x00000001, 0x007FFFFF, 0x7F7FFFFF), 5
    ):
        x[row] = 0.0
        x[row, 3] = torch.tensor(amax_bits, dtype=torch.int32).view(torch.float32)
    return x


@pytest.mark.parametrize("group", [64, 128])
@pytest.mark.parametrize("again", [False, True], ids=["step1", "step5"])
def test_quantisers(group, again):
    """(a) The device functions, fed the same fp32, give the reference's bits."""
    x = every_kind_of_fp32(4096, 256).to(DEVICE)
    codes = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=DEVICE)
    scales = torch.empty(x.shape[0], 256 // group, device=DEVICE)
    _quantize_kernel[(x.shape[0] // 16,)](x, codes, scales, 256, group, again)
    expected = (quant.requantize_rows if again else quant.quantize_rows)(x.cpu(), group)
    for actual, wanted in zip((codes, scales), expected, strict=True):
        assert bits_equal(actual.float(), wanted.float())
    assert scales.isfinite().float().mean() > 0.9


@pytest.mark.parametrize("group", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_quantize_activations(group, dtype):
    x = every_kind_of_fp32(4096, 320).to(DEVICE, dtype).view(64, 64, 320).transpose(0, 1)
    actual = torch.ops.moe_ops.quantize_activations(x, group)
    for value, wanted in zip(actual, quant.quantize_rows(x.cpu(), group), strict=True):
        assert value.is_contiguous()
        assert bits_equal(value.float(), wanted.float())


@pytest.mark.parametrize("block", [(128, 128), (3, 49)], ids=str)
def test_block_quantiser_and_widening(block):
    """In plain torch on both devices: ATen divides by numbers in another way on each."""
    w = every_kind_of_fp32(512, 350)
    codes, scales = moe_ops.quantize_weights_block(w.to(DEVICE), block)
    expected = moe_ops.quantize_weights_block(w, block)
    assert bits_equal(codes.cpu().float(), expected[0].float()) and bits_equal(scales.cpu(), expected[1])
    wide = moe_ops.dequantize_weights_block(codes, scales, block)
    assert bits_equal(wide.cpu(), moe_ops.dequantize_weights_block(*expected, block))
    codes, scales = moe_ops.quantize_activations(w.to(DEVICE), block[1])
    expected = moe_ops.quantize_activations(w, block[1])
    assert bits_equal(codes.cpu().float(), expected[0].float()) and bits_equal(scales.cpu(), expected[1])
    wide = moe_ops.dequantize_activations(codes, scales, block[1])
    assert bits_equal(wide.cpu(), moe_ops.dequantize_activations(*expected, block[1]))


def test_pair_tree():
    x = torch.randn(64, 256, device=DEVICE)
    sums = torch.empty(64, 4, device=DEVICE)
    _tree_kernel[(4,)](x, sums, 256)
    total = sums[:, 0] + 0.0
    for group in sums.unbind(1)[1:]:
        total = total + group
    assert bits_equal(total, moe_reference.tree_sum(x.cpu()).to(DEVICE))


@pytest.mark.parametrize(
    ("tokens", "experts", "top_k"),
    [(1, 4, 1), (7, 300, 32), (700, 8, 3), (3000, 512, 8), (64, 1, 1)],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_routing(tokens, experts, top_k, dtype):
    """Rows are numbered expert by expert, in the order of (token, slot); dropped indices are counted."""
    generator = torch.Generator().manual_seed(tokens)
    index = torch.randint(-2, experts + 1, (tokens, top_k), generator=generator).to(dtype)
    if dtype == torch.int64:
        index[0, 0] = 2**40 + 1
    x = torch.randn(tokens, 256, generator=generator).bfloat16()
    weights = torch.rand(tokens, top_k, generator=generator)
    routing = moe_routing.launch_moe_routing(index.to(DEVICE).t().contiguous().t(), experts)
    assert torch.equal(routing.counts.cpu(), moe_reference.expert_counts(index, experts))
    flat = index.flatten().long()
    valid = (flat >= 0) & (flat < experts)
    order = torch.where(valid, flat, 2**50).argsort(stable=True)[: int(valid.sum())]
    expected = torch.full_like(flat, -1)
    expected[order] = torch.arange(len(order))
    rows, scales, row_weights, slot_rows = moe_dispatch.launch_moe_dispatch(
        x.to(DEVICE), None, index.to(DEVICE), weights.to(DEVICE), routing, fp8=True
    )
    assert torch.equal(slot_rows.flatten().cpu().long(), expected)
    codes, wanted = quant.quantize_rows(x[order // top_k], 128)
    assert bits_equal(rows[: len(order)].float(), codes.float())
    assert bits_equal(scales[:, : len(order)].t(), wanted)
    assert bits_equal(row_weights[: len(order)], weights.flatten()[order])


@triton.jit
def _gate_up_kernel(
    x_ptr, x_scale_ptr, w_ptr, w_scale_ptr, g_ptr, u_ptr, counts_ptr, offsets_ptr, rows, experts, hidden,
    intermediate, ALIGNED: tl.constexpr, SWAP: tl.constexpr, BLOCK_M: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    ends = expert_tile_ends(counts_ptr, experts, BLOCK_M, BINS)
    if tl.program_id(0) < tl.max(ends, 0):
        expert, row, end = locate_tile(tl.program_id(0), ends, counts_ptr, offsets_ptr, BLOCK_M)
        x = (x_ptr, rows, hidden, hidden, 1, None, None)
        blocks = tl.cdiv(hidden, 128)
        stride_e = 2 * intermediate * hidden
        w = (w_ptr, 2 * intermediate, hidden, stride_e, hidden, 1, w_scale_ptr,
             tl.cdiv(2 * intermediate, 128) * blocks, blocks)  # fmt: skip
        column = tl.program_id(1) * 64
        g, u = moe_gate_up_tile(
            x, x_scale_ptr, w, expert, row, column, hidden, BLOCK_M, 64, 128, SWAP, False, ALIGNED
        )
        r, c = row + tl.arange(0, BLOCK_M), column + tl.arange(0, 64)
        mask = (r < end)[:, None] & (c < intermediate)[None, :]
        tl.store(g_ptr + r[:, None] * intermediate + c[None, :], g, mask=mask)
        tl.store(u_ptr + r[:, None] * intermediate + c[None, :], u, mask=mask)


@pytest.mark.parametrize(("block_m", "swap"), [(16, True), (32, True), (64, False)], ids=str)
@pytest.mark.parametrize("shape", [(256, 1024, 512), (100, 4096, 320), (40, 7168, 192)], ids=str)
def test_gate_up_against_fp64(shape, block_m, swap, record_property):
    """(b) |err| / sum |x w| of g and u before requantising is below 2^-10."""
    tokens, hidden, intermediate = shape
    inputs = mega_moe_inputs(tokens, hidden, intermediate, 4, 2, device=DEVICE)
    routing = moe_routing.launch_moe_routing(inputs.topk_idx, 4)
    rows, scales, _, _ = moe_dispatch.launch_moe_dispatch(
        inputs.x, None, inputs.topk_idx, inputs.topk_weights, routing, fp8=True
    )
    g, u = torch.full((2, tokens * 2, intermediate), torch.nan, device=DEVICE).unbind()
    grid = (tokens * 2, triton.cdiv(intermediate, 64))
    _gate_up_kernel[grid](
        rows, scales, inputs.w_gate_up, inputs.w_gate_up_scale, g, u, routing.counts, routing.offsets,
        tokens * 2, 4, hidden, intermediate, intermediate % 64 == 0, swap, block_m, routing.bins,
    )  # fmt: skip
    exact_x = rows.double() * quant.widen_rows(scales.t(), hidden, 128).double()
    scale = quant.widen_blocks(inputs.w_gate_up_scale, 2 * intermediate, hidden, (128, 128))
    exact_w = inputs.w_gate_up.double() * scale.double()
    worst = 0.0
    for expert in range(4):
        first = int(routing.offsets[expert])
        mine = slice(first, first + int(routing.counts[expert]))
        exact = exact_x[mine] @ exact_w[expert].t()
        bound = exact_x[mine].abs() @ exact_w[expert].abs().t()
        actual = torch.cat((g[mine], u[mine]), 1).double()
        worst = max(worst, ((actual - exact).abs() / bound).max().item())
    record_property("worst error / sum |x w|", worst)
    print(
        f"\ngate-up {shape} block_m {block_m}: max |err| / sum |x w| = {worst:.2e} = "
        f"2^{torch.tensor(worst).log2():.1f}"
    )
    assert worst < 2**-10


@pytest.mark.parametrize("group", [64, 128])
@pytest.mark.parametrize("shape", [(256, 1024, 512), (100, 384, 4224), (9, 256, 192)], ids=str)
def test_down_and_combine(shape, group):
    """(c) Fed the kernel's own codes and scales: no further from fp64 than twice the reference."""
    tokens, hidden, intermediate = shape
    inputs = mega_moe_inputs(tokens, hidden, intermediate, 4, 2, device=DEVICE)
    routing = moe_routing.launch_moe_routing(inputs.topk_idx, 4)
    rows, scales, weights, slot_rows = moe_dispatch.launch_moe_dispatch(
        inputs.x, None, inputs.topk_idx, inputs.topk_weights, routing, fp8=True
    )
    gate_up = ExpertWeight(inputs.w_gate_up, inputs.w_gate_up_scale)
    down = ExpertWeight(inputs.w_down, inputs.w_down_scale)
    h, h_scales = moe.launch_moe_gate_up(rows, scales, gate_up, weights, routing, None, group)
    out = moe.launch_moe_product(
        moe._DOWN[group], h, h_scales, down, routing, moe.new_rows(h, hidden), weight_nk=True
    )
    y = moe_dispatch.launch_moe_combine(out, slot_rows)
    exact_h = h.double() * quant.widen_rows(h_scales.t(), intermediate, group).double()
    exact_w = (
        inputs.w_down.double()
        * quant.widen_blocks(inputs.w_down_scale, hidden, intermediate, (128, 128)).double()
    )
    expert = torch.arange(4, device=DEVICE).repeat_interleave(routing.counts[:4].long())
    exact = torch.einsum("ri,rhi->rh", exact_h, exact_w[expert])[slot_rows.long()].sum(1)
    rules = moe_reference.Fp8Rules(group)
    plain = torch.zeros_like(out)
    for e in range(4):
        mine = expert == e
        codes = h.view(torch.uint8)[mine].view(h.dtype)
        operand = codes, h_scales.t()[mine]
        plain[mine] = rules.down_product(operand, inputs.w_down[e], inputs.w_down_scale[e]).bfloat16()
    plain = moe_reference.combine(plain[slot_rows.long()].float(), inputs.topk_idx, 4).bfloat16()

    def error(value):
        return ((value.double() - exact).norm() / exact.norm()).item()

    assert error(y) <= 2 * error(plain)


def run(inputs, group, limit=2.0):
    y, _ = moe.forward(inputs.x, None, *inputs.arguments[1:], limit, group)
    dx, dweights = moe.backward(
        inputs.dy, inputs.x, None, *inputs.arguments[1:], limit, group, dx=True, dweights=True
    )
    return y, dx, dweights


@pytest.mark.parametrize("group", [64, 128, None], ids=["k64", "k128", "bf16"])
@pytest.mark.parametrize("shape", [(40, 1024, 512), (500, 384, 640)], ids=str)
def test_every_tile(group, shape, monkeypatch):
    """All tiles of the tables, with and without descriptors, swapped or not: the same bits."""
    inputs = mega_moe_inputs(*shape, 4, 2, device=DEVICE, weights="bf16" if group is None else "fp8")
    expected = run(inputs, group)
    choose, facts = moe_configs.choose, device_facts(inputs.x.device)
    gate_up = {64: "gate_up_fp8", 128: "gate_up_fp8_wide", None: "gate_up_bf16"}[group]
    kind = "bf16" if group is None else "fp8"
    for name in (gate_up, moe._DOWN[group], f"swiglu_backward_{kind}", f"dx_{kind}"):
        family = moe_configs.FAMILIES[name]
        for _, tile in family.tiles:
            assert moe_configs.is_valid(family, tile, facts, tma=True)

            def forced(asked, *args, name=name, tile=tile, **options):
                return tile if asked == name else choose(asked, *args, **options)

            monkeypatch.setattr(moe_configs, "choose", forced)
            for actual, wanted in zip(run(inputs, group), expected, strict=True):
                assert bits_equal(actual, wanted), (name, tile, int(bit_mismatches(actual, wanted).sum()))
