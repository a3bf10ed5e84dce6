"""The MoE layer on the CPU: values, gradients, routing, bits. The same operators run the kernels on a GPU."""

import itertools

import pytest
import torch
from torch.nn import functional as F

import moe_ops
from moe_ops import quant
from moe_ops.testing import bits_equal, mega_moe_inputs

# (T, H, I, E, top_k): one-ulp faults do not show at tiny shapes; ragged H and I; the gate / up border inside a
# block (192, 320); I above a cap that another library had; more slots than experts; many experts.
SHAPES = [
    (1, 128, 128, 4, 2),
    (17, 384, 192, 8, 3),
    (9, 100, 72, 5, 2),
    (20, 256, 320, 3, 32),
    (5, 128, 4224, 3, 1),
    (12, 64, 64, 512, 8),
    (256, 1024, 512, 8, 2),
]
SHAPE_IDS = ["T{}-H{}-I{}-E{}-top{}".format(*shape) for shape in SHAPES]
PROFILES = ["exact-fp8-k128-k64-v1", "exact-fp8-k128-k128-v1", "cpu-fp32-v1"]


def make(shape, profile=None, **options):
    fp8 = profile is None or "fp8" in profile
    return mega_moe_inputs(*shape, weights="fp8" if fp8 else "bf16", **options)


def passes(inputs, profile=None, limit=None, **options):
    """(y, dx, d topk_weights)."""
    x, weights = (
        inputs.x.detach().clone().requires_grad_(),
        inputs.topk_weights.detach().clone().requires_grad_(),
    )
    options = {"profile": profile, "swiglu_limit": limit, **options}
    y = moe_ops.mega_moe(x, inputs.topk_idx, weights, *inputs.weights, **options)
    y.backward(inputs.dy)
    return y.detach(), x.grad, weights.grad


def all_equal(actual, expected):
    return all(bits_equal(*pair) for pair in zip(actual, expected, strict=True))


def select(inputs, rows):
    return type(inputs)(*(value[rows] for value in inputs[:4]), *inputs.weights)


def distance(actual, expected):
    x, y = actual.double(), expected.double()
    return (1 - 2 * (x * y).sum() / ((x * x).sum() + (y * y).sum())).item()


class StraightThrough(torch.autograd.Function):
    """A quantiser whose gradient passes."""

    @staticmethod
    def forward(ctx, value, function):
        return function(value)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


def quantised(value, quantiser, group):
    def function(v):
        codes, scales = quantiser(v.float(), group)
        return codes.double() * quant.widen_rows(scales, v.shape[-1], group).double()

    return StraightThrough.apply(value, function)


def fp64_passes(inputs, profile, limit=None):
    """The layer in fp64 autograd on the same quantised values, expert by expert."""
    group = None if profile == "cpu-fp32-v1" else 64 if "k64" in profile else 128
    x, topk_weights = inputs.x.double().requires_grad_(), inputs.topk_weights.double().requires_grad_()
    w_gate_up, w_down = (
        codes.double()
        if scale is None
        else codes.double() * quant.widen_blocks(scale, *codes.shape[1:], (128, 128))
        for codes, scale in (inputs.weights[:2], inputs.weights[2:])
    )
    source = x if group is None else quantised(x, quant.quantize_rows, 128)
    y = torch.zeros_like(x)
    for expert in range(w_down.shape[0]):
        token, slot = (inputs.topk_idx == expert).nonzero(as_tuple=True)
        g, u = (source[token] @ w_gate_up[expert].t()).chunk(2, 1)
        if limit is not None:
            g, u = g.clamp(max=limit), u.clamp(-limit, limit)
        a = F.silu(g) * u * topk_weights[token, slot, None]
        h = a if group is None else quantised(a, quant.requantize_rows, group)
        y = y.index_add(0, token, h @ w_down[expert].t())
    y.backward(inputs.dy.double())
    return y.detach(), x.grad, topk_weights.grad


