"""What bad input gets: the right error, naming argument, requirement, value and remedy, and no work."""

import pytest
import torch

import moe_ops
from moe_ops import contracts
from moe_ops.testing import bits_equal, shared_expert_inputs

HIDDEN, INTERMEDIATE = 64, 32
CHOICE = contracts.Choice("fp32-serial-v1", "triton")


def arguments():
    inputs = shared_expert_inputs(6, HIDDEN, INTERMEDIATE)
    return {"x": inputs.x, "w_gate": inputs.w_gate, "w_up": inputs.w_up, "w_down": inputs.w_down}


def other(shape, dtype=torch.bfloat16, device="cpu"):
    return torch.ones(shape, dtype=dtype, device=device)


# (id, changed arguments, error, words that the message must hold: argument, requirement, value, remedy)
CASES = [
    (
        "x-fp32",
        {"x": other((6, 64), torch.float32)},
        TypeError,
        ["x must be torch.bfloat16", "torch.float32", "autocast"],
    ),
    (
        "x-fp16",
        {"x": other((6, 64), torch.float16)},
        TypeError,
        ["x must be torch.bfloat16", "torch.float16", ".to("],
    ),
    ("x-int64", {"x": other((6, 64), torch.int64)}, TypeError, ["x must be torch.bfloat16", "torch.int64"]),
    (
        "w_gate-fp32",
        {"w_gate": other((32, 64), torch.float32)},
        TypeError,
        ["w_gate must be torch.bfloat16", "float32"],
    ),
    (
        "w_up-fp16",
        {"w_up": other((32, 64), torch.float16)},
        TypeError,
        ["w_up must be torch.bfloat16", "float16"],
    ),
    (
        "w_down-fp8",
        {"w_down": torch.ones(64, 32).to(torch.float8_e4m3fn)},
        TypeError,
        ["w_down must be", "float8_e4m3fn"],
    ),
    (
        "x-hidden",
        {"x": other((6, 63))},
        ValueError,
        ["x must be [..., H] with H = 64", "[6, 63]", "hidden size"],
    ),
    ("x-scalar", {"x": other(())}, ValueError, ["x must be [..., H]", "got []"]),
    ("w_gate-1d", {"w_gate": other((64,))}, ValueError, ["w_gate must be [I, H]", "[64]"]),
    (
        "w_down-3d",
        {"w_down": other((2, 64, 32))},
        ValueError,
        ["w_down must be [H, I]", "[2, 64, 32]", "one matrix"],
    ),
    (
        "w_up-rows",
        {"w_up": other((31, 64))},
        ValueError,
        ["w_up must be [I, H] = [32, 64]", "[31, 64]", "nn.Linear"],
    ),
    (
        "w_down-transposed",
        {"w_down": other((32, 64))},
        ValueError,
        ["w_down must be [H, I] = [64, 32]", "[32, 64]"],
    ),
    (
        "weights-empty",
        {"w_gate": other((0, 64)), "w_up": other((0, 64)), "w_down": other((64, 0))},
        ValueError,
        ["w_gate must be [I, H], neither of them 0", "[0, 64]"],
    ),
    (
        "w_up-device",
        {"w_up": other((32, 64), device="meta")},
        ValueError,
        ["w_up must be on x's device, cpu", "meta"],
    ),
    (
        "x-sparse",
        {"x": other((6, 64)).to_sparse()},
        ValueError,
        ["x must be a dense tensor", "torch.sparse_coo"],
    ),
    (
        "limit-zero",
        {"swiglu_limit": 0.0},
        ValueError,
        ["swiglu_limit must be None, or finite and > 0", "0.0"],
    ),
    ("limit-negative", {"swiglu_limit": -1.0}, ValueError, ["swiglu_limit must be", "-1.0"]),
    ("limit-nan", {"swiglu_limit": float("nan")}, ValueError, ["swiglu_limit must be", "nan"]),
    ("limit-infinite", {"swiglu_limit": float("inf")}, ValueError, ["swiglu_limit must be", "inf"]),
    ("limit-above-fp32", {"swiglu_limit": 1e39}, ValueError, ["swiglu_limit must be", "1e+39", "in fp32"]),
    ("limit-below-fp32", {"swiglu_limit": 1e-60}, ValueError, ["swiglu_limit must be", "1e-60", "in fp32"]),
    (
        "limit-tensor",
        {"swiglu_limit": torch.ones(())},
        TypeError,
        ["swiglu_limit must be a float or None", "Tensor"],
    ),
    ("limit-bool", {"swiglu_limit": True}, TypeError, ["swiglu_limit must be a float or None", "bool"]),
    ("x-list", {"x": [1.0]}, TypeError, ["x must be a torch.Tensor", "list"]),
    (
        "w_gate-pair",
        {"w_gate": (other((32, 64)), None)},
        TypeError,
        ["w_gate must be a torch.Tensor", "tuple"],
    ),
    ("w_down-none", {"w_down": None}, TypeError, ["w_down must be a torch.Tensor", "None"]),
    (
        "profile-unknown",
        {"profile": "fp32"},
        ValueError,
        ["profile must be None or one of", "'cpu-fp32-v1'", "'fp32'"],
    ),
    ("profile-type", {"profile": 1}, TypeError, ["profile must be a str or None", "int"]),
    (
        "profile-elsewhere",
        {"profile": "tc-fp32-v1"},
        NotImplementedError,
        [
            "profile must be one that this build computes on cpu",
            "'tc-fp32-v1'",
            "'cpu-fp32-v1', 'fp32-serial-v1'",
        ],
    ),
    (
        "backend-unknown",
        {"backend": "cutlass"},
        ValueError,
        ["backend must be None or one of", "'triton'", "'cutlass'"],
    ),
    (
        "backend-type",
        {"backend": torch.device("cpu")},
        TypeError,
        ["backend must be a str or None", "device"],
    ),
    (
        "backend-triton",
        {"backend": "triton"},
        NotImplementedError,
        ["backend must be one that computes profile 'cpu-fp32-v1' on cpu", "'triton'", "'aten'"],
    ),
    (
        "backend-cuda",
        {"backend": "cuda"},
        NotImplementedError,
        ["backend must be one that computes", "'cuda'"],
    ),
    (
        "backend-reference",
        {"backend": "reference"},
        NotImplementedError,
        ["backend must be one that computes profile 'cpu-fp32-v1'", "'reference'", "another profile"],
    ),
    (
        "backend-serial",
        {"profile": "fp32-serial-v1", "backend": "triton"},
        NotImplementedError,
        ["computes profile 'fp32-serial-v1' on cpu", "'triton'", "'reference'"],
    ),
    (
        "save-unknown",
        {"save": "all"},
        ValueError,
        ["save must be one of 'recompute', 'activations'", "'all'"],
    ),
    ("save-type", {"save": True}, TypeError, ["save must be one of", "bool"]),
    (
        "w_gate-trainable",
        {"w_gate": other((32, 64)).requires_grad_()},
        ValueError,
        [
            "w_gate must be frozen",
            "requires grad",
            "moe_ops.freeze",
            "detach",
            "merge the adapter",
            "no_grad",
        ],
    ),
    (
        "w_down-adapter",
        {"w_down": other((64, 32)) + torch.zeros(64, 32).bfloat16().requires_grad_()},
        ValueError,
        ["w_down must be frozen", "merge the adapter"],
    ),
]
IDS = [case[0] for case in CASES]


