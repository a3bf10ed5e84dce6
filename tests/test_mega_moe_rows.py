"""The MoE layer's rows: masks, routings of every kind, bad numbers, strides; a token's bits are its own."""

import math

import pytest
import torch

import moe_ops
from moe_ops.testing import bits_equal, mega_moe_inputs

FP8 = ["exact-fp8-k128-k64-v1", "exact-fp8-k128-k128-v1"]
BF16 = ["cpu-fp32-v1", "fp32-serial-v1"]
PROFILES = FP8 + BF16


def make(profile, *shape, **options):
    return mega_moe_inputs(*shape, weights="bf16" if profile in BF16 else "fp8", **options)


def passes(inputs, profile=None, x=None, **options):
    """(y, dx or None for a pair, d topk_weights)."""
    routing = inputs.topk_weights.detach().requires_grad_()
    x = inputs.x.detach().requires_grad_() if x is None else x
    y = moe_ops.mega_moe(x, inputs.topk_idx, routing, *inputs.weights, profile=profile, **options)
    y.backward(inputs.dy)
    return y.detach(), None if isinstance(x, tuple) else x.grad, routing.grad


def same(actual, expected):
    return all(bits_equal(*pair) for pair in zip(actual, expected, strict=True))


def picked(inputs, rows):
    fields = ("x", "dy", "topk_idx", "topk_weights")
    return inputs._replace(**{name: getattr(inputs, name)[rows] for name in fields})


@pytest.mark.parametrize(
    ("profile", "sizes"),
    [
        (FP8[0], (1024, 512, 8, 2)),
        (FP8[1], (384, 192, 8, 3)),
        (BF16[0], (384, 192, 8, 3)),
        (BF16[1], (100, 72, 4, 2)),
    ],
    ids=PROFILES,
)
@pytest.mark.parametrize("limit", [None, 1.0], ids=["nolimit", "limit"])
def test_token_bits_do_not_depend_on_the_batch(profile, sizes, limit, nan_memory):
    """Alone, among others, permuted, whatever experts the others choose."""
    inputs = make(profile, 256, *sizes, masked=0.1)
    expected = passes(inputs, profile, swiglu_limit=limit)
    for count in (1, 1, 2, 33, 256):
        rows = torch.randperm(256)[:count]
        few = passes(picked(inputs, rows), profile, swiglu_limit=limit)
        assert same(few, [value[rows] for value in expected]), count
    for other in (0, -1, 99):
        index = inputs.topk_idx.clone()
        index[5:] = other
        changed = passes(inputs._replace(topk_idx=index), profile, swiglu_limit=limit)
        assert same([value[:5] for value in changed], [value[:5] for value in expected]), other


@pytest.mark.parametrize("profile", PROFILES)
def test_experts_permuted(profile):
    """Weights and indices alike: where an expert is does not matter, the slots do."""
    inputs = make(profile, 40, 256, 128, 8, 3)
    order = torch.randperm(8)
    weights = [w if w is None else w.view(torch.uint8)[order].view(w.dtype) for w in inputs.weights]
    moved = type(inputs)(inputs.x, inputs.dy, order.argsort()[inputs.topk_idx], inputs.topk_weights, *weights)
    assert same(passes(moved, profile), passes(inputs, profile))


@pytest.mark.parametrize("profile", PROFILES)
def test_slots_are_summed_in_ascending_order(profile):
    """bf16 rows in fp32: a large one that goes away again shows what was added before it and what after."""
    inputs = make(profile, 30, 256, 128, 6, 4)
    inputs = inputs._replace(
        topk_idx=inputs.topk_idx[:, :1].expand(-1, 4),
        topk_weights=torch.tensor([[2.0**20, 1, -(2.0**20), 1]]).repeat(30, 1),
    )
    rows = []
    for slot in range(4):
        index = torch.where(torch.arange(4) == slot, inputs.topk_idx, -1)
        rows.append(passes(inputs._replace(topk_idx=index), profile)[:2])
    for result, parts in zip(passes(inputs, profile), zip(*rows, strict=True), strict=False):
        total, reverse = torch.zeros(2, 30, 256)
        for part in parts:
            total = total + part.float()
        for part in parts[::-1]:
            reverse = reverse + part.float()
        assert bits_equal(result, total.bfloat16())
        assert not bits_equal(result, reverse.bfloat16())