@pytest.mark.parametrize("shape", SHAPES, ids=SHAPE_IDS)
@pytest.mark.parametrize("limit", [None, 1.0], ids=["nolimit", "limit"])
@pytest.mark.parametrize("profile", PROFILES)
def test_against_fp64(shape, limit, profile, nan_memory):
    """Forward and both gradients, half of the slots masked and their routing weights NaN.

    y: codes of the activation may differ by rounding from those of fp64. dx: dgate, dup and each row are rounded
    to bf16; d topk_weights: fp32 throughout.
    """
    if profile != PROFILES[0] and (shape[3] == 512 or shape[0] == 256 and limit is None):
        pytest.skip("slow: one profile is enough for many experts, and the large shape without a limit")
    inputs = make(shape, profile, masked=0.5 if shape[4] > 1 else 0.0)
    bounds = (1e-4, 2e-5, 1e-9)
    actual = passes(inputs, profile, limit)
    for value, exact, bound in zip(actual, fp64_passes(inputs, profile, limit), bounds, strict=True):
        exact = torch.nan_to_num(exact)
        assert distance(value, exact) < bound
        assert not value[(exact == 0).all(-1)].any()
    assert [value.dtype for value in actual] == [torch.bfloat16, torch.bfloat16, torch.float32]


@pytest.mark.parametrize("profile", PROFILES)
def test_the_layer_is_its_oracle(profile):
    inputs = make((40, 256, 192, 5, 3), profile, masked=0.2)
    if profile == "cpu-fp32-v1":
        profile = "fp32-serial-v1"
    expected_y, expected_counts = moe_ops.mega_moe_reference(
        *inputs.arguments, profile=profile, swiglu_limit=1.0, return_expert_counts=True
    )
    y, dx, dweights = passes(inputs, profile, 1.0)
    assert bits_equal(y, expected_y)
    assert torch.equal(
        expected_counts[:-1], torch.bincount(inputs.topk_idx[inputs.topk_idx >= 0], minlength=5)
    )
    gradients = moe_ops.mega_moe_dx_dweights_reference(
        inputs.dy, *inputs.arguments, profile=profile, swiglu_limit=1.0
    )
    assert all_equal((dx, dweights), gradients)
    x, weights = inputs.x.clone().requires_grad_(), inputs.topk_weights.clone().requires_grad_()
    moe_ops.mega_moe_reference(
        x, inputs.topk_idx, weights, *inputs.weights, profile=profile, swiglu_limit=1.0
    ).backward(inputs.dy)
    assert all_equal((x.grad, weights.grad), gradients)


@pytest.mark.parametrize("profile", PROFILES)
def test_combine_order(profile):
    """Rows rounded to bf16 are added in fp32 in slot order: each slot alone says what they are."""
    inputs = make((30, 256, 128, 6, 4), profile)
    # A large row that goes away again: what was added to it before and after is rounded differently.
    inputs = inputs._replace(
        topk_idx=inputs.topk_idx[:, :1].expand(-1, 4),
        topk_weights=torch.tensor([[2.0**20, 1, -(2.0**20), 1]]).repeat(30, 1),
    )
    rows = []
    for slot in range(4):
        index = torch.full_like(inputs.topk_idx, -1)
        index[:, slot] = inputs.topk_idx[:, slot]
        rows.append(moe_ops.mega_moe(*inputs._replace(topk_idx=index).arguments, profile=profile).float())
    total = torch.zeros_like(rows[0])
    for row in rows:
        total = total + row
    y = moe_ops.mega_moe(*inputs.arguments, profile=profile)
    assert bits_equal(y, total.bfloat16())
    assert not bits_equal(y, (rows[3] + rows[2] + rows[1] + rows[0]).bfloat16())


