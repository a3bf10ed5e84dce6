"""The oracle against scalar Python arithmetic, which shares no code with it."""

import itertools
import math
import struct

import pytest
import torch

import moe_ops
from moe_ops import reference
from moe_ops.testing import bits_equal, shared_expert_inputs

ADVERSARIAL = [
    0.0,
    -0.0,
    1.0,
    -1.5,
    math.inf,
    -math.inf,
    math.nan,
    1e38,
    -1e38,
    2.0**-133,
    -(2.0**-126),
    100.0,
]


def fp32(value: float) -> float:
    """Round a double to fp32.

    A double holds the product of two fp32 exactly, and rounding the double sum of two fp32 again is innocuous
    (53 >= 2 * 24 + 2 bits).
    """
    if math.isnan(value) or math.isinf(value):
        return value
    try:
        return struct.unpack("f", struct.pack("f", value))[0]
    except OverflowError:
        return math.copysign(math.inf, value)


def bf16(value: float) -> float:
    return torch.tensor(value, dtype=torch.float32).bfloat16().item()


def mul(a: float, b: float) -> float:
    return fp32(a * b)


def add(a: float, b: float) -> float:
    return fp32(a + b)


def sigmoid(value: float) -> float:
    return torch.sigmoid(torch.full((64,), value, dtype=torch.float32))[0].item()


def dot(a: list[float], b: list[float]) -> float:
    total = 0.0
    for left, right in zip(a, b, strict=True):
        total = add(total, mul(left, right))
    return total


def clamp(value: float, low: float, high: float) -> float:
    return value if math.isnan(value) else max(low, min(value, high))


def scalar_forward(x, w_gate, w_up, w_down, limit):
    pre_activations = []
    for gate_row, up_row in zip(w_gate, w_up, strict=True):
        pre_activations.append((dot(x, gate_row), dot(x, up_row)))
    h = []
    for g, u in pre_activations:
        if limit is not None:
            g, u = clamp(g, -math.inf, limit), clamp(u, -limit, limit)
        h.append(bf16(mul(mul(g, sigmoid(g)), u)))
    return [bf16(dot(h, row)) for row in w_down], pre_activations


def scalar_dx(dy, pre_activations, w_gate, w_up, w_down, limit):
    dgates, dups = [], []
    for i, (g, u) in enumerate(pre_activations):
        dh = bf16(dot(dy, [row[i] for row in w_down]))
        gc, uc = (g, u) if limit is None else (clamp(g, -math.inf, limit), clamp(u, -limit, limit))
        sig = sigmoid(gc)
        dsilu = mul(sig, add(1.0, mul(gc, add(1.0, -sig))))
        dgate, dup = mul(mul(dh, uc), dsilu), mul(dh, mul(gc, sig))
        if limit is not None:
            dgate = 0.0 if g >= limit else dgate
            dup = 0.0 if abs(u) >= limit else dup
        dgates.append(bf16(dgate))
        dups.append(bf16(dup))
    stacked = w_gate + w_up
    return [dot(dgates + dups, [row[h] for row in stacked]) for h in range(len(w_gate[0]))]


@pytest.mark.parametrize("limit", [None, 0.75], ids=["nolimit", "limit"])
def test_equals_scalar_arithmetic(limit):
    inputs = shared_expert_inputs(5, 24, 18, seed=1)
    inputs.x[1] *= 40  # pre-activations far beyond the limit
    inputs.x[2, :12] = torch.tensor(ADVERSARIAL)
    inputs.x[3] = 0
    inputs.x[4] *= 2.0**-100
    x, dy, w_gate, w_up, w_down = (value.float().tolist() for value in inputs)
    y, dx = [], []
    for x_row, dy_row in zip(x, dy, strict=True):
        y_row, pre_activations = scalar_forward(x_row, w_gate, w_up, w_down, limit)
        y.append(y_row)
        dx.append(scalar_dx(dy_row, pre_activations, w_gate, w_up, w_down, limit))
    actual = moe_ops.shared_expert_mlp_reference(inputs.x, *inputs.weights, swiglu_limit=limit)
    assert bits_equal(actual, torch.tensor(y).bfloat16())
    actual_dx = moe_ops.shared_expert_mlp_dx_reference(
        inputs.dy, inputs.x, *inputs.weights, swiglu_limit=limit, out_dtype=torch.float32
    )
    assert bits_equal(actual_dx, torch.tensor(dx))


def test_swiglu_on_all_pairs_of_special_values():
    """Saturation, subnormals, signed zeros, NaN and infinities, where a reordered expression would show."""
    values = [*ADVERSARIAL, 0.75, -0.75, 3.0, 88.0, -88.0, 104.0, 1e-40]
    pairs = list(itertools.product(values, values))
    g, u = (torch.tensor(column, dtype=torch.float32) for column in zip(*pairs, strict=True))
    expected = [bf16(mul(mul(fp32(a), sigmoid(fp32(a))), fp32(b))) for a, b in pairs]
    assert bits_equal(reference.swiglu(g, u, None), torch.tensor(expected).bfloat16())


def rounded_mul(a, b):
    """fp32 product by way of doubles, which hold it exactly."""
    return (a.double() * b.double()).float()


