"""What the MoE layer refuses beyond a wrong argument, and what it accepts although it looks wrong."""

import pytest
import torch
from torch import nn

import moe_ops
from moe_ops import contracts, moe_contracts
from moe_ops.testing import bits_equal, mega_moe_inputs

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, TOKENS = 256, 192, 4, 2, 6
NAMES = ("x", "topk_idx", "topk_weights", "w_gate_up", "w_gate_up_scale", "w_down", "w_down_scale")
FP8 = mega_moe_inputs(TOKENS, HIDDEN, INTERMEDIATE, EXPERTS, TOP_K)
BF16 = mega_moe_inputs(TOKENS, HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, weights="bf16")


def arguments():
    return dict(zip(NAMES, FP8.arguments, strict=True))


def trainable(value):
    return value.detach().clone().requires_grad_()


GRADIENTS = {"_mega_moe_dx": 1, "_mega_moe_dweights": 1, "_mega_moe_dx_dweights": 2}


@pytest.mark.parametrize("name", GRADIENTS)
@pytest.mark.parametrize(
    ("dy", "error", "message"),
    [
        (FP8.dy.float(), TypeError, "dy must be torch.bfloat16; got torch.float32"),
        (FP8.dy[1:], ValueError, r"dy must be \[T, H\] = \[6, 256\]; got \[5, 256\]"),
        (FP8.dy.to("meta"), ValueError, "dy must be on x's device, cpu; got meta"),
    ],
    ids=["dtype", "shape", "device"],
)
def test_gradient_operators(name, dy, error, message):
    with pytest.raises(error, match=f"moe_ops.{name[1:]}: {message}"):
        getattr(torch.ops.moe_ops, name)(dy, FP8.x, None, *FP8.arguments[1:])


