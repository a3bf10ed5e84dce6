"""The lowered shared expert on the GPU: the bits of eager, fused epilogues included, for every T."""

import subprocess
import sys

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch._inductor import config
from torch._inductor.utils import run_and_get_code
from torch.testing import FileCheck

import moe_ops
from moe_ops.testing import bits_equal, shared_expert_inputs

pytestmark = pytest.mark.gpu

OPS = torch.ops.moe_ops
SHAPES = [(256, 192), (384, 50), (1024, 512), (4096, 2048)]
SHAPE_IDS = [f"H{hidden}-I{intermediate}" for hidden, intermediate in SHAPES]


def passes(x, dy, *weights):
    """Every operator, in the order of its calls, each one's result alone and with an epilogue."""
    y = OPS.shared_expert_mlp(x, *weights)
    saved_y, g, u = OPS._shared_expert_mlp_save(x, *weights, swiglu_limit=1.5)
    dx = OPS._shared_expert_mlp_dx(dy, x, *weights, swiglu_limit=1.5)
    wide = OPS._shared_expert_mlp_dx_saved(dy, g, u, *weights, swiglu_limit=1.5, out_dtype=torch.float32)
    return y + dy, saved_y, g, u, dx + x, wide


def mark_dynamic(*tensors):
    for tensor in tensors:
        torch._dynamo.mark_dynamic(tensor, 0)


@pytest.mark.parametrize(("hidden", "intermediate"), SHAPES, ids=SHAPE_IDS)
@pytest.mark.parametrize("rows", [1, 17, 64, 300, 1024, 4096], ids=lambda rows: f"T{rows}")
def test_static(rows, hidden, intermediate, fresh_compiler, nan_memory):
    inputs = shared_expert_inputs(rows, hidden, intermediate, device="cuda", seed=rows)
    compiled = torch.compile(passes, fullgraph=True, dynamic=False)
    results, (code,) = run_and_get_code(compiled, *inputs)
    FileCheck().check_not("= torch.ops.moe_ops").run(code)
    for actual, expected in zip(results, passes(*inputs), strict=True):
        assert bits_equal(actual, expected)


@pytest.mark.parametrize(("hidden", "intermediate"), SHAPES, ids=SHAPE_IDS)
def test_one_kernel_for_every_number_of_tokens(hidden, intermediate, fresh_compiler, nan_memory):
    """Every branch of the kernels that choose their tile by themselves."""
    x, dy, *weights = shared_expert_inputs(8192, hidden, intermediate, device="cuda", seed=7)
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(passes, fullgraph=True, backend=counter)
    for rows in (300, 2, 16, 17, 64, 65, 128, 200, 256, 512, 700, 1024, 2048, 8192):
        tokens, gradient = x[:rows], dy[:rows]
        mark_dynamic(tokens, gradient)
        results = compiled(tokens, gradient, *weights)
        for actual, expected in zip(results, passes(tokens, gradient, *weights), strict=True):
            assert bits_equal(actual, expected), rows
    assert counter.frame_count == 1


def test_unbacked_tokens(fresh_compiler):
    inputs = shared_expert_inputs(300, 256, 192, device="cuda")
    layer = moe_ops.SharedExpertMLP(256, 192, device="cuda")
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    for rows in (17, 1, 0, 300, 2):
        results = []
        for run in (compiled, layer):
            x = inputs.x[:rows].clone().requires_grad_()
            if run is compiled:
                torch._dynamo.decorators.mark_unbacked(x, 0)
            y = run(x)
            y.backward(inputs.dy[:rows])
            results.append((y.detach(), x.grad))
        assert all(map(bits_equal, *results)), rows
    assert counter.frame_count == 1