@pytest.mark.parametrize("profile", PROFILES)
def test_bits_of_a_token(profile):
    """Alone, among others, anywhere, other experts loaded or empty, experts permuted."""
    inputs = make((100, 256, 192, 6, 2), profile, masked=0.1)
    expected = passes(inputs, profile)
    for rows in ([7], [7, 3], list(range(33)), torch.randperm(100).tolist(), [5] * 40):
        assert all_equal(passes(select(inputs, rows), profile), [value[rows] for value in expected])
    for other in (-1, 0, 5, 77):
        index = inputs.topk_idx.clone()
        index[4:] = other
        actual = passes(inputs._replace(topk_idx=index), profile)
        assert all_equal([value[:4] for value in actual], [value[:4] for value in expected])
    order = torch.randperm(6)
    weights = [w if w is None else w.view(torch.uint8)[order].view(w.dtype) for w in inputs.weights]
    index = torch.where(inputs.topk_idx < 0, -1, order.argsort()[inputs.topk_idx])
    moved = type(inputs)(inputs.x, inputs.dy, index, inputs.topk_weights, *weights)
    assert all_equal(passes(moved, profile), expected)


def test_special_routings(nan_memory):
    """All tokens on one expert, an expert twice in a row, all masked, dropped indices (counted)."""
    inputs = make((20, 128, 64, 8, 3))
    for dtype, (expert, dropped) in itertools.product(
        (torch.int32, torch.int64), ((0, 0), (-1, 0), (8, 60), (-2, 60))
    ):
        index = torch.full_like(inputs.topk_idx, expert, dtype=dtype)
        case = inputs._replace(topk_idx=index)
        y, dx, dweights = passes(case)
        _, counts = moe_ops.mega_moe(*case.arguments, return_expert_counts=True)
        assert counts.dtype == torch.int32 and counts.shape == (9,)
        assert counts[8] == dropped
        assert counts[:8].sum() == (60 if expert == 0 else 0)
        if expert:
            assert not (y.any() or dx.any() or dweights.any())
            assert not torch.signbit(y).any()
    twice = inputs._replace(topk_idx=inputs.topk_idx[:, :1].expand(-1, 3))
    assert distance(passes(twice)[0], fp64_passes(twice, PROFILES[0])[0]) < 1e-4


def test_no_tokens():
    for profile in (*PROFILES, "fp32-serial-v1"):
        inputs = make((0, 128, 64, 4, 2), profile)
        y, dx, dweights = passes(inputs, profile)
        assert y.shape == dx.shape == (0, 128) and dweights.shape == (0, 2)
        assert y.dtype == torch.bfloat16


@pytest.mark.parametrize("value", [torch.nan, torch.inf], ids=str)
def test_not_finite_tokens(value):
    """A whole NaN row for that token; the bits of all others unchanged; masked rows do not see NaN weights."""
    inputs = make((20, 256, 192, 8, 3))
    expected = passes(inputs)
    inputs.x[7, 200] = value
    actual = passes(inputs)
    assert actual[0][7].isnan().all()
    others = torch.arange(20) != 7
    assert all_equal([v[others] for v in actual], [v[others] for v in expected])


def test_zero_token_and_zero_block():
    inputs = make((20, 256, 256, 8, 3))
    inputs.x[3] = 0
    gate_up = moe_ops.dequantize_weights_block(inputs.w_gate_up, inputs.w_gate_up_scale)
    gate_up[:, 128:256, :128] = 0
    inputs = inputs._replace(
        **dict(zip(("w_gate_up", "w_gate_up_scale"), moe_ops.quantize_weights_block(gate_up), strict=True))
    )
    y, dx, dweights = passes(inputs)
    assert not y[3].any() and not dweights[3].any()
    assert all(value.isfinite().all() for value in (y, dx, dweights))


