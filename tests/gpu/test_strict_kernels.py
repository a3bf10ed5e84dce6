"""The Triton kernels of `fp32-serial-v1`: the oracle's bits for any operands."""

import pytest
import torch

import moe_ops
from moe_ops.testing import bits_equal, shared_expert_inputs

pytestmark = pytest.mark.gpu

STRICT = {"profile": "fp32-serial-v1", "backend": "triton"}
SHAPES = [(1, 128, 64), (16, 128, 64), (3, 100, 37), (256, 1024, 512), (300, 4096, 2048)]
SHAPE_IDS = [f"T{t}-H{h}-I{i}" for t, h, i in SHAPES]


# What is multiplied: rows of x and dy; some rows of w_gate and w_up, some columns and rows of w_down.
ROW_SCALES = {
    "tiny": (1.0, 2.0**-120, 2.0**-133, 2.0**-70, -0.0, 2.0**-100, 2.0**-60, 1.0),
    "huge": (1.0, 1e38, 100.0, 1e30, -1e19, 1.0, 1.0, 1.0),
    "extreme": (2.0**-120, 1e38, 0.0, -0.0, 2.0**-133, 1e30, 2.0**-70, 100.0),
}
WEIGHT_SCALES = {
    "tiny": (2.0**-90, 2.0**-90, 2.0**-60, 1.0),
    "huge": (1.0, 2.0**40, 2.0**60, 1.0),
    "extreme": (2.0**-90, 2.0**90, 2.0**-100, 2.0**110),
}
KINDS = ["plain", "saturated", *ROW_SCALES]


