"""What bad input of the MoE layer gets: an error naming argument, requirement, value, remedy; no work."""

import pytest
import torch

import moe_ops
from moe_ops.testing import mega_moe_inputs

E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, TOKENS = 256, 192, 4, 2, 6
NAMES = ("x", "topk_idx", "topk_weights", "w_gate_up", "w_gate_up_scale", "w_down", "w_down_scale")
FP8 = mega_moe_inputs(TOKENS, HIDDEN, INTERMEDIATE, EXPERTS, TOP_K)
BF16 = mega_moe_inputs(TOKENS, HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, weights="bf16")
PAIR = moe_ops.quantize_activations(FP8.x)


def arguments(inputs=FP8):
    return dict(zip(NAMES, inputs.arguments, strict=True))


def ones(*shape, dtype=torch.float32, device="cpu"):
    return torch.ones(shape, device=device).to(dtype)


def trainable(value):
    return value.detach().clone().requires_grad_()


def columns_first(value):
    """The same values and shape, stored with the other axis contiguous."""
    return value.mT.contiguous().mT


WITHOUT_SCALES = {"w_gate_up_scale": None, "w_down_scale": None}
BF16_WEIGHTS = {"w_gate_up": BF16.w_gate_up, "w_down": BF16.w_down, **WITHOUT_SCALES}
SHAPES = "[6, 256]", "[4, 384, 256]", "[4, 3, 2]", "[4, 256, 192]", "[4, 2, 2]"
SQUARE = {"w_gate_up": ones(4, 256, 256, dtype=E4M3), "w_gate_up_scale": ones(4, 2, 2)}