@pytest.mark.parametrize("profile", [FP8[0], BF16[0]])
def test_gradients_asked_for_alone(profile):
    """What requires no gradient gets none, and the other one keeps its bits."""
    inputs = make(profile, 30, 256, 192, 8, 3)
    _, dx, dweights = passes(inputs, profile)
    for name, expected in (("x", dx), ("topk_weights", dweights)):
        leaf = getattr(inputs, name).clone().requires_grad_()
        moe_ops.mega_moe(*inputs._replace(**{name: leaf}).arguments, profile=profile).backward(inputs.dy)
        assert bits_equal(leaf.grad, expected)


@pytest.mark.parametrize("profile", PROFILES)
def test_masked_and_dropped_slots(profile, nan_memory):
    """Those of [a, -1, E, b, -7] leave no trace; their weights are NaN and infinite; their gradient is +0."""
    inputs = make(profile, 30, 200, 100, 6, 2)
    index = torch.full((30, 5), -1)
    routing = torch.full((30, 5), math.nan)
    index[:, 2], index[:, 4], routing[:, 4] = 6, -7, math.inf
    index[:, [0, 3]], routing[:, [0, 3]] = inputs.topk_idx, inputs.topk_weights
    actual = passes(inputs._replace(topk_idx=index, topk_weights=routing), profile)
    expected = passes(inputs, profile)
    assert same(actual[:2], expected[:2])
    assert bits_equal(actual[2][:, [0, 3]], expected[2])
    assert bits_equal(actual[2][:, [1, 2, 4]], torch.zeros(30, 3))
    nothing = inputs._replace(topk_idx=torch.full((30, 2), -1), topk_weights=inputs.topk_weights * math.nan)
    nothing.x[3] = math.nan
    assert all(bits_equal(value, torch.zeros_like(value)) for value in passes(nothing, profile))


def test_counts():
    inputs = mega_moe_inputs(4, 128, 64, 5, 3)
    index = torch.tensor([[0, 0, 4], [-1, -1, -1], [5, -2, 4], [2**40, -(2**40), 0]])
    for value in (index, index.clamp(-9, 9).int()):
        y, counts = moe_ops.mega_moe(
            inputs.x, value, inputs.topk_weights, *inputs.weights, return_expert_counts=True
        )
        assert counts.dtype == torch.int32 and counts.tolist() == [3, 0, 0, 0, 2, 4]
        assert y.isfinite().all() and not y[1].any()
    with pytest.raises(ValueError, match=r"topk_idx must be in \[-1, E\) with E = 5; got 5 at \[2, 0\]"):
        moe_ops.mega_moe(inputs.x, index, inputs.topk_weights, *inputs.weights, validate_indices=True)


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("expert", [0, 7])
def test_all_tokens_on_one_expert(profile, expert):
    """The same as a layer of that expert alone; an expert twice in a row makes two rows."""
    inputs = make(profile, 30, 200, 100, 8, 3)
    one = inputs._replace(topk_idx=torch.full((30, 3), expert))
    alone = [w if w is None else w[expert : expert + 1] for w in inputs.weights]
    only = type(inputs)(inputs.x, inputs.dy, torch.zeros(30, 3).int(), inputs.topk_weights, *alone)
    y, dx, dweights = passes(one, profile)
    assert same((y, dx, dweights), passes(only, profile))
    assert bits_equal(dweights[:, 0], dweights[:, 2])
    _, counts = moe_ops.mega_moe(*one.arguments, profile=profile, return_expert_counts=True)
    assert counts.tolist() == [90 * (e == expert) for e in range(9)]


