"""The shared expert on CUDA with every profile and backend: operators, compilation, graphs, the oracle."""

import subprocess
import sys

import pytest
import torch

import moe_ops
from moe_ops import reference
from moe_ops.testing import bits_equal, shared_expert_inputs

pytestmark = pytest.mark.gpu

OPS = torch.ops.moe_ops
ORACLE = {"profile": "fp32-serial-v1", "backend": "reference"}
STRICT = {"profile": "fp32-serial-v1"}
FAST = {}
SHAPES = [(1, 128, 64), (16, 128, 64), (3, 100, 37), (256, 1024, 512)]
SHAPE_IDS = [f"T{t}-H{h}-I{i}" for t, h, i in SHAPES]


def forward_and_dx(module, x, dy):
    x = x.detach().clone().requires_grad_()
    y = module(x)
    y.backward(dy)
    return y.detach(), x.grad


@pytest.fixture(params=[ORACLE, STRICT, FAST], ids=["oracle", "strict", "fast"])
def variant(request):
    """What computes the layer."""
    return request.param


def make_layer(variant, rows=70, hidden=128, intermediate=64, **options):
    layer = moe_ops.SharedExpertMLP(hidden, intermediate, device="cuda", **variant, **options)
    inputs = shared_expert_inputs(rows, hidden, intermediate, device="cuda", seed=3)
    return layer, inputs.x, inputs.dy


def all_equal(actual, expected):
    return all(bits_equal(*pair) for pair in zip(actual, expected, strict=True))


@pytest.mark.parametrize("transpose_weight", [True, False], ids=["NK", "KN"])
def test_serial_product_is_the_cpus(transpose_weight):
    """Products and sums round alike on both devices, unless CUDA contracts one into the other."""
    a, weight = torch.randn(33, 1024).bfloat16(), torch.randn(50, 1024).bfloat16()
    a[0], a[1], a[2] = (
        a[0] * 2.0**-120,
        a[1] * 2.0**100,
        a[2] * 1e38,
    )  # subnormal products, huge ones, infinities
    weight = weight if transpose_weight else weight.t().contiguous()
    on_cpu = reference.serial_matmul(a, weight, transpose_weight=transpose_weight)
    on_cuda = reference.serial_matmul(a.cuda(), weight.cuda(), transpose_weight=transpose_weight)
    assert bits_equal(on_cuda, on_cpu)


@pytest.mark.parametrize("shape", SHAPES, ids=SHAPE_IDS)
def test_against_fp64(shape, variant):
    """No further from fp64 than twice plain bf16, forward and dX."""
    inputs = shared_expert_inputs(*shape, device="cuda")
    results = {}
    for dtype in (torch.float64, torch.bfloat16):
        w_gate, w_up, w_down = (weight.to(dtype) for weight in inputs.weights)

        def plain(x, w_gate=w_gate, w_up=w_up, w_down=w_down):
            return (torch.nn.functional.silu(x @ w_gate.t()) * (x @ w_up.t())) @ w_down.t()

        results[dtype] = forward_and_dx(plain, inputs.x.to(dtype), inputs.dy.to(dtype))
    ours = forward_and_dx(
        lambda x: moe_ops.shared_expert_mlp(x, *inputs.weights, **variant), inputs.x, inputs.dy
    )
    for actual, bf16, exact in zip(ours, results[torch.bfloat16], results[torch.float64], strict=True):
        assert (actual.double() - exact).norm() <= 2 * (bf16.double() - exact).norm()


def test_row_bits_do_not_depend_on_the_batch(variant, nan_memory):
    layer, x, dy = make_layer(variant, rows=300)
    y, dx = forward_and_dx(layer, x, dy)
    for rows in (1, 2, 7, 64):
        picked = torch.randperm(300, device="cuda")[:rows]
        assert all_equal(forward_and_dx(layer, x[picked], dy[picked]), (y[picked], dx[picked])), rows


@pytest.mark.parametrize("leading", [(0,), (2, 0), (), (2, 3)], ids=str)
def test_leading_dimensions(variant, leading):
    layer, x, dy = make_layer(variant, rows=6)
    count = torch.Size(leading).numel()
    y, dx = forward_and_dx(layer, x[:count].reshape(*leading, 128), dy[:count].reshape(*leading, 128))
    flat = forward_and_dx(layer, x, dy)
    assert y.shape == dx.shape == (*leading, 128)
    assert all_equal((y.view(-1, 128), dx.view(-1, 128)), (flat[0][:count], flat[1][:count]))


def test_what_this_build_does_not_have_is_refused_by_name():
    inputs = shared_expert_inputs(3, 128, 64, device="cuda")
    for options, message in (
        ({"profile": "cpu-fp32-v1"}, "got 'cpu-fp32-v1'.*'tc-fp32-v1', 'fp32-serial-v1'"),
        ({"backend": "reference"}, "backend must be one that computes profile 'tc-fp32-v1'.*'triton'"),
        ({"profile": "fp32-serial-v1", "backend": "cuda"}, "Pass None or one of 'triton', 'reference'"),
    ):
        with pytest.raises(NotImplementedError, match=message):
            moe_ops.shared_expert_mlp(inputs.x, *inputs.weights, **options)
    with pytest.raises(ValueError, match="w_down must be on x's device, cuda:0; got cpu"):
        moe_ops.shared_expert_mlp(inputs.x, *inputs.weights[:2], inputs.w_down.cpu())


