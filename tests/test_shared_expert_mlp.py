"""The operator: values, gradients, shapes, strides, transforms, registration."""

import pytest
import torch
from torch.nn import functional as F

import moe_ops
from moe_ops.testing import bits_equal, shared_expert_inputs

# (256, 1024, 512): one-ulp faults do not show at tiny shapes. (3, 100, 37): ragged everywhere.
# I = 4224: above a cap that another library had.
SHAPES = [(1, 128, 64), (16, 128, 64), (3, 100, 37), (2, 384, 4224), (256, 1024, 512)]
SHAPE_IDS = [f"T{t}-H{h}-I{i}" for t, h, i in SHAPES]
OPS = torch.ops.moe_ops


def forward_and_dx(x, dy, weights, **options):
    x = x.detach().clone().requires_grad_()
    y = moe_ops.shared_expert_mlp(x, *weights, **options)
    y.backward(dy)
    return y.detach(), x.grad


def formula(x, w_gate, w_up, w_down, limit=None):
    """The layer in the dtype of its arguments, without the contract's roundings."""
    g, u = x @ w_gate.t(), x @ w_up.t()
    if limit is not None:
        g, u = g.clamp(max=limit), u.clamp(-limit, limit)
    return (F.silu(g) * u) @ w_down.t()


def error(actual, exact):
    return ((actual.double() - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("shape", SHAPES, ids=SHAPE_IDS)
@pytest.mark.parametrize("limit", [None, 1.0], ids=["nolimit", "limit"])
@pytest.mark.parametrize("profile", [None, "fp32-serial-v1"])
def test_against_fp64(shape, limit, profile):
    """No further from fp64 than twice the plain bf16 layer, forward and dX."""
    inputs = shared_expert_inputs(*shape)
    results = {}
    for dtype in (torch.float64, torch.bfloat16):
        x = inputs.x.to(dtype).requires_grad_()
        y = formula(x, *(weight.to(dtype) for weight in inputs.weights), limit)
        y.backward(inputs.dy.to(dtype))
        results[dtype] = y.detach(), x.grad
    actual = forward_and_dx(inputs.x, inputs.dy, inputs.weights, swiglu_limit=limit, profile=profile)
    for ours, plain, exact in zip(actual, results[torch.bfloat16], results[torch.float64], strict=True):
        assert error(ours, exact) <= 2 * error(plain, exact)


@pytest.mark.parametrize("shape", SHAPES, ids=SHAPE_IDS)
@pytest.mark.parametrize("limit", [None, 1.0], ids=["nolimit", "limit"])
def test_strict_profile_is_the_oracle(shape, limit):
    inputs = shared_expert_inputs(*shape, seed=7)
    inputs.x[0] *= 100
    options = {"profile": "fp32-serial-v1", "backend": "reference", "swiglu_limit": limit}
    y, dx = forward_and_dx(inputs.x, inputs.dy, inputs.weights, **options)
    assert bits_equal(y, moe_ops.shared_expert_mlp_reference(inputs.x, *inputs.weights, swiglu_limit=limit))
    expected_dx = moe_ops.shared_expert_mlp_dx_reference(
        inputs.dy, inputs.x, *inputs.weights, swiglu_limit=limit
    )
    assert bits_equal(dx, expected_dx)


@pytest.mark.parametrize("profile", [None, "fp32-serial-v1"])
@pytest.mark.parametrize("limit", [None, 1.0], ids=["nolimit", "limit"])
def test_save_modes_have_the_same_bits(profile, limit):
    inputs = shared_expert_inputs(70, 384, 50)
    options = {"profile": profile, "swiglu_limit": limit}
    recompute = forward_and_dx(inputs.x, inputs.dy, inputs.weights, save="recompute", **options)
    activations = forward_and_dx(inputs.x, inputs.dy, inputs.weights, save="activations", **options)
    assert all(bits_equal(*pair) for pair in zip(recompute, activations, strict=True))


def saved_tensors(save):
    kept = []
    inputs = shared_expert_inputs(8, 64, 32)
    with torch.autograd.graph.saved_tensors_hooks(lambda value: kept.append(value) or value, lambda v: v):
        moe_ops.shared_expert_mlp(inputs.x.requires_grad_(), *inputs.weights, save=save)
    return {(tuple(value.shape), value.dtype) for value in kept}


def test_save_decides_what_is_kept():
    weights = {((32, 64), torch.bfloat16), ((64, 32), torch.bfloat16)}
    assert saved_tensors("recompute") == weights | {((8, 64), torch.bfloat16)}
    assert saved_tensors("activations") == weights | {((8, 32), torch.float32)}


@pytest.mark.parametrize("op", ["_shared_expert_mlp_dx", "_shared_expert_mlp_dx_saved"])
def test_dx_output_dtype(op):
    """bf16 is the fp32 gradient, rounded once."""
    inputs = shared_expert_inputs(70, 384, 50)
    _, g, u = OPS._shared_expert_mlp_save(inputs.x, *inputs.weights)
    activations = (inputs.dy, g, u) if op.endswith("saved") else (inputs.dy, inputs.x)
    wide, narrow, default = (
        getattr(OPS, op)(*activations, *inputs.weights, out_dtype=dtype)
        for dtype in (torch.float32, torch.bfloat16, None)
    )
    assert wide.dtype == torch.float32
    assert bits_equal(wide.bfloat16(), narrow)
    assert bits_equal(default, narrow)
    assert not bits_equal(wide, narrow.float())


@pytest.mark.parametrize("leading", [(), (6,), (2, 3), (0,), (2, 0), (1, 1, 6)], ids=str)
def test_leading_dimensions(leading, nan_memory):
    inputs = shared_expert_inputs(6, 100, 37)
    count = torch.Size(leading).numel()
    x, dy = inputs.x[:count].reshape(*leading, 100), inputs.dy[:count].reshape(*leading, 100)
    for save in ("recompute", "activations"):
        y, dx = forward_and_dx(x, dy, inputs.weights, save=save)
        flat_y, flat_dx = forward_and_dx(inputs.x, inputs.dy, inputs.weights)
        assert y.dtype == dx.dtype == torch.bfloat16
        assert bits_equal(y, flat_y[:count].reshape(x.shape))
        assert bits_equal(dx, flat_dx[:count].reshape(x.shape))


def strided_views(value):
    wide = value.new_full((value.shape[0], 2 * value.shape[1]), float("nan"))
    wide[:, ::2] = value
    column_major = value.t().contiguous().t()
    tall = value.new_full((2 * value.shape[0], value.shape[1]), float("nan"))
    tall[1::2] = value
    return {"inner-strided": wide[:, ::2], "column-major": column_major, "row-strided": tall[1::2]}


@pytest.mark.parametrize("kind", ["inner-strided", "column-major", "row-strided"])
@pytest.mark.parametrize("argument", ["x", "dy", "w_gate", "w_up", "w_down"])
def test_strides_do_not_reach_the_bits(argument, kind):
    inputs = shared_expert_inputs(66, 100, 50)
    expected = forward_and_dx(inputs.x, inputs.dy, inputs.weights)
    strided = inputs._replace(**{argument: strided_views(getattr(inputs, argument))[kind]})
    x = strided.x.detach().requires_grad_()
    y = moe_ops.shared_expert_mlp(x, *strided.weights)
    y.backward(strided.dy)
    assert y.is_contiguous()
    assert bits_equal(y, expected[0])
    assert bits_equal(x.grad, expected[1])


def test_packed_weight_is_two_views():
    inputs = shared_expert_inputs(5, 100, 50)
    packed = torch.cat((inputs.w_gate, inputs.w_up))
    y = moe_ops.shared_expert_mlp(inputs.x, packed[:50], packed[50:], inputs.w_down)
    assert bits_equal(y, moe_ops.shared_expert_mlp(inputs.x, *inputs.weights))


@pytest.mark.parametrize("save", ["recompute", "activations"])
def test_stride_zero_gradients(save):
    """`sum().backward()` and `expand` hand over gradients whose strides are zero."""
    inputs = shared_expert_inputs(5, 100, 50)
    ones = torch.ones_like(inputs.dy)
    _, expected = forward_and_dx(inputs.x, ones, inputs.weights)
    x = inputs.x.clone().requires_grad_()
    moe_ops.shared_expert_mlp(x, *inputs.weights, save=save).sum().backward()
    assert bits_equal(x.grad, expected)
    _, expanded = forward_and_dx(inputs.x, ones[:1, :1].expand(5, 100), inputs.weights, save=save)
    assert bits_equal(expanded, expected)


def test_nan_and_infinity_reach_their_own_row_only():
    inputs = shared_expert_inputs(4, 100, 50)
    expected = moe_ops.shared_expert_mlp(inputs.x, *inputs.weights)
    inputs.x[1, 3], inputs.x[2, 5] = float("nan"), float("inf")
    y = moe_ops.shared_expert_mlp(inputs.x, *inputs.weights)
    assert y[1].isnan().all()
    assert not y[2].isfinite().any()
    assert bits_equal(y[[0, 3]], expected[[0, 3]])


def test_zero_token_and_zero_weights_give_zeros():
    inputs = shared_expert_inputs(4, 100, 50)
    inputs.x[2] = 0
    y, dx = forward_and_dx(inputs.x, inputs.dy, inputs.weights)
    assert (y[2] == 0).all() and dx.isfinite().all()
    zeros = [torch.zeros_like(weight) for weight in inputs.weights]
    y, dx = forward_and_dx(inputs.x, inputs.dy, zeros)
    assert (y == 0).all() and (dx == 0).all()


def test_no_gradient_for_weights_and_none_needed():
    inputs = shared_expert_inputs(4, 100, 50)
    x = inputs.x.requires_grad_()
    moe_ops.shared_expert_mlp(x, *inputs.weights).sum().backward()
    assert all(weight.grad is None for weight in inputs.weights)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            trainable = [weight.clone().requires_grad_() for weight in inputs.weights]
            for save in ("recompute", "activations"):
                y = moe_ops.shared_expert_mlp(x, *trainable, save=save)
                assert not y.requires_grad
                assert bits_equal(y, moe_ops.shared_expert_mlp(inputs.x.detach(), *inputs.weights))


def test_weights_changed_between_forward_and_backward_are_noticed():
    inputs = shared_expert_inputs(4, 100, 50)
    y = moe_ops.shared_expert_mlp(inputs.x.requires_grad_(), *inputs.weights)
    inputs.w_down.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("save", ["recompute", "activations"])
def test_autocast_casts_x_alone(save):
    inputs = shared_expert_inputs(4, 100, 50)
    expected = forward_and_dx(inputs.x, inputs.dy, inputs.weights)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = inputs.x.detach().to(dtype, copy=True).requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = moe_ops.shared_expert_mlp(x, *inputs.weights, save=save)
        y.backward(inputs.dy)
        assert y.dtype == torch.bfloat16 and x.grad.dtype == dtype
        if dtype != torch.float16:  # the inputs are not all fp16 numbers
            assert bits_equal(y, expected[0])
            assert bits_equal(x.grad, expected[1].to(dtype))


@pytest.mark.parametrize("in_dim", [0, 1, 2])
def test_vmap_over_x(in_dim):
    inputs = shared_expert_inputs(12, 100, 50)
    batched = inputs.x.view(3, 4, 100).movedim(0, in_dim)
    expected = moe_ops.shared_expert_mlp(inputs.x.view(3, 4, 100), *inputs.weights)
    y = torch.vmap(lambda x: moe_ops.shared_expert_mlp(x, *inputs.weights), in_dims=in_dim)(batched)
    assert bits_equal(y, expected)


@pytest.mark.parametrize("save", ["recompute", "activations"])
def test_vmap_keeps_the_gradient(save):
    inputs = shared_expert_inputs(12, 100, 50)
    _, expected = forward_and_dx(inputs.x, inputs.dy, inputs.weights)
    x = inputs.x.clone().requires_grad_()
    y = torch.vmap(lambda row: moe_ops.shared_expert_mlp(row, *inputs.weights, save=save))(x)
    y.backward(inputs.dy)
    assert bits_equal(x.grad, expected)


def test_vmap_of_the_gradient_operators():
    inputs = shared_expert_inputs(12, 100, 50)
    _, g, u = OPS._shared_expert_mlp_save(inputs.x, *inputs.weights)
    expected = OPS._shared_expert_mlp_dx(inputs.dy, inputs.x, *inputs.weights)
    dx = torch.vmap(lambda dy, x: OPS._shared_expert_mlp_dx(dy, x, *inputs.weights))(inputs.dy, inputs.x)
    assert bits_equal(dx, expected)
    saved = torch.vmap(lambda *rows: OPS._shared_expert_mlp_dx_saved(*rows, *inputs.weights))
    assert bits_equal(saved(inputs.dy, g, u), expected)
    one_dy = torch.vmap(lambda x: OPS._shared_expert_mlp_dx(inputs.dy[0], x, *inputs.weights))(inputs.x)
    repeated = inputs.dy[:1].expand_as(inputs.x)
    assert bits_equal(one_dy, OPS._shared_expert_mlp_dx(repeated, inputs.x, *inputs.weights))


@pytest.mark.parametrize("requires_grad", [False, True], ids=["nograd", "grad"])
@pytest.mark.parametrize("profile", [None, "fp32-serial-v1"])
@pytest.mark.parametrize("shape", [(5, 64, 32), (1, 64, 32), (3, 100, 37)], ids=str)
def test_opcheck(shape, profile, requires_grad):
    """All of opcheck's utilities, for every operator, with a strided x (T = 0 it cannot clone)."""
    inputs = shared_expert_inputs(*shape)
    x = inputs.x.t().contiguous().t().requires_grad_(requires_grad)
    _, g, u = OPS._shared_expert_mlp_save(x.detach(), *inputs.weights)

    def check(op, *args, **options):
        options = {"swiglu_limit": 1.5, "profile": profile, **options}
        torch.library.opcheck(op.default, (*args, *inputs.weights), options)

    check(OPS.shared_expert_mlp, x)
    check(OPS._shared_expert_mlp_save, x)
    for out_dtype in (None, torch.float32):
        check(OPS._shared_expert_mlp_dx, inputs.dy, x.detach(), out_dtype=out_dtype)
        check(OPS._shared_expert_mlp_dx_saved, inputs.dy, g, u, out_dtype=out_dtype)


def test_operators_are_functional_with_fixed_returns():
    """One operator is one fixed tuple of tensors: no optional return, no mutated or aliased argument."""
    names = {
        name.split(".")[0] for name in torch._C._dispatch_get_all_op_names() if name.startswith("moe_ops::")
    }
    assert names == {
        "moe_ops::shared_expert_mlp",
        "moe_ops::_shared_expert_mlp_save",
        "moe_ops::_shared_expert_mlp_dx",
        "moe_ops::_shared_expert_mlp_dx_saved",
        "moe_ops::_mega_moe",
        "moe_ops::_mega_moe_dx",
        "moe_ops::_mega_moe_dweights",
        "moe_ops::_mega_moe_dx_dweights",
        "moe_ops::_validated_indices",
        "moe_ops::quantize_activations",
        "moe_ops::quantize_weights_block",
    }
    for name in names:
        schema = getattr(OPS, name.removeprefix("moe_ops::")).default._schema
        assert all(str(returned.type) == "Tensor" for returned in schema.returns)
        assert not schema.is_mutable
    public = str(OPS.shared_expert_mlp.default._schema)
    assert public == (
        "moe_ops::shared_expert_mlp(Tensor x, Tensor w_gate, Tensor w_up, Tensor w_down, *, "
        "float? swiglu_limit=None, str? profile=None, str? backend=None) -> Tensor"
    )


def test_meta_tensors_have_shapes_and_checks():
    x, w_gate, w_up, w_down = (
        torch.empty(shape, dtype=torch.bfloat16, device="meta")
        for shape in ((3, 7, 64), (32, 64), (32, 64), (64, 32))
    )
    assert moe_ops.shared_expert_mlp(x, w_gate, w_up, w_down).shape == (3, 7, 64)
    with pytest.raises(ValueError, match="w_down must be"):
        moe_ops.shared_expert_mlp(x, w_gate, w_up, w_up)