EPILOGUES = {
    "residual": lambda y, other, gate: other + y,
    "scale": lambda y, other, gate: y * 0.37,
    "relu": lambda y, other, gate: y.relu(),
    "gate": lambda y, other, gate: gate * y,
    "wide": lambda y, other, gate: y.float() + other.float(),
    "none": lambda y, other, gate: y,
}


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("epilogue", EPILOGUES.values(), ids=EPILOGUES)
def test_an_operation_after_the_layer_is_fused_and_exact(epilogue, dynamic, fresh_compiler):
    x, other, *weights = shared_expert_inputs(300, 1024, 512, device="cuda", seed=11)
    gate = torch.rand(300, 1, device="cuda").bfloat16()

    def run(x, other, gate):
        return epilogue(OPS.shared_expert_mlp(x, *weights), other, gate)

    if dynamic:
        mark_dynamic(x, other, gate)
    actual, (code,) = run_and_get_code(torch.compile(run, fullgraph=True), x, other, gate)
    assert bits_equal(actual, run(x, other, gate))
    FileCheck().check_count(".run(", 2, exactly=True).run(code.split("def call(")[1].split("return")[0])


CHAINS = {
    "residual-routed": lambda y, other, gate: other + (y + other * 2),
    "scale-residual": lambda y, other, gate: other + y * 0.37,
    "gate-residual": lambda y, other, gate: other + y * torch.sigmoid(gate),
    "twice": lambda y, other, gate: (y + other, y * gate),
    "norm": lambda y, other, gate: torch.nn.functional.rms_norm(y + other, (1024,)),
}


@pytest.mark.parametrize("chain", CHAINS.values(), ids=CHAINS)
def test_longer_epilogues(chain, fresh_compiler):
    """The bits of the opaque graph; those of eager where Inductor is told to round as eager does."""
    x, other, *weights = shared_expert_inputs(300, 1024, 512, device="cuda", seed=12)
    gate = torch.rand(300, 1, device="cuda").bfloat16()

    def run(x, other, gate):
        return chain(OPS.shared_expert_mlp(x, *weights), other, gate)

    def compiled(*, lowered):
        torch._dynamo.reset()
        moe_ops.use_lowerings(lowered)
        try:
            return torch.compile(run, fullgraph=True)(x, other, gate)
        finally:
            moe_ops.use_lowerings(True)

    def equal(one, two):
        pairs = zip(one, two, strict=True) if isinstance(one, tuple) else [(one, two)]
        return all(bits_equal(*pair) for pair in pairs)

    assert equal(compiled(lowered=True), compiled(lowered=False))
    if chain is not CHAINS["norm"] and chain is not CHAINS["gate-residual"]:  # Inductor's exp is its own
        with config.patch(emulate_precision_casts=True):
            assert equal(compiled(lowered=True), run(x, other, gate))


KINDS = ["transposed", "sliced", "three-dimensional", "unaligned", "packed", "weights"]


@pytest.mark.parametrize("kind", KINDS)
def test_strides(kind, fresh_compiler):
    x, dy, *weights = shared_expert_inputs(300, 256, 192, device="cuda", seed=13)
    compiled = torch.compile(passes, fullgraph=True)
    if kind == "transposed":
        x = x.t().contiguous().t()
    elif kind == "sliced":
        x, dy = x[::2], dy[::2]
    elif kind == "three-dimensional":
        x, dy = x.view(3, 100, 256).transpose(0, 1), dy.view(100, 3, 256)
    elif kind == "unaligned":
        storage = torch.empty(x.numel() + 1, device="cuda", dtype=x.dtype)
        x = storage[1:].view_as(x).copy_(x)
    elif kind == "packed":
        packed, down = torch.cat(weights[:2]), weights[2]
        compiled = torch.compile(lambda x, dy, *_: passes(x, dy, *packed.chunk(2), down), fullgraph=True)
    else:
        weights = [weight.t().contiguous().t() for weight in weights[:2]] + weights[2:]
    results = compiled(x, dy, *weights)
    for actual, expected in zip(results, passes(x, dy, *weights), strict=True):
        assert bits_equal(actual, expected) and actual.stride() == expected.stride()


def test_weights_of_unknown_shape_become_numbers(fresh_compiler):
    """`dynamic=True` makes symbols of the weights' sizes too, which would take wide loads away."""
    x, dy, *weights = shared_expert_inputs(300, 256, 192, device="cuda", seed=14)
    compiled = torch.compile(passes, fullgraph=True, dynamic=True)
    results, (code,) = run_and_get_code(compiled, x, dy, *weights)
    assert "intermediate = 192" in code and "hidden = 256" in code
    for actual, expected in zip(results, passes(x, dy, *weights), strict=True):
        assert bits_equal(actual, expected)