@pytest.mark.parametrize("top_k", [1, 2, 7, 32])
@pytest.mark.parametrize("profile", PROFILES)
def test_top_k(profile, top_k):
    """More slots than experts too: each is a row of its own, here of equal weights and one expert."""
    inputs = make(profile, 5, 100, 72, 3, top_k)
    y, dx, dweights = passes(inputs, profile)
    assert y.isfinite().all() and dx.any(1).all() and dweights.all()
    equal = inputs._replace(topk_idx=torch.ones(5, top_k).long(), topk_weights=torch.full((5, top_k), 0.5))
    one_slot = equal._replace(topk_idx=torch.ones(5, 1).long(), topk_weights=torch.full((5, 1), 0.5))
    single = passes(one_slot, profile)
    y, dx, dweights = passes(equal, profile)
    for total, row in ((y, single[0]), (dx, single[1])):
        expected = torch.zeros(row.shape)
        for _ in range(top_k):
            expected += row.float()
        assert bits_equal(total, expected.bfloat16())
    assert bits_equal(dweights, single[2].expand(5, top_k))


@pytest.mark.parametrize("profile", PROFILES)
def test_no_tokens(profile, nan_memory):
    inputs = make(profile, 0, 200, 100, 4, 2)
    y, dx, dweights = passes(inputs, profile)
    assert y.shape == dx.shape == (0, 200) and y.dtype == dx.dtype == torch.bfloat16
    assert dweights.shape == (0, 2) and dweights.dtype == torch.float32
    _, counts = moe_ops.mega_moe(*inputs.arguments, profile=profile, return_expert_counts=True)
    assert counts.tolist() == [0] * 5


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=str)
@pytest.mark.parametrize("where", ["x", "dy", "topk_weights"])
@pytest.mark.parametrize("profile", PROFILES)
def test_bad_numbers_stay_in_their_token(profile, where, value):
    """In the fp8 profiles they fill y's row and dx's row of that token."""
    inputs = make(profile, 20, 200, 100, 4, 2)
    expected = passes(inputs, profile)
    getattr(inputs, where)[7, 1] = value
    actual = passes(inputs, profile)
    others = torch.arange(20) != 7
    assert same([part[others] for part in actual], [part[others] for part in expected])
    y, dx, dweights = (part[7] for part in actual)
    if where == "dy":
        assert bits_equal(y, expected[0][7]) and not dx.isfinite().any() and not dweights.isfinite().any()
    elif where == "topk_weights":
        assert not y.isfinite().any() and not dx.isfinite().any() and bits_equal(dweights, expected[2][7])
    elif profile in FP8 or math.isnan(value):
        assert y.isnan().all() and dx.isnan().all() and dweights.isnan().all()
    else:
        assert not y.isfinite().all()
    if profile in FP8 and where == "topk_weights":
        assert y.isnan().all()


@pytest.mark.parametrize("profile", PROFILES)
def test_zero_token_and_zero_blocks(profile):
    """An all-zero 128 x 128 block of weights has scale 1 or 0."""
    inputs = make(profile, 20, 256, 192, 4, 2)
    inputs.x[3] = 0
    inputs.w_gate_up[:, :128, 128:], inputs.w_down[:, 128:, :128] = 0, 0
    if profile in FP8:
        inputs.w_gate_up_scale[:, 0, 1], inputs.w_down_scale[:, 1, 0] = 1.0, 0.0
    y, dx, dweights = passes(inputs, profile)
    assert not y[3].any() and not dweights[3].any() and not dx[3].any()  # both factors of a gradient are zero
    assert y.isfinite().all() and dx.isfinite().all()


