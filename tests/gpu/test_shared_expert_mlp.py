"""The shared expert on CUDA: the oracle, the operators, compilation, graphs. Any CUDA device will do."""

import pytest
import torch

import moe_ops
from moe_ops import reference
from moe_ops.testing import bits_equal, shared_expert_inputs

pytestmark = pytest.mark.gpu

OPS = torch.ops.moe_ops
STRICT = {"profile": "fp32-serial-v1", "backend": "reference"}
SHAPES = [(1, 128, 64), (16, 128, 64), (3, 100, 37), (256, 1024, 512)]
SHAPE_IDS = [f"T{t}-H{h}-I{i}" for t, h, i in SHAPES]


def forward_and_dx(module, x, dy):
    x = x.detach().clone().requires_grad_()
    y = module(x)
    y.backward(dy)
    return y.detach(), x.grad


def make_layer(rows=70, hidden=128, intermediate=64, **options):
    layer = moe_ops.SharedExpertMLP(hidden, intermediate, device="cuda", **STRICT, **options)
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
@pytest.mark.parametrize("limit", [None, 1.0], ids=["nolimit", "limit"])
@pytest.mark.parametrize("save", ["recompute", "activations"])
def test_strict_profile_is_the_oracle(shape, limit, save, nan_memory):
    inputs = shared_expert_inputs(*shape, device="cuda", seed=7)
    inputs.x[0] *= 100
    copies = [weight.clone() for weight in inputs.weights]

    def run(x):
        return moe_ops.shared_expert_mlp(x, *inputs.weights, swiglu_limit=limit, save=save, **STRICT)

    y, dx = forward_and_dx(run, inputs.x, inputs.dy)
    expected = moe_ops.shared_expert_mlp_reference(inputs.x, *inputs.weights, swiglu_limit=limit)
    expected_dx = moe_ops.shared_expert_mlp_dx_reference(
        inputs.dy, inputs.x, *inputs.weights, swiglu_limit=limit
    )
    assert all_equal((y, dx), (expected, expected_dx))
    assert all_equal(inputs.weights, copies)


@pytest.mark.parametrize("shape", SHAPES, ids=SHAPE_IDS)
def test_against_fp64(shape):
    """No further from fp64 than twice plain bf16, forward and dX."""
    inputs = shared_expert_inputs(*shape, device="cuda")
    results = {}
    for dtype in (torch.float64, torch.bfloat16):
        w_gate, w_up, w_down = (weight.to(dtype) for weight in inputs.weights)

        def plain(x, w_gate=w_gate, w_up=w_up, w_down=w_down):
            return (torch.nn.functional.silu(x @ w_gate.t()) * (x @ w_up.t())) @ w_down.t()

        results[dtype] = forward_and_dx(plain, inputs.x.to(dtype), inputs.dy.to(dtype))
    ours = forward_and_dx(
        lambda x: moe_ops.shared_expert_mlp(x, *inputs.weights, **STRICT), inputs.x, inputs.dy
    )
    for actual, bf16, exact in zip(ours, results[torch.bfloat16], results[torch.float64], strict=True):
        assert (actual.double() - exact).norm() <= 2 * (bf16.double() - exact).norm()


def test_row_bits_do_not_depend_on_the_batch(nan_memory):
    layer, x, dy = make_layer(rows=300)
    y, dx = forward_and_dx(layer, x, dy)
    for rows in (1, 2, 7, 64):
        picked = torch.randperm(300, device="cuda")[:rows]
        assert all_equal(forward_and_dx(layer, x[picked], dy[picked]), (y[picked], dx[picked])), rows


@pytest.mark.parametrize("leading", [(0,), (2, 0), (), (2, 3)], ids=str)
def test_leading_dimensions(leading):
    layer, x, dy = make_layer(rows=6)
    count = torch.Size(leading).numel()
    y, dx = forward_and_dx(layer, x[:count].reshape(*leading, 128), dy[:count].reshape(*leading, 128))
    flat = forward_and_dx(layer, x, dy)
    assert y.shape == dx.shape == (*leading, 128)
    assert all_equal((y.view(-1, 128), dx.view(-1, 128)), (flat[0][:count], flat[1][:count]))


def test_what_this_build_does_not_have_is_refused_by_name():
    inputs = shared_expert_inputs(3, 128, 64, device="cuda")
    for options, message in (
        ({}, "profile must be one that this build computes on cuda; got None, which is 'tc-fp32-v1'"),
        ({"profile": "cpu-fp32-v1"}, "got 'cpu-fp32-v1'.*'fp32-serial-v1'"),
        (
            {"profile": "fp32-serial-v1", "backend": "triton"},
            "backend must be one that computes.*'reference'",
        ),
    ):
        with pytest.raises(NotImplementedError, match=message):
            moe_ops.shared_expert_mlp(inputs.x, *inputs.weights, **options)
    with pytest.raises(ValueError, match="w_down must be on x's device, cuda:0; got cpu"):
        moe_ops.shared_expert_mlp(inputs.x, *inputs.weights[:2], inputs.w_down.cpu(), **STRICT)


@pytest.mark.parametrize("requires_grad", [False, True], ids=["nograd", "grad"])
def test_opcheck(requires_grad):
    inputs = shared_expert_inputs(5, 64, 32, device="cuda")
    x = inputs.x.t().contiguous().t().requires_grad_(requires_grad)
    _, g, u = OPS._shared_expert_mlp_save(x.detach(), *inputs.weights, **STRICT)
    for op, activations in (
        (OPS.shared_expert_mlp, (x,)),
        (OPS._shared_expert_mlp_save, (x,)),
        (OPS._shared_expert_mlp_dx, (inputs.dy, x.detach())),
        (OPS._shared_expert_mlp_dx_saved, (inputs.dy, g, u)),
    ):
        options = {"swiglu_limit": 1.5, **STRICT}
        torch.library.opcheck(op.default, (*activations, *inputs.weights), options)


@pytest.mark.parametrize("save", ["recompute", "activations"])
def test_compiled_layer_is_the_eager_layer(save, fresh_compiler):
    layer, x, dy = make_layer(save=save)
    compiled = torch.compile(layer, fullgraph=True)
    for rows in (70, 17, 33, 1, 0):
        actual = forward_and_dx(compiled, x[:rows], dy[:rows])
        assert all_equal(actual, forward_and_dx(layer, x[:rows], dy[:rows])), rows


@pytest.mark.parametrize("save", ["recompute", "activations"])
def test_autocast(save):
    layer, x, dy = make_layer(save=save)
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


def test_no_host_sync():
    layer, x, dy = make_layer()
    torch.cuda.set_sync_debug_mode("error")
    try:
        forward_and_dx(layer, x, dy)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_cuda_graph():
    layer, x, _ = make_layer()
    with torch.no_grad():
        graph, static_x = torch.cuda.CUDAGraph(), torch.zeros_like(x)
        with torch.cuda.graph(graph):
            static_y = layer(static_x)
        static_x.copy_(x)
        static_y.fill_(float("nan"))
        graph.replay()
        assert bits_equal(static_y, layer(x))


def test_reduce_overhead(fresh_compiler):
    layer, x, dy = make_layer()
    compiled = torch.compile(layer, fullgraph=True, mode="reduce-overhead")
    expected = forward_and_dx(layer, x, dy)
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        assert all_equal(forward_and_dx(compiled, x, dy), expected)


def test_provenance():
    record = moe_ops.provenance("cuda", profile="fp32-serial-v1")
    assert record.device == torch.cuda.get_device_name()
    assert (record.backend, record.device_type, record.threads) == ("reference", "cuda", None)