def test_max_autotune_has_the_same_bits(fresh_compiler):
    inputs = shared_expert_inputs(300, 256, 192, device="cuda", seed=15)
    compiled = torch.compile(passes, fullgraph=True, mode="max-autotune-no-cudagraphs")
    for actual, expected in zip(compiled(*inputs), passes(*inputs), strict=True):
        assert bits_equal(actual, expected)
    assert counters["inductor"]["select_algorithm_autotune"] > 0


def test_the_default_tunes_nothing(fresh_compiler):
    inputs = shared_expert_inputs(300, 256, 192, device="cuda", seed=15)
    torch.compile(passes, fullgraph=True)(*inputs)
    assert counters["inductor"]["select_algorithm_autotune"] == 0


class Block(nn.Module):
    """Norm -> shared expert -> residual."""

    def __init__(self, hidden, intermediate, **options):
        super().__init__()
        self.norm = nn.RMSNorm(hidden, dtype=torch.bfloat16, device="cuda").requires_grad_(False)
        self.mlp = moe_ops.SharedExpertMLP(hidden, intermediate, device="cuda", **options)

    def forward(self, x):
        return x + self.mlp(self.norm(x))


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
@pytest.mark.parametrize("save", ["recompute", "activations"])
def test_block_trains(save, mode, fresh_compiler):
    """Lowered and opaque graphs of a block have the same bits, forward and dX, under CUDA graphs too."""
    block = Block(256, 192, save=save)
    inputs = shared_expert_inputs(100, 256, 192, device="cuda", seed=16)
    results = {}
    for lowered in (True, False):
        torch._dynamo.reset()
        moe_ops.use_lowerings(lowered)
        try:
            compiled = torch.compile(block, fullgraph=True, mode=mode)
            for _ in range(3):
                torch.compiler.cudagraph_mark_step_begin()
                x = inputs.x.clone().requires_grad_()
                y = compiled(x)
                y.backward(inputs.dy)
                results[lowered] = y.detach().clone(), x.grad.clone()
        finally:
            moe_ops.use_lowerings(True)
    assert all(map(bits_equal, results[True], results[False]))


def test_the_strict_profile_stays_opaque(caplog, fresh_compiler):
    caplog.set_level("INFO", logger="moe_ops")
    inputs = shared_expert_inputs(20, 64, 32, device="cuda")
    x, _, *weights = inputs

    def run(x):
        return OPS.shared_expert_mlp(x, *weights, profile="fp32-serial-v1")

    assert bits_equal(torch.compile(run, fullgraph=True)(x), run(x))
    assert "stays an opaque call: profile 'fp32-serial-v1' has no lowering" in caplog.text


RUN_PACKAGE = """
import sys, torch, torch._inductor
model = torch._inductor.aoti_load_package({package!r})
for x, expected in torch.load({data!r}):
    actual = model(x)
    assert torch.equal(actual.view(torch.int16), expected.view(torch.int16)), len(x)
assert "moe_ops" not in sys.modules
"""


@pytest.mark.skipif(
    torch.torch_version.TorchVersion(torch.__version__) < (2, 13),
    reason="torch 2.11 ends in a segmentation fault when it loads a package of any CUDA model",
)
@pytest.mark.parametrize("hidden", [512, 200])
def test_aot_inductor_package_runs_without_moe_ops(hidden, tmp_path, fresh_compiler):
    layer = moe_ops.SharedExpertMLP(hidden, 192, device="cuda")
    inputs = shared_expert_inputs(1200, hidden, 192, device="cuda", seed=17)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.mlp = layer

        def forward(self, x):
            return x + self.mlp(x)

    model, package, data = Model(), str(tmp_path / "model.pt2"), str(tmp_path / "data.pt")
    with torch.no_grad():
        tokens = torch.export.Dim("T")
        program = torch.export.export(model, (inputs.x[:300],), dynamic_shapes=({0: tokens},))
        torch._inductor.aoti_compile_and_package(program, package_path=package)
        torch.save([(inputs.x[:rows].clone(), model(inputs.x[:rows])) for rows in (2, 33, 300, 1200)], data)
    code = RUN_PACKAGE.format(package=package, data=data)
    result = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", code],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-2000:]