@pytest.mark.parametrize("profile", FP8)
def test_pair(profile):
    """What `quantize_activations` returns has the bits of x in bf16; the gradient is that of topk_weights."""
    inputs = mega_moe_inputs(40, 300, 192, 8, 3)
    codes, scales = moe_ops.quantize_activations(inputs.x)
    wide = torch.zeros(40, 2, 300).to(codes.dtype)
    wide[:, 1].copy_(codes)
    expected = passes(inputs, profile)
    for pair in ((codes, scales), (wide[:, 1], scales.t().contiguous().t())):
        y, _, dweights = passes(inputs, profile, x=pair)
        assert y.dtype == torch.bfloat16 and same((y, dweights), expected[::2])
    with pytest.raises(ValueError, match="x_scale must be without requires_grad"):
        passes(inputs, profile, x=(codes, scales.clone().requires_grad_()))


@pytest.mark.parametrize("profile", FP8)
def test_e8m0_scales_are_widened(profile):
    inputs = mega_moe_inputs(10, 200, 100, 4, 2)
    powers = [w.log2().round().exp2() for w in (inputs.w_gate_up_scale, inputs.w_down_scale)]
    wide = inputs._replace(w_gate_up_scale=powers[0], w_down_scale=powers[1])
    narrow = [scale.to(torch.float8_e8m0fnu) for scale in powers]
    narrow = inputs._replace(w_gate_up_scale=narrow[0], w_down_scale=narrow[1])
    assert same(passes(narrow, profile), passes(wide, profile))


def strided_views(value):
    wide = value.new_full((value.shape[0], 2 * value.shape[1]), 1)
    wide[:, ::2] = value
    return {"inner-strided": wide[:, ::2], "column-major": value.t().contiguous().t()}


@pytest.mark.parametrize("kind", ["inner-strided", "column-major"])
@pytest.mark.parametrize("argument", ["x", "dy", "topk_idx", "topk_weights"])
@pytest.mark.parametrize("profile", [FP8[0], BF16[0]])
def test_strides_do_not_reach_the_bits(argument, kind, profile):
    inputs = make(profile, 40, 200, 100, 4, 3)
    strided = inputs._replace(**{argument: strided_views(getattr(inputs, argument))[kind]})
    actual = passes(strided, profile)
    assert same(actual, passes(inputs, profile))
    assert actual[0].is_contiguous()
    if argument == "x":
        repeated = inputs.x[:1].expand(40, 200)
        copied = passes(inputs._replace(x=repeated.contiguous()), profile)
        assert same(passes(inputs._replace(x=repeated), profile), copied)


@pytest.mark.parametrize("profile", PROFILES)
def test_stride_zero_gradients(profile):
    """`sum().backward()` hands over a gradient whose strides are zero."""
    inputs = make(profile, 20, 200, 100, 4, 2)
    expected = passes(inputs._replace(dy=torch.ones_like(inputs.dy)), profile)
    x, routing = inputs.x.requires_grad_(), inputs.topk_weights.requires_grad_()
    moe_ops.mega_moe(x, inputs.topk_idx, routing, *inputs.weights, profile=profile).sum().backward()
    assert same((x.grad, routing.grad), expected[1:])


@pytest.mark.parametrize("limit", [None, 0.5, 10.0], ids=str)
@pytest.mark.parametrize("profile", PROFILES)
def test_limit_of_large_pre_activations(profile, limit):
    """Above 10 a limit bounds the output: |a| <= c^2 where the routing weight is 1; a wide one is none."""
    inputs = make(profile, 20, 200, 128, 4, 1)
    inputs.x.mul_(40)
    y, dx, _ = passes(inputs, profile, swiglu_limit=limit)
    free = passes(inputs, profile, swiglu_limit=1e6)
    assert bits_equal(y, free[0]) == bits_equal(dx, free[1]) == (limit is None)
    if limit is not None:
        weights = inputs.w_down.float()
        if profile in FP8:
            weights = moe_ops.dequantize_weights_block(*inputs.weights[2:])
        assert (y.float().abs() <= 1.07 * limit**2 * weights.abs().sum(2)[inputs.topk_idx[:, 0]]).all()