# id: (changed arguments, error, words that the message must hold: argument and requirement, value, remedy)
CASES = {
    "x-list": ({"x": [1.0]}, TypeError, ["x must be a bf16 tensor or a pair (x_fp8, x_scale)", "float"]),
    "x-int": ({"x": 3}, TypeError, ["x must be a torch.Tensor", "int"]),
    "x-triple": ({"x": (*PAIR, PAIR[1])}, TypeError, ["x must be", "pair", "Tensor, Tensor, Tensor"]),
    "x-pair-none": ({"x": (PAIR[0], None)}, TypeError, ["x must be", "(Tensor, None)", "two tensors"]),
    "x-fp8-alone": ({"x": PAIR[0]}, TypeError, ["x must be", "float8_e4m3fn", "quantize_activations"]),
    "x-fp32": ({"x": FP8.x.float()}, TypeError, ["x must be torch.bfloat16", "float32", "autocast"]),
    "x-fp16": ({"x": FP8.x.half()}, TypeError, ["x must be torch.bfloat16", "float16", ".to("]),
    "x-int64": ({"x": FP8.x.long()}, TypeError, ["x must be torch.bfloat16", "int64"]),
    "x-fp32-bf16-weights": ({"x": FP8.x.float(), **BF16_WEIGHTS}, TypeError, ["x must be torch.bfloat16;"]),
    "x-pair-bf16": ({"x": (FP8.x, PAIR[1])}, TypeError, ["x_fp8 must be torch.float8_e4m3fn", "bfloat16"]),
    "x-pair-e5m2": ({"x": (ones(6, 256, dtype=torch.float8_e5m2), PAIR[1])}, TypeError, ["x_fp8", "e5m2"]),
    "x_scale-bf16": ({"x": (PAIR[0], PAIR[1].bfloat16())}, TypeError, ["x_scale must be torch.float32"]),
    "x-pair-bf16-weights": ({"x": PAIR, **BF16_WEIGHTS}, TypeError, ["x must be one bf16 tensor", "a pair"]),
    "x_scale-shape": ({"x": (PAIR[0], ones(6, 3))}, ValueError, ["x_scale must be", "[6, 2]", "[6, 3]"]),
    "x_scale-transposed": ({"x": (PAIR[0], PAIR[1].t())}, ValueError, ["x_scale must be", "got [2, 6]"]),
    "x-hidden": ({"x": FP8.x[:, 1:]}, ValueError, ["x must be [T, H] with H = 256", "[6, 255]"]),
    "x-3d": ({"x": FP8.x[None]}, ValueError, ["x must be [T, H]", "[1, 6, 256]", "Flatten"]),
    "x-sparse": ({"x": FP8.x.to_sparse()}, ValueError, ["x must be a dense tensor", "torch.sparse_coo"]),
    "topk_idx-float": ({"topk_idx": FP8.topk_idx.float()}, TypeError, ["topk_idx must be torch.int32 or"]),
    "topk_idx-int16": ({"topk_idx": FP8.topk_idx.short()}, TypeError, ["topk_idx must be", "int16", "Cast"]),
    "topk_idx-list": ({"topk_idx": [[0]]}, TypeError, ["topk_idx must be a torch.Tensor", "list"]),
    "topk_idx-none": ({"topk_idx": None}, TypeError, ["topk_idx must be a torch.Tensor", "None"]),
    "topk_idx-rows": ({"topk_idx": FP8.topk_idx[1:]}, ValueError, ["topk_idx must be [T, top_k]", "[5, 2]"]),
    "topk_idx-1d": ({"topk_idx": FP8.topk_idx[:, 0]}, ValueError, ["topk_idx must be [T, top_k]", "[6]"]),
    "top_k-0": (
        {"topk_idx": FP8.topk_idx[:, :0], "topk_weights": FP8.topk_weights[:, :0]},
        ValueError,
        ["topk_idx must be", "top_k from 1 to 256", "[6, 0]", "at least one slot"],
    ),
    "top_k-257": (
        {"topk_idx": torch.zeros(6, 257, dtype=torch.int64), "topk_weights": ones(6, 257)},
        ValueError,
        ["topk_idx must be", "from 1 to 256", "[6, 257]"],
    ),
    "topk_weights-bf16": (
        {"topk_weights": FP8.topk_weights.bfloat16()},
        TypeError,
        ["topk_weights must be torch.float32", "bfloat16", ".float()", "moe_ops.MegaMoE"],
    ),
    "topk_weights-none": ({"topk_weights": None}, TypeError, ["topk_weights must be a torch.Tensor", "None"]),
    "topk_weights-slots": ({"topk_weights": ones(6, 3)}, ValueError, ["topk_weights must be", "got [6, 3]"]),
    "topk_weights-1d": ({"topk_weights": ones(6)}, ValueError, ["topk_weights must be [T, top_k] = [6, 2]"]),
    "w_gate_up-tuple": (
        {"w_gate_up": (FP8.w_gate_up, FP8.w_gate_up_scale)},
        TypeError,
        ["w_gate_up must be a torch.Tensor", "tuple", "one tensor per argument"],
    ),
    "w_down-none": ({"w_down": None}, TypeError, ["w_down must be a torch.Tensor", "None"]),
    "w_gate_up-fp32": (
        {"w_gate_up": ones(4, 384, 256)},
        TypeError,
        ["w_gate_up must be", "float32", "quant"],
    ),
    "w_down-fp16": ({"w_down": ones(4, 256, 192, dtype=torch.half)}, TypeError, ["w_down", "torch.float16"]),
    "w_gate_up-e5m2": (
        {"w_gate_up": ones(4, 384, 256, dtype=torch.float8_e5m2)},
        TypeError,
        ["w_gate_up must be torch.float8_e4m3fn with scales, or torch.bfloat16 without", "e5m2"],
    ),
    "weights-mixed": (
        {"w_down": BF16.w_down},
        TypeError,
        ["w_down must be of w_gate_up's dtype", "bfloat16"],
    ),
    "w_gate_up_scale-none": (
        {"w_gate_up_scale": None},
        TypeError,
        ["w_gate_up_scale must be a torch.Tensor, as w_gate_up is torch.float8_e4m3fn", "None", "128 x 128"],
    ),
    "w_down_scale-none": ({"w_down_scale": None}, TypeError, ["w_down_scale must be a torch.Tensor", "None"]),
    "w_down_scale-float": (
        {"w_down_scale": 1.0},
        TypeError,
        ["w_down_scale must be a torch.Tensor", "float"],
    ),
    "scale-of-bf16": (
        {**BF16_WEIGHTS, "w_down_scale": FP8.w_down_scale},
        TypeError,
        ["w_down_scale must be None for bf16 weights", "a tensor", "one format"],
    ),
    "w_gate_up_scale-bf16": (
        {"w_gate_up_scale": FP8.w_gate_up_scale.bfloat16()},
        TypeError,
        ["w_gate_up_scale must be torch.float32", "bfloat16", ".float()"],
    ),
    "w_down_scale-fp64": (
        {"w_down_scale": FP8.w_down_scale.double()},
        TypeError,
        ["w_down_scale", "float64"],
    ),
    "w_gate_up-2d": ({"w_gate_up": FP8.w_gate_up[0]}, ValueError, ["w_gate_up must be [E, 2I, H]", "384"]),
    "w_gate_up-odd": ({"w_gate_up": FP8.w_gate_up[:, 1:]}, ValueError, ["gate rows, then as many up rows"]),
    "w_down-4d": ({"w_down": FP8.w_down[None]}, ValueError, ["w_down must be [E, H, I]", "[1, 4, 256, 192]"]),
    "w_down-transposed": ({"w_down": FP8.w_down.mT}, ValueError, ["w_down must be", "[4, 192, 256]"]),
    "w_down-experts": ({"w_down": FP8.w_down[1:]}, ValueError, ["w_down must be", "got [3, 256, 192]"]),
    "weights-empty": ({"w_gate_up": FP8.w_gate_up[:0]}, ValueError, ["w_gate_up must be", "none of them 0"]),
    "E-4097": (
        {"w_gate_up": ones(4097, 2, 1, dtype=E4M3), "w_down": ones(4097, 1, 1, dtype=E4M3)},
        NotImplementedError,
        ["E must be at most 4096", "4097", "Split"],
    ),
    "w_gate_up_scale-transposed": (
        {"w_gate_up_scale": FP8.w_gate_up_scale.mT},
        ValueError,
        ["w_gate_up_scale must be [E, ceil(2I/128), ceil(H/128)] = [4, 3, 2]", "[4, 2, 3]", "transposed"],
    ),
    "w_gate_up_scale-separate": (  # two blocks for 192 gate rows, two for 192 up rows
        {"w_gate_up_scale": ones(4, 4, 2)},
        ValueError,
        ["w_gate_up_scale must be", "[4, 3, 2]", "[4, 4, 2]"],
    ),
    "w_gate_up_scale-of-256-rows": (
        {"w_gate_up_scale": ones(4, 2, 2)},
        ValueError,
        ["[4, 3, 2]", "[4, 2, 2]"],
    ),
    "w_down_scale-scalar": ({"w_down_scale": ones()}, ValueError, ["w_down_scale must be", "got []"]),
    "w_down_scale-square-transposed": (
        {"w_down_scale": FP8.w_down_scale.mT},
        ValueError,
        ["w_down_scale must be row-major", "strides [4, 1, 2]", "transposed scale"],
    ),
    "w_gate_up_scale-square-transposed": (
        {**SQUARE, "w_gate_up_scale": ones(4, 2, 2).mT, "w_down": ones(4, 256, 128, dtype=E4M3)}
        | {"w_down_scale": ones(4, 2, 1)},
        ValueError,
        ["w_gate_up_scale must be row-major", "strides [4, 1, 2]"],
    ),
    "w_gate_up-columns-first": (
        {"w_gate_up": columns_first(FP8.w_gate_up)},
        ValueError,
        ["w_gate_up must be row-major", "strides [98304, 1, 384]", "[E, out, in]"],
    ),
    "w_down-columns-first": ({"w_down": columns_first(FP8.w_down)}, ValueError, ["w_down must be row-major"]),
    **{
        f"{name}-device": (
            {name: arguments()[name].to("meta")},
            ValueError,
            [f"{name} must be on x's device, cpu", "meta", "one device"],
        )
        for name in NAMES[1:]
    },
    "x_scale-device": ({"x": (PAIR[0], PAIR[1].to("meta"))}, ValueError, ["x_scale must be on x's device"]),
    "x-device": ({"x": FP8.x.to("meta")}, ValueError, ["topk_idx must be on x's device, meta", "got cpu"]),
    **{
        f"{name}-trainable": (
            {name: trainable(arguments()[name])},
            ValueError,
            [f"{name} must be frozen", "requires grad", "moe_ops.freeze", "detach", "adapter", "no_grad"],
        )
        for name in NAMES[3:]
    },
    "w_down-adapter": (
        {**BF16_WEIGHTS, "w_down": BF16.w_down + trainable(ones(192)).bfloat16()},
        ValueError,
        ["w_down must be frozen", "merge the adapter"],
    ),
    "x_scale-trainable": (
        {"x": (PAIR[0], trainable(PAIR[1]))},
        ValueError,
        ["x_scale must be without requires_grad where x is a pair", "topk_weights only", "detach"],
    ),
    "x_fp8-trainable": (
        {"x": (trainable(PAIR[0]), PAIR[1])},
        ValueError,
        ["x must be without requires_grad"],
    ),
    "limit-zero": (
        {"swiglu_limit": 0.0},
        ValueError,
        ["swiglu_limit must be None, or finite and > 0", "0.0"],
    ),
    "limit-nan": ({"swiglu_limit": float("nan")}, ValueError, ["swiglu_limit must be", "nan"]),
    "limit-inf": ({"swiglu_limit": float("inf")}, ValueError, ["swiglu_limit must be", "inf"]),
    "limit-1e39": ({"swiglu_limit": 1e39}, ValueError, ["swiglu_limit must be", "1e+39", "in fp32"]),
    "limit-tensor": ({"swiglu_limit": ones()}, TypeError, ["swiglu_limit must be a float or None", "Tensor"]),
    "profile-unknown": ({"profile": "fp8"}, ValueError, ["profile must be None or one of", "'fp8'"]),
    "profile-type": ({"profile": 1}, TypeError, ["profile must be a str or None", "int"]),
    "profile-of-bf16": (
        {"profile": "cpu-fp32-v1"},
        NotImplementedError,
        [
            "profile must be one for fp8 weights, as w_gate_up is torch.float8_e4m3fn",
            "'exact-fp8-k128-k64-v1'",
        ],
    ),
    "profile-of-fp8": (
        {**BF16_WEIGHTS, "profile": "exact-fp8-k128-k64-v1"},
        NotImplementedError,
        ["profile must be one for bf16 weights, as w_gate_up is torch.bfloat16", "'cpu-fp32-v1'"],
    ),
    "profile-of-cuda": (
        {"profile": "fp8-k128-k64-v1"},
        NotImplementedError,
        ["profile must be one that this build computes on cpu", "fp8 weights", "'exact-fp8-k128-k128-v1'"],
    ),
    "backend-unknown": ({"backend": "cutlass"}, ValueError, ["backend must be None or one of", "'cutlass'"]),
    "backend-elsewhere": (
        {"backend": "triton"},
        NotImplementedError,
        ["backend must be one that computes profile 'exact-fp8-k128-k64-v1' on cpu", "'reference'"],
    ),
}
table = pytest.mark.parametrize(("changes", "error", "words"), CASES.values(), ids=CASES)