def rounded_add(a, b):
    """fp32 sum by way of doubles, where the second rounding is innocuous."""
    return (a.double() + b.double()).float()


@pytest.mark.parametrize("transpose_weight", [True, False], ids=["NK", "KN"])
@pytest.mark.parametrize("scale", [1.0, 2.0**-70, 2.0**62], ids=["normal", "subnormal-products", "overflow"])
def test_serial_matmul_multiplies_rounds_adds_rounds(transpose_weight, scale):
    """Long enough to differ from another order; with products below 2^-149, where an FMA differs."""
    a = (torch.randn(9, 600) * scale).bfloat16()
    weight = ((torch.randn(33, 600) if transpose_weight else torch.randn(600, 33)) * scale).bfloat16()
    by_k = weight.t() if transpose_weight else weight
    expected = torch.zeros(9, 33)
    fused = torch.zeros(9, 33)
    for k in range(600):
        product = a[:, k, None].double() * by_k[k].double()
        expected = rounded_add(expected, product.float())
        fused = (fused.double() + product).float()
    assert bits_equal(reference.serial_matmul(a, weight, transpose_weight=transpose_weight), expected)
    assert bits_equal(fused, expected) == (scale >= 1.0)


@pytest.mark.parametrize("limit", [None, 1.5], ids=["nolimit", "limit"])
def test_activation_in_the_written_order(limit):
    """Enough values for a reordered product or sum to show through the bf16 rounding."""
    g, u = torch.randn(2, 1 << 22) * 3
    dh = torch.randn(1 << 22).bfloat16()
    one = torch.ones(())
    gc, uc = (g, u) if limit is None else (g.clamp(max=limit), u.clamp(-limit, limit))
    sig = reference.sigmoid(gc)
    silu = rounded_mul(gc, sig)
    assert bits_equal(reference.swiglu(g, u, limit), rounded_mul(silu, uc).bfloat16())
    dsilu = rounded_mul(sig, rounded_add(one, rounded_mul(gc, rounded_add(one, -sig))))
    dgate, dup = rounded_mul(rounded_mul(dh, uc), dsilu), rounded_mul(dh, silu)
    if limit is not None:
        dgate, dup = dgate.masked_fill(g >= limit, 0), dup.masked_fill(u.abs() >= limit, 0)
    actual = reference.swiglu_backward(dh, g, u, limit)
    assert bits_equal(actual[0], dgate.bfloat16())
    assert bits_equal(actual[1], dup.bfloat16())


def test_limit_gradient_is_zero_exactly_at_the_bound():
    g = torch.tensor([2.0, 1.9921875, math.nan, 5.0, 1.0, 1.0, 1.0])
    u = torch.tensor([1.0, 1.0, 1.0, 1.0, 2.0, -2.0, math.nan])
    dgate, dup = reference.swiglu_backward(torch.ones(7).bfloat16(), g, u, 2.0)
    assert (dgate == 0).tolist() == [True, False, False, True, False, False, False]
    assert (dup == 0).tolist() == [False, False, False, False, True, True, False]
    assert dgate.isnan().tolist() == [False, False, True, False, False, False, True]
    assert dup.isnan().tolist() == [False, False, True, False, False, False, False]  # dup does not read u


def test_limit_is_taken_in_fp32():
    """0.1 is no fp32 number: the bound is its rounding, in the clamp and in the gradient's comparison."""
    bound = torch.tensor(0.1, dtype=torch.float32)
    g, u = bound.expand(64), torch.ones(64)
    dgate, _ = reference.swiglu_backward(torch.ones(64).bfloat16(), g, u, 0.1)
    assert (dgate == 0).all()
    assert bits_equal(reference.swiglu(torch.full((64,), 3.0), u, 0.1), reference.swiglu(g, u, 0.1))


@pytest.mark.parametrize("count", [1, 50, 63, 64, 50_001, 200_000])
def test_sigmoid_is_a_function_of_the_value(count):
    """ATen's CPU sigmoid gives other bits in the tail of a buffer and at the borders between threads."""
    x = torch.randn(count) * 4
    permutation = torch.randperm(count)
    assert bits_equal(reference.sigmoid(x)[permutation], reference.sigmoid(x[permutation]))
    assert bits_equal(reference.sigmoid(x[:1]), reference.sigmoid(x)[:1])


def test_oracle_gradient_reaches_x():
    inputs = shared_expert_inputs(7, 32, 16)
    x = inputs.x.clone().requires_grad_()
    moe_ops.shared_expert_mlp_reference(x, *inputs.weights, swiglu_limit=1.0).backward(inputs.dy)
    expected = moe_ops.shared_expert_mlp_dx_reference(inputs.dy, inputs.x, *inputs.weights, swiglu_limit=1.0)
    assert bits_equal(x.grad, expected)


def test_oracle_dx_rounds_once():
    inputs = shared_expert_inputs(7, 32, 16)
    arguments = (inputs.dy, inputs.x, *inputs.weights)
    in_fp32 = moe_ops.shared_expert_mlp_dx_reference(*arguments, out_dtype=torch.float32)
    assert bits_equal(moe_ops.shared_expert_mlp_dx_reference(*arguments), in_fp32.bfloat16())