def work_of(call):
    """The ATen operators that `call` ran."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call()
    return [event.key for event in profile.key_averages() if event.key.startswith("aten::")]


@pytest.mark.parametrize(("changes", "error", "words"), [case[1:] for case in CASES], ids=IDS)
def test_message_and_no_work(changes, error, words):
    call = arguments() | changes
    tensors = [
        value for value in call.values() if isinstance(value, torch.Tensor) and value.device.type == "cpu"
    ]
    tensors = [value for value in tensors if value.layout == torch.strided]
    before = [(value.detach().clone(), value._version) for value in tensors]

    def run():
        with pytest.raises(error) as raised:
            moe_ops.shared_expert_mlp(**call)
        message = str(raised.value)
        assert message.startswith("moe_ops.shared_expert_mlp: ")
        assert all(word in message for word in words), message
        assert "\n" not in message

    assert work_of(run) == [], "something ran before the check"
    for value, (copy, version) in zip(tensors, before, strict=True):
        assert value._version == version
        assert bits_equal(value, copy)


def test_work_is_seen():
    """The instrument of the test above sees the work of a good call."""
    assert "aten::bmm" in work_of(lambda: moe_ops.shared_expert_mlp(**arguments()))


# Dynamo refuses every sparse tensor itself.
COMPILED_CASES = [case for case in CASES if case[0] != "x-sparse"]


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [case[1:] for case in COMPILED_CASES],
    ids=[case[0] for case in COMPILED_CASES],
)
def test_message_survives_compilation(changes, error, words, fresh_compiler):
    """Dynamo wraps the exception; the whole message is in its text."""
    call = arguments() | changes
    with pytest.raises(Exception) as raised:
        torch.compile(moe_ops.shared_expert_mlp, fullgraph=True, backend="eager")(**call)
    message = str(raised.value)
    assert "moe_ops.shared_expert_mlp: " in message
    missing = [word for word in words if word not in message and repr(word)[1:-1] not in message]
    assert not missing, message


def test_fp16_autocast_is_refused():
    with (
        torch.autocast("cpu", dtype=torch.float16),
        pytest.raises(TypeError, match="autocast to torch.float16"),
    ):
        moe_ops.shared_expert_mlp(**arguments())


def test_autocast_does_not_cast_weights_or_integers():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with pytest.raises(TypeError, match="w_up must be torch.bfloat16; got torch.float32"):
            moe_ops.shared_expert_mlp(**arguments() | {"w_up": other((32, 64), torch.float32)})
        with pytest.raises(TypeError, match="x must be torch.bfloat16; got torch.int64"):
            moe_ops.shared_expert_mlp(**arguments() | {"x": other((6, 64), torch.int64)})


def test_weights_under_no_grad_are_accepted():
    call = arguments()
    expected = moe_ops.shared_expert_mlp(**call)
    call["w_up"] = call["w_up"].clone().requires_grad_()
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            assert bits_equal(moe_ops.shared_expert_mlp(**call), expected)
    with pytest.raises(ValueError, match="w_up must be frozen"):
        moe_ops.shared_expert_mlp(**call)


@pytest.mark.parametrize("save", ["recompute", "activations"])
def test_second_derivative_is_refused(save):
    call = arguments()
    x = call.pop("x").requires_grad_()
    y = moe_ops.shared_expert_mlp(x, **call, save=save)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        torch.autograd.grad(y.sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        torch.ops.moe_ops._shared_expert_mlp_dx(torch.ones_like(x), x, *call.values())


def test_differentiating_transforms_are_refused():
    call = arguments()
    x = call.pop("x")

    def loss(value):
        return moe_ops.shared_expert_mlp(value, **call).sum()

    refusal = "every tensor must be free of function transforms that differentiate; got "
    with pytest.raises(NotImplementedError, match=f"{refusal}torch.func.grad"):
        torch.func.grad(loss)(x)
    with pytest.raises(NotImplementedError, match=f"{refusal}forward-mode"):
        torch.func.jvp(loss, (x,), (x,))
    w_gate = call.pop("w_gate")
    with torch.no_grad(), pytest.raises(NotImplementedError, match=f"{refusal}forward-mode"):
        torch.func.jvp(lambda w: moe_ops.shared_expert_mlp(x, w, **call), (w_gate,), (w_gate,))
    with pytest.raises(NotImplementedError, match=f"{refusal}forward-mode"):
        torch.func.jvp(lambda dy: torch.ops.moe_ops._shared_expert_mlp_dx(dy, x, w_gate, **call), (x,), (x,))


def test_vmap_over_a_weight_is_refused():
    call = arguments()
    stacked = torch.stack([call.pop("w_up")] * 2)
    with pytest.raises(NotImplementedError, match=r"w_up must be one matrix.*Loop over the weights"):
        torch.vmap(lambda w_up: moe_ops.shared_expert_mlp(**call, w_up=w_up))(stacked)


DX_CASES = [
    (
        "dy-fp32",
        {"dy": other((6, 64), torch.float32)},
        TypeError,
        "dy must be torch.bfloat16; got torch.float32",
    ),
    ("dy-shape", {"dy": other((5, 64))}, ValueError, r"dy must be of x's shape \[6, 64\]; got \[5, 64\]"),
    (
        "dy-device",
        {"dy": other((6, 64), device="meta")},
        ValueError,
        "dy must be on x's device, cpu; got meta",
    ),
    ("out-fp16", {"out_dtype": torch.float16}, TypeError, "out_dtype must be None, torch.bfloat16"),
]


@pytest.mark.parametrize(
    ("changes", "error", "message"), [case[1:] for case in DX_CASES], ids=[c[0] for c in DX_CASES]
)
def test_dx_operator(changes, error, message):
    call = {"dy": other((6, 64)), **arguments(), **changes}
    with pytest.raises(error, match=message):
        torch.ops.moe_ops._shared_expert_mlp_dx(**call)


SAVED_CASES = [
    ("g-bf16", {"g": other((6, 32))}, TypeError, "g must be torch.float32; got torch.bfloat16"),
    (
        "u-shape",
        {"u": other((6, 31), torch.float32)},
        ValueError,
        r"u must be \[..., I\] = \[6, 32\]; got \[6, 31\]",
    ),
]


@pytest.mark.parametrize(
    ("changes", "error", "message"), [case[1:] for case in SAVED_CASES], ids=[c[0] for c in SAVED_CASES]
)
def test_dx_saved_operator(changes, error, message):
    call = {
        "dy": other((6, 64)),
        **arguments(),
        "g": other((6, 32), torch.float32),
        "u": other((6, 32), torch.float32),
    }
    del call["x"]
    with pytest.raises(error, match=message):
        torch.ops.moe_ops._shared_expert_mlp_dx_saved(**call | changes)


def test_reference_has_the_same_rules():
    call = arguments()
    with pytest.raises(TypeError, match="moe_ops.shared_expert_mlp_reference: x must be torch.bfloat16"):
        moe_ops.shared_expert_mlp_reference(**call | {"x": other((6, 64), torch.float32)})
    with pytest.raises(ValueError, match="w_down must be frozen"):
        moe_ops.shared_expert_mlp_reference(**call | {"w_down": other((64, 32)).requires_grad_()})
    with pytest.raises(ValueError, match="dy must be of x's shape"):
        moe_ops.shared_expert_mlp_dx_reference(other((5, 64)), **call)


def test_device_without_profiles():
    with pytest.raises(NotImplementedError, match="device must be of a type among 'cpu', 'cuda'; got 'xpu'"):
        moe_ops.provenance("xpu")


@pytest.mark.parametrize(
    ("check", "error", "message"),
    [
        (
            lambda: contracts.check_gpu("op", (7, 5), None),
            NotImplementedError,
            "device must be an NVIDIA GPU.*capability 8.0 or newer.*got capability 7.5. Pass profile=",
        ),
        (lambda: contracts.check_gpu("op", (9, 4), "6.2"), NotImplementedError, "got ROCm 6.2"),
        (
            lambda: contracts.refuse_import("op", CHOICE, ImportError("No module named 'triton'")),
            NotImplementedError,
            "backend must be.*got 'triton' .No module named 'triton'.. Install triton",
        ),
        (
            lambda: contracts.check_strict_products("op", (10, 3), (3, 7)),
            NotImplementedError,
            "triton must be 3.8 or newer for profile 'fp32-serial-v1' on compute capability 10.3; got 3.7",
        ),
        (
            lambda: contracts.check_sigmoid("op", CHOICE, 7),
            NotImplementedError,
            "bits of torch.sigmoid; got 'fp32-serial-v1', and 7 of the values tried differ. Pass backend=",
        ),
        (
            lambda: contracts.check_sigmoid("op", CHOICE, None),
            RuntimeError,
            "called once before a CUDA graph is captured.*Call it once, with any shape, before the capture",
        ),
    ],
    ids=["old-gpu", "rocm", "no-triton", "tf32", "sigmoid", "first-call-in-a-capture"],
)
def test_what_a_machine_cannot_honour(check, error, message):
    """The rules that need facts of a GPU; tests/gpu sees them where they are called."""
    with pytest.raises(error, match=message):
        check()


def test_a_machine_that_can():
    contracts.check_gpu("op", (8, 0), None)
    contracts.check_sigmoid("op", CHOICE, 0)
    for capability, triton in (((9, 0), (3, 6)), ((10, 0), (3, 8)), ((12, 0), (3, 6))):
        contracts.check_strict_products("op", capability, triton)


def test_dtensors_are_refused_by_name():
    """No sharding rule: the error names the operator, for sharded and replicated weights, before any work."""
    from torch import distributed
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        for placement in (Replicate(), Shard(0)):
            call = {name: distribute_tensor(value, mesh, [placement]) for name, value in arguments().items()}
            with pytest.raises(NotImplementedError, match="moe_ops.shared_expert_mlp"):
                moe_ops.shared_expert_mlp(**call)
    finally:
        distributed.destroy_process_group()