def adversarial(shape, kind, device="cuda"):
    """Inputs whose products under- and overflow, by row, so that tiles with and without them occur."""
    inputs = shared_expert_inputs(*shape, device=device, seed=len(kind))
    x, dy, w_gate, w_up, w_down = inputs
    if kind == "saturated":  # pre-activations of about +-100 and beyond: sigmoid is 0, 1 or subnormal
        x *= 100
    if kind not in ROW_SCALES:
        return inputs
    scales = ROW_SCALES[kind]
    for row in range(min(len(x), 40)):
        x[row] *= scales[row % len(scales)]
        dy[row] *= scales[(row // 2) % len(scales)]
    gate_scale, up_scale, column_scale, row_scale = WEIGHT_SCALES[kind]
    w_gate[::9] *= gate_scale
    w_up[1::9] *= up_scale
    w_down[:, ::11] *= column_scale
    w_down[::13] *= row_scale
    if kind != "huge":
        x[-1, ::7] *= 2.0**-125
    if kind != "tiny" and len(x) > 2:
        x[1, 3], dy[-1, 2] = float("inf"), float("-inf")
        x[2, 5], dy[2, 0] = float("nan"), float("nan")
    return inputs


@pytest.mark.parametrize("shape", SHAPES, ids=SHAPE_IDS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("limit", [None, 1.0], ids=["nolimit", "limit"])
def test_the_oracles_bits(shape, kind, limit, nan_memory):
    inputs = adversarial(shape, kind)
    copies = [weight.clone() for weight in inputs.weights]
    expected = (
        moe_ops.shared_expert_mlp_reference(inputs.x, *inputs.weights, swiglu_limit=limit),
        moe_ops.shared_expert_mlp_dx_reference(inputs.dy, inputs.x, *inputs.weights, swiglu_limit=limit),
    )
    for save in ("recompute", "activations"):
        x = inputs.x.clone().requires_grad_()
        y = moe_ops.shared_expert_mlp(x, *inputs.weights, swiglu_limit=limit, save=save, **STRICT)
        y.backward(inputs.dy)
        assert bits_equal(y, expected[0]), save
        assert bits_equal(x.grad, expected[1]), save
    assert all(map(bits_equal, inputs.weights, copies))


@pytest.mark.parametrize("kind", KINDS)
def test_the_saved_pre_activations_and_the_fp32_gradient(kind):
    """What the outputs' rounding to bf16 could hide; and most of it is numbers, neither NaN nor zero."""
    inputs = adversarial((256, 1024, 512), kind)
    oracle = {"profile": "fp32-serial-v1", "backend": "reference"}
    ops = torch.ops.moe_ops
    actual, expected = (ops._shared_expert_mlp_save(inputs.x, *inputs.weights, **o) for o in (STRICT, oracle))
    assert all(bits_equal(*pair) for pair in zip(actual, expected, strict=True))
    _, g, u = expected
    options = {"out_dtype": torch.float32}
    dx = ops._shared_expert_mlp_dx_saved(inputs.dy, g, u, *inputs.weights, **options, **oracle)
    for actual in (
        ops._shared_expert_mlp_dx(inputs.dy, inputs.x, *inputs.weights, **options, **STRICT),
        ops._shared_expert_mlp_dx_saved(inputs.dy, g, u, *inputs.weights, **options, **STRICT),
    ):
        assert bits_equal(actual, dx)
    for value in (*expected, dx) if kind != "extreme" else expected:
        assert (value.isfinite() & (value != 0)).float().mean() > 0.5


@pytest.mark.parametrize("other", [0.5, float("nan"), float("inf")])
def test_the_gradient_at_the_limit(other):
    """Pre-activations exactly at the bound, and beside it: zero from the bound on, and only there."""
    inputs = shared_expert_inputs(70, 128, 64, device="cuda")
    after = torch.nextafter(torch.tensor(0.75), torch.tensor(1.0)).item()
    values = torch.tensor([0.75, -0.75, after, -after, -3.0, other], device="cuda")
    g, u = (values[torch.randint(6, (70, 64), device="cuda")] for _ in range(2))
    options = {"swiglu_limit": 0.75, "profile": "fp32-serial-v1", "out_dtype": torch.float32}
    strict, oracle = (
        torch.ops.moe_ops._shared_expert_mlp_dx_saved(
            inputs.dy, g, u, *inputs.weights, backend=backend, **options
        )
        for backend in ("triton", "reference")
    )
    assert bits_equal(strict, oracle)
    assert strict.isnan().any() == (other != other)


def test_products_that_need_two_roundings():
    """Sums that one FMA gets wrong, so that the device has to notice the operands' exponents."""
    inputs = shared_expert_inputs(2, 64, 32, device="cuda")
    x, w_gate = torch.zeros_like(inputs.x), torch.zeros_like(inputs.w_gate)
    # 2^-149 + 2^-150: the product rounds to 0 first (ties to even); an FMA rounds the sum, to 2^-148.
    x[0, :2], w_gate[0, :2] = (torch.tensor([2.0**e, 2.0**f]).cuda() for e, f in ((-74, -75), (-75, -75)))
    # -2^127 + 2^128: the product is infinite first; an FMA gives 2^127.
    x[1, :2], w_gate[1, :2] = (torch.tensor(v).cuda() for v in ([-(2.0**64), 2.0**64], [2.0**63, 2.0**64]))
    _, g, _ = torch.ops.moe_ops._shared_expert_mlp_save(x, w_gate, inputs.w_up, inputs.w_down, **STRICT)
    assert g[0, 0].item() == 2.0**-149
    assert g[1, 1].item() == float("inf")


def test_every_tile(monkeypatch, nan_memory):
    from moe_ops.kernels import configs

    inputs = adversarial((70, 512, 320), "extreme")
    y = moe_ops.shared_expert_mlp_reference(inputs.x, *inputs.weights)
    dx = moe_ops.shared_expert_mlp_dx_reference(inputs.dy, inputs.x, *inputs.weights)
    counts = {len(configs.tiles(name, strict=True)) for name in configs.FAMILIES}
    for index in range(max(counts)):

        def forced(name, *_, index=index, **__):
            tiles = configs.tiles(name, strict=True)
            return tiles[index % len(tiles)]

        monkeypatch.setattr(configs, "choose", forced)
        for save in ("recompute", "activations"):
            x = inputs.x.clone().requires_grad_()
            actual = moe_ops.shared_expert_mlp(x, *inputs.weights, save=save, **STRICT)
            actual.backward(inputs.dy)
            assert bits_equal(actual, y), (index, save)
            assert bits_equal(x.grad, dx), (index, save)


def test_sigmoid_is_torchs_for_every_fp32_value():
    from moe_ops.kernels.sigmoid_check import sigmoid_mismatches

    part = 2**28
    assert [
        sigmoid_mismatches(torch.device("cuda", 0), first, first + part, 1) for first in range(0, 2**32, part)
    ] == [0] * 16