def test_limit():
    """Pre-activations far above 10; the gradient is zero exactly at the bound."""
    inputs = make((20, 256, 128, 4, 2))
    inputs = inputs._replace(x=inputs.x * 40)
    limited, free = passes(inputs, limit=10.0), passes(inputs)
    assert distance(limited[0], fp64_passes(inputs, PROFILES[0], 10.0)[0]) < 1e-4
    assert distance(limited[0], free[0]) > 0.1
    x = torch.ones(1, 128).bfloat16()
    w_gate_up = torch.zeros(1, 256, 128)
    w_gate_up[0, ::2, 0] = 1.0  # g and u are exactly 1 or 0
    weights = (
        *moe_ops.quantize_weights_block(w_gate_up),
        *moe_ops.quantize_weights_block(torch.ones(1, 128, 128)),
    )
    index, routing = torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1)
    for limit, is_zero in ((1.0, True), (1.0 + 2.0**-20, False)):
        leaf = x.clone().requires_grad_()
        moe_ops.mega_moe(leaf, index, routing, *weights, swiglu_limit=limit).sum().backward()
        assert (leaf.grad[0, 0] == 0) == is_zero


def test_pair():
    """Quantised by the caller, any strides: the same bits, and a gradient for topk_weights alone."""
    inputs = make((30, 300, 192, 8, 3))
    y, _, dweights = passes(inputs)
    codes, scales = moe_ops.quantize_activations(inputs.x)
    strided = codes.view(torch.uint8).t().contiguous().t().view(codes.dtype), scales.t().contiguous().t()
    for pair in ((codes, scales), list(strided)):
        weights = inputs.topk_weights.clone().requires_grad_()
        actual = moe_ops.mega_moe(pair, inputs.topk_idx, weights, *inputs.weights)
        actual.backward(inputs.dy)
        assert bits_equal(actual, y) and bits_equal(weights.grad, dweights)


def test_scales_of_powers_of_two():
    inputs = make((10, 256, 128, 4, 2))
    exponent = [scale.log2().round().exp2() for scale in inputs.weights[1::2]]
    narrow = [scale.to(torch.float8_e8m0fnu) for scale in exponent]
    results = [
        passes(inputs._replace(w_gate_up_scale=first, w_down_scale=second))
        for first, second in (exponent, narrow)
    ]
    assert all_equal(*results)


@pytest.mark.parametrize("profile", PROFILES)
def test_strides(profile):
    """x, routing, gradient of any strides, also of stride 0."""
    inputs = make((30, 256, 192, 8, 3), profile)
    changed = inputs._replace(
        x=inputs.x.t().contiguous().t(),
        topk_idx=inputs.topk_idx.repeat_interleave(2, 1)[:, ::2],
        topk_weights=inputs.topk_weights.t().contiguous().t(),
    )
    assert all_equal(passes(changed, profile), passes(inputs, profile))
    ones = inputs._replace(dy=torch.ones_like(inputs.dy))
    stride_0 = inputs._replace(dy=torch.ones(1, 1).bfloat16().expand(30, 256))
    assert all_equal(passes(stride_0, profile), passes(ones, profile))


def test_gradients_asked_for_alone():
    """What requires no gradient gets none, and the other one keeps its bits."""
    inputs = make((30, 256, 192, 8, 3))
    _, dx, dweights = passes(inputs)
    for name, expected in (("x", dx), ("topk_weights", dweights)):
        leaf = getattr(inputs, name).clone().requires_grad_()
        moe_ops.mega_moe(*inputs._replace(**{name: leaf}).arguments).backward(inputs.dy)
        assert bits_equal(leaf.grad, expected)


def test_through_a_router():
    """Finite differences of the loss in the router's weight, in the direction of its gradient (bf16 weights)."""
    inputs = make((64, 128, 64, 4, 4), "cpu-fp32-v1")
    router = (torch.randn(128, 4) * 0.1).requires_grad_()
    target = torch.randn(64, 128)

    def loss(weight):
        routing = (inputs.x.float() @ weight).softmax(-1)
        index = torch.arange(4).expand(64, 4)
        return (moe_ops.mega_moe(inputs.x, index, routing, *inputs.weights).float() * target).sum()

    loss(router).backward()
    direction = router.grad / router.grad.norm()
    with torch.no_grad():
        slope = (loss(router + 0.1 * direction) - loss(router - 0.1 * direction)) / 0.2
    assert abs(slope / router.grad.norm() - 1) < 0.03