def work_of(call):
    """The ATen operators that `call` ran."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call()
    return [event.key for event in profile.key_averages() if event.key.startswith("aten::")]


@table
def test_message_and_no_work(changes, error, words):
    call = arguments() | changes
    parts = [part for value in call.values() for part in (value if isinstance(value, tuple) else (value,))]
    tensors = [part for part in parts if isinstance(part, torch.Tensor) and part.device.type == "cpu"]
    tensors = [value for value in tensors if value.layout == torch.strided]
    before = [(value.detach().clone(), value._version) for value in tensors]

    def run():
        with pytest.raises(error) as raised:
            moe_ops.mega_moe(**call)
        message = str(raised.value)
        assert message.startswith("moe_ops.mega_moe: ")
        assert all(word in message for word in words), message
        assert "\n" not in message

    assert work_of(run) == [], "something ran before the check"
    for value, (copy, version) in zip(tensors, before, strict=True):
        assert value._version == version
        assert torch.equal(value.double(), copy.double())


def test_work_is_seen():
    """The instrument of the test above sees the work of a good call."""
    assert "aten::mm" in work_of(lambda: moe_ops.mega_moe(**arguments()))


# Dynamo refuses every sparse tensor itself.
COMPILED_CASES = {name: case for name, case in CASES.items() if name != "x-sparse"}


@pytest.mark.parametrize(("changes", "error", "words"), COMPILED_CASES.values(), ids=COMPILED_CASES)
def test_message_survives_compilation(changes, error, words, fresh_compiler):
    """Dynamo wraps the exception; the whole message is in its text."""
    with pytest.raises(Exception) as raised:
        torch.compile(moe_ops.mega_moe, fullgraph=True, backend="eager")(**arguments() | changes)
    message = str(raised.value)
    assert "moe_ops.mega_moe: " in message
    missing = [word for word in words if word not in message and repr(word)[1:-1] not in message]
    assert not missing, message