@pytest.mark.parametrize("name", GRADIENTS)
def test_second_derivatives_are_refused(name):
    x, routing = trainable(FP8.x), trainable(FP8.topk_weights)
    y = moe_ops.mega_moe(x, FP8.topk_idx, routing, *FP8.weights)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        torch.autograd.grad(y.sum(), (x, routing), create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        getattr(torch.ops.moe_ops, name)(FP8.dy, x, None, FP8.topk_idx, routing, *FP8.weights)


def test_transforms_are_refused():
    rest = FP8.arguments[1:]
    refusal = "every tensor must be free of function transforms that differentiate; got "
    with pytest.raises(NotImplementedError, match=f"{refusal}torch.func.grad"):
        torch.func.grad(lambda x: moe_ops.mega_moe(x, *rest).sum())(FP8.x)
    with pytest.raises(NotImplementedError, match=f"{refusal}forward-mode"):
        torch.func.jvp(lambda x: moe_ops.mega_moe(x, *rest), (FP8.x,), (FP8.x,))
    batched = FP8.x[None], FP8.topk_idx[None], FP8.topk_weights[None]
    with pytest.raises(NotImplementedError, match=r"without torch.vmap.*Flatten the batch into T tokens"):
        torch.vmap(lambda *routed: moe_ops.mega_moe(*routed, *FP8.weights))(*batched)


def test_weights_under_no_grad_are_accepted():
    changed = arguments() | {"w_down_scale": trainable(FP8.w_down_scale)}
    expected = moe_ops.mega_moe(**arguments())
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            assert bits_equal(moe_ops.mega_moe(**changed), expected)
    with pytest.raises(ValueError, match="w_down_scale must be frozen"):
        moe_ops.mega_moe(**changed)


def test_parametrised_weight_raises_at_the_call():
    """W + BA on an operator without weight gradients would freeze the adapter silently."""

    class Adapter(nn.Module):
        def __init__(self):
            super().__init__()
            self.b = nn.Parameter(torch.zeros(EXPERTS, HIDDEN, 2, dtype=torch.bfloat16))
            self.a = nn.Parameter(torch.ones(EXPERTS, 2, INTERMEDIATE, dtype=torch.bfloat16))

        def forward(self, weight):
            return weight + self.b @ self.a

    layer = moe_ops.MegaMoE(HIDDEN, INTERMEDIATE, EXPERTS, weights="bf16")
    expected = layer(*FP8.arguments[:3])
    nn.utils.parametrize.register_parametrization(layer, "down_proj", Adapter())
    with pytest.raises(ValueError, match="w_down must be frozen.*merge the adapter"):
        layer(*FP8.arguments[:3])
    with torch.no_grad():
        assert bits_equal(layer(*FP8.arguments[:3]), expected)


@pytest.mark.parametrize("kind", ["fp8", "bf16"])
def test_autocast_casts_x_alone(kind):
    inputs = FP8 if kind == "fp8" else BF16
    inputs = inputs._replace(x=inputs.x.clone())
    inputs.x[0, 0] = 2.0**-30  # no fp16 number
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        x, routing = trainable(inputs.x.to(dtype)), trainable(inputs.topk_weights)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = moe_ops.mega_moe(x, inputs.topk_idx, routing, *inputs.weights)
        y.backward(inputs.dy)
        assert x.grad.dtype == dtype and routing.grad.dtype == torch.float32
        expected = moe_ops.mega_moe(x.detach().bfloat16(), *inputs.arguments[1:])
        assert bits_equal(y, expected)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with pytest.raises(TypeError, match="topk_weights must be torch.float32"):
            moe_ops.mega_moe(inputs.x, inputs.topk_idx, inputs.topk_weights.bfloat16(), *inputs.weights)
        with pytest.raises(TypeError, match="w_gate_up must be .*; got torch.float32"):
            rest = inputs.w_gate_up_scale, *inputs.weights[2:]
            moe_ops.mega_moe(*inputs.arguments[:3], inputs.w_gate_up.float(), *rest)
        if kind == "fp8":
            pair = moe_ops.quantize_activations(inputs.x)
            assert bits_equal(moe_ops.mega_moe(pair, *inputs.arguments[1:]), expected)
    with (
        torch.autocast("cpu", dtype=torch.float16),
        pytest.raises(
            TypeError, match="x must be torch.bfloat16 under autocast.*got autocast to torch.float16"
        ),
    ):
        moe_ops.mega_moe(*inputs.arguments)


def test_strides_of_size_one_say_nothing():
    """[E, 1, 1] scales and [1, H] rows have any strides."""
    inputs = mega_moe_inputs(3, 128, 64, 4, 2)
    odd = [scale.as_strided(scale.shape, (1, 77, 99)) for scale in inputs.weights[1::2]]
    changed = inputs._replace(w_gate_up_scale=odd[0], w_down_scale=odd[1])
    assert bits_equal(moe_ops.mega_moe(*changed.arguments), moe_ops.mega_moe(*inputs.arguments))


def test_validate_indices():
    for index in (torch.full((TOKENS, TOP_K), EXPERTS), torch.full((TOKENS, TOP_K), -2, dtype=torch.int32)):
        call = arguments() | {"topk_idx": index}
        message = rf"topk_idx must be in \[-1, E\) with E = 4; got {index[0, 0]} at \[0, 0\] \(12 such"
        with pytest.raises(ValueError, match=message):
            moe_ops.mega_moe(**call, validate_indices=True)
        assert not moe_ops.mega_moe(**call).any()
    y = moe_ops.mega_moe(**arguments(), validate_indices=True)
    assert bits_equal(y, moe_ops.mega_moe(**arguments()))
    with pytest.raises(TypeError, match="topk_idx must be torch.int32"):
        moe_ops.mega_moe(**arguments() | {"topk_idx": FP8.topk_idx.float()}, validate_indices=True)


def test_the_oracle_has_the_same_rules():
    call = arguments()
    for changes, error, message in (
        ({"x": FP8.x.float()}, TypeError, "x must be torch.bfloat16"),
        ({"w_down": trainable(FP8.w_down)}, ValueError, "w_down must be frozen"),
        ({"profile": "fp8-k128-k64-v1"}, NotImplementedError, "profile must be one"),
        ({"w_gate_up_scale": None}, TypeError, "w_gate_up_scale must be a torch.Tensor"),
    ):
        with pytest.raises(error, match=f"moe_ops.mega_moe_reference: {message}"):
            moe_ops.mega_moe_reference(**call | changes)
        with pytest.raises(error, match=f"moe_ops.mega_moe_dx_dweights_reference: {message}"):
            moe_ops.mega_moe_dx_dweights_reference(FP8.dy, **call | changes)


CHOICE = contracts.Choice("fp8-k128-k64-v1", "triton")


@pytest.mark.parametrize(
    ("check", "error", "message"),
    [
        (
            lambda: moe_contracts.check_gpu("op", CHOICE, (8, 0), None),
            NotImplementedError,
            "device must be of compute capability 9.0 .*got capability 8.0. Pass profile='exact-fp8-k128-k64",
        ),
        (
            lambda: moe_contracts.check_gpu("op", CHOICE, (10, 0), None),
            NotImplementedError,
            "capability 10.0",
        ),
        (lambda: moe_contracts.check_gpu("op", CHOICE, (9, 0), "6.2"), NotImplementedError, "got ROCm 6.2"),
        (
            lambda: moe_contracts.check_gpu("op", contracts.Choice("tc-fp32-v1", "triton"), (7, 5), None),
            NotImplementedError,
            "capability 8.0 or newer",
        ),
        (
            lambda: moe_contracts.check_validation_in_capture("op", True),
            RuntimeError,
            "validate_indices must be False while a CUDA graph is captured",
        ),
        (
            lambda: moe_contracts.check_rows("op", 2**31),
            NotImplementedError,
            r"topk_idx must be of fewer than 2\^31 entries; got 2147483648. Split the tokens",
        ),
    ],
    ids=["ampere", "blackwell", "rocm", "bf16-turing", "capture", "rows"],
)
def test_what_a_machine_cannot_honour(check, error, message):
    """The rules that need facts of a GPU; tests/gpu sees them where they are called."""
    with pytest.raises(error, match=message):
        check()


def test_a_machine_that_can():
    moe_contracts.check_gpu("op", CHOICE, (9, 0), None)
    moe_contracts.check_gpu("op", contracts.Choice("tc-fp32-v1", "triton"), (8, 0), None)


def test_dtensors_are_refused_by_name():
    """No sharding rule: the error names the operator, before any work."""
    from torch import distributed
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        for placement in (Replicate(), Shard(0)):
            call = [
                value if value is None else distribute_tensor(value, mesh, [placement])
                for value in BF16.arguments
            ]
            with pytest.raises(NotImplementedError, match="moe_ops._mega_moe"):
                moe_ops.mega_moe(*call)
    finally:
        distributed.destroy_process_group()