def test_a_gpu_or_a_sigmoid_that_cannot_honour_a_profile_is_refused(monkeypatch):
    from moe_ops.kernels import sigmoid_check

    inputs = shared_expert_inputs(3, 128, 64, device="cuda")
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
        with pytest.raises(NotImplementedError, match="capability 8.0 or newer.*got capability 7.5"):
            moe_ops.shared_expert_mlp(inputs.x, *inputs.weights)
    monkeypatch.setattr(sigmoid_check, "_SAMPLED", {inputs.x.device: 3})
    moe_ops.shared_expert_mlp(inputs.x, *inputs.weights)
    with pytest.raises(NotImplementedError, match="sigmoid in Triton.*'fp32-serial-v1', and 3 of the values"):
        moe_ops.shared_expert_mlp(inputs.x, *inputs.weights, **STRICT)


@pytest.mark.parametrize("requires_grad", [False, True], ids=["nograd", "grad"])
def test_opcheck(variant, requires_grad):
    inputs = shared_expert_inputs(5, 64, 32, device="cuda")
    x = inputs.x.t().contiguous().t().requires_grad_(requires_grad)
    _, g, u = OPS._shared_expert_mlp_save(x.detach(), *inputs.weights, **variant)
    for op, activations in (
        (OPS.shared_expert_mlp, (x,)),
        (OPS._shared_expert_mlp_save, (x,)),
        (OPS._shared_expert_mlp_dx, (inputs.dy, x.detach())),
        (OPS._shared_expert_mlp_dx_saved, (inputs.dy, g, u)),
    ):
        options = {"swiglu_limit": 1.5, **variant}
        torch.library.opcheck(op.default, (*activations, *inputs.weights), options)


@pytest.mark.parametrize("save", ["recompute", "activations"])
def test_compiled_layer_is_the_eager_layer(variant, save, fresh_compiler):
    layer, x, dy = make_layer(variant, save=save)
    compiled = torch.compile(layer, fullgraph=True)
    for rows in (70, 17, 33, 1, 0):
        actual = forward_and_dx(compiled, x[:rows], dy[:rows])
        assert all_equal(actual, forward_and_dx(layer, x[:rows], dy[:rows])), rows


@pytest.mark.parametrize("save", ["recompute", "activations"])
def test_autocast(variant, save):
    layer, x, dy = make_layer(variant, save=save)
    expected = forward_and_dx(layer, x, dy)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        wide = x.float().requires_grad_()
        y = layer(wide)
    y.backward(dy)
    assert bits_equal(y, expected[0])
    assert bits_equal(wide.grad, expected[1].float())
    with (
        torch.autocast("cuda", dtype=torch.float16),
        pytest.raises(TypeError, match="autocast to torch.float16"),
    ):
        layer(x)


def test_no_host_sync(variant):
    layer, x, dy = make_layer(variant)
    layer(x)  # the strict profile compares its sigmoid with torch's, once
    torch.cuda.set_sync_debug_mode("error")
    try:
        forward_and_dx(layer, x, dy)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("save", ["recompute", "activations"])
def test_cuda_graph(variant, save):
    layer, x, dy = make_layer(variant, save=save)
    expected = forward_and_dx(layer, x, dy)
    graph, static_x = torch.cuda.CUDAGraph(), torch.zeros_like(x, requires_grad=True)
    static_dy = torch.zeros_like(dy)
    with torch.cuda.graph(graph):
        static_y = layer(static_x)
        (static_dx,) = torch.autograd.grad(static_y, static_x, static_dy)
    for _ in range(2):
        with torch.no_grad():
            static_x.copy_(x)
            static_dy.copy_(dy)
            for output in (static_y, static_dx):
                output.fill_(float("nan"))
        graph.replay()
        assert all_equal((static_y.detach(), static_dx), expected)


CAPTURE_FIRST = """
import torch, moe_ops
layer = moe_ops.SharedExpertMLP(128, 64, device="cuda", **{options})
x = torch.randn(5, 128, device="cuda").bfloat16()
graph = torch.cuda.CUDAGraph()
with torch.no_grad(), torch.cuda.graph(graph):
    y = layer(x)
graph.replay()
assert moe_ops.testing.bits_equal(y, layer(x))
"""


@pytest.mark.parametrize("options", [ORACLE, FAST], ids=["oracle", "fast"])
def test_capture_as_the_very_first_call(options):
    code = CAPTURE_FIRST.format(options=options)
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_strict_capture_as_the_very_first_call_says_what_to_warm_up():
    code = CAPTURE_FIRST.format(options=STRICT)
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (
        "RuntimeError: moe_ops.shared_expert_mlp: profile 'fp32-serial-v1' must be called once"
        in result.stderr
    )
    assert "Call it once, with any shape, before the capture." in result.stderr


def test_reduce_overhead(variant, fresh_compiler):
    layer, x, dy = make_layer(variant)
    compiled = torch.compile(layer, fullgraph=True, mode="reduce-overhead")
    expected = forward_and_dx(layer, x, dy)
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        assert all_equal(forward_and_dx(compiled, x, dy), expected)


@pytest.mark.parametrize(
    ("options", "profile", "backend"),
    [
        (ORACLE, "fp32-serial-v1", "reference"),
        (STRICT, "fp32-serial-v1", "triton"),
        (FAST, "tc-fp32-v1", "triton"),
    ],
    ids=["oracle", "strict", "fast"],
)
def test_provenance(options, profile, backend):
    record = moe_ops.provenance("cuda", **options)
    assert record.device == torch.cuda.get_device_name()
    assert (record.profile, record.backend, record.threads) == (profile, backend, None)
