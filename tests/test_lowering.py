"""The lowered shared expert on the CPU: the bits of the operators, what is generated, when it declines."""

import pytest
import torch
from expecttest import assert_expected_inline
from torch._dynamo.utils import counters
from torch._inductor import config
from torch._inductor.utils import run_and_get_code
from torch.testing import FileCheck

import moe_ops
from moe_ops.testing import bits_equal, shared_expert_inputs

from .test_imports import ROOT, run_python

OPS = torch.ops.moe_ops


def passes(x, dy, *weights):
    """Every operator, alone and with something after it."""
    y = OPS.shared_expert_mlp(x, *weights)
    saved_y, g, u = OPS._shared_expert_mlp_save(x, *weights, swiglu_limit=1.5)
    dx = OPS._shared_expert_mlp_dx(dy, x, *weights, swiglu_limit=1.5)
    wide = OPS._shared_expert_mlp_dx_saved(dy, g, u, *weights, out_dtype=torch.float32)
    return y + dy, saved_y, g, u, dx + x, wide


def assert_bits(results, expected):
    for actual, exact in zip(results, expected, strict=True):
        assert bits_equal(actual, exact) and actual.stride() == exact.stride()


@pytest.mark.parametrize(("hidden", "intermediate"), [(384, 50), (200, 72), (256, 192), (1024, 512)])
def test_bits_for_every_number_of_tokens(hidden, intermediate, fresh_compiler):
    x, dy, *weights = shared_expert_inputs(400, hidden, intermediate, seed=hidden)
    compiled = torch.compile(passes, fullgraph=True)
    for rows in (300, 2, 17, 33, 400, 6):
        tokens, gradient = x[:rows], dy[:rows]
        for tensor in (tokens, gradient):
            torch._dynamo.mark_dynamic(tensor, 0)
        assert_bits(compiled(tokens, gradient, *weights), passes(tokens, gradient, *weights))
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]


def test_special_values(fresh_compiler):
    """NaN, infinities, zeros of both signs, sums that underflow, pre-activations at the limit."""
    x, dy, *weights = shared_expert_inputs(40, 256, 192, seed=3)
    x[0], x[1], x[2], x[3] = float("nan"), float("inf"), -0.0, 1e-30
    x[4, ::2], x[5] = float("-inf"), 2e-38
    dy[6], dy[7], dy[8] = float("nan"), -0.0, 1e-38
    weights[0][0], weights[1][1], weights[2][:, 2] = 0.0, -0.0, 1e-38
    weights[0][3], weights[1][4] = float("inf"), float("nan")
    assert_bits(torch.compile(passes, fullgraph=True)(x, dy, *weights), passes(x, dy, *weights))


@pytest.mark.parametrize("kind", ["transposed", "sliced", "three-dimensional", "packed", "weights"])
def test_strides(kind, fresh_compiler):
    x, dy, *weights = shared_expert_inputs(60, 256, 192, seed=4)
    if kind == "transposed":
        x = x.t().contiguous().t()
    elif kind == "sliced":
        x, dy = x[::2], dy[::2]
    elif kind == "three-dimensional":
        x, dy = x.view(3, 20, 256).transpose(0, 1), dy.view(20, 3, 256)
    elif kind == "weights":
        weights = [weight.t().contiguous().t() for weight in weights]
    run = torch.compile(passes, fullgraph=True)
    if kind == "packed":  # gate and up are one buffer of the graph
        packed, down = torch.cat(weights[:2]), weights[2]
        run = torch.compile(lambda x, dy, *_: passes(x, dy, *packed.chunk(2), down), fullgraph=True)
    assert_bits(run(x, dy, *weights), passes(x, dy, *weights))


def test_threads_do_not_change_the_bits(fresh_compiler):
    x, dy, *weights = shared_expert_inputs(70, 256, 192, seed=5)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            torch._dynamo.reset()
            assert_bits(torch.compile(passes, fullgraph=True)(x, dy, *weights), passes(x, dy, *weights))
    finally:
        torch.set_num_threads(before)


def generated(run, *inputs):
    results, codes = run_and_get_code(torch.compile(run, fullgraph=True), *inputs)
    return results, "\n".join(codes)


def test_kernels_and_graph(fresh_compiler):
    """Four kernels, the residual in one of its own; one operator until the lowering."""
    x, _, *weights = shared_expert_inputs(20, 256, 192)
    graphs = []
    with config.patch(post_grad_custom_post_pass=lambda graph: graphs.append(graph)):
        _, code = generated(lambda x: x + OPS.shared_expert_mlp(x, *weights), x)
    calls = [str(node.target) for node in graphs[0].nodes if node.op == "call_function"]
    assert_expected_inline(
        "\n".join(calls),
        """\
moe_ops.shared_expert_mlp.default
aten.add.Tensor""",
    )
    FileCheck().check_count("cpp_fused_shared_expert_mlp_0(", 2, exactly=True).check_count(
        "cpp_fused_shared_expert_mlp_1(", 1, exactly=True
    ).check_count("cpp_fused_shared_expert_mlp_2(", 1, exactly=True).check_count(
        "cpp_fused_add_3(", 1, exactly=True
    ).check_not("extern_kernels").check_not("= torch.ops").run(code.split("def call(")[1])


def test_switched_off(fresh_compiler, opaque):
    x, _, *weights = shared_expert_inputs(20, 256, 192)
    run = lambda x: x + OPS.shared_expert_mlp(x, *weights)  # noqa: E731
    result, code = generated(run, x)
    FileCheck().check_count("= torch.ops.moe_ops.shared_expert_mlp.default(", 1, exactly=True).run(code)
    assert bits_equal(result, run(x))


@pytest.mark.parametrize(
    ("options", "patch", "reason"),
    [
        ({"profile": "fp32-serial-v1"}, {}, "profile 'fp32-serial-v1' has no lowering"),
        ({}, {"cpp.enable_floating_point_contract_flag": "fast"}, "contraction or unsafe mathematics"),
        ({}, {"cpp.simdlen": 1}, "does not compile for the vectors of ATen here"),
    ],
    ids=["strict", "contraction", "no vectors"],
)
def test_declines_with_a_reason_and_keeps_the_bits(options, patch, reason, caplog, fresh_compiler):
    caplog.set_level("INFO", logger="moe_ops")
    x, _, *weights = shared_expert_inputs(20, 64, 32)
    run = lambda x: OPS.shared_expert_mlp(x, *weights, **options)  # noqa: E731
    with config.patch(patch):
        assert bits_equal(torch.compile(run, fullgraph=True)(x), run(x))
    assert "moe_ops::shared_expert_mlp stays an opaque call: " in caplog.text and reason in caplog.text


def test_no_tokens(fresh_compiler):
    x, dy, *weights = shared_expert_inputs(5, 64, 32)
    assert_bits(
        torch.compile(passes, fullgraph=True)(x[:0], dy[:0], *weights), passes(x[:0], dy[:0], *weights)
    )


def test_the_first_compile_of_a_process_is_lowered(tmp_path):
    """Nothing of Inductor is imported with moe_ops; the lowerings are there in time all the same."""
    code = """
import sys, torch, moe_ops
print("torch._inductor.lowering" in sys.modules)
from torch._inductor.utils import run_and_get_code
layer = moe_ops.SharedExpertMLP(64, 32)
with torch.no_grad():
    _, (code,) = run_and_get_code(torch.compile(layer), torch.randn(3, 64).bfloat16())
print("= torch.ops.moe_ops" in code)
"""
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    assert run_python(code, ROOT, cwd=tmp_path, **cache) == ["False", "False"]


def test_another_torch_that_moved_what_lowerings_need_compiles_opaque(tmp_path):
    code = """
import sys, torch, moe_ops
sys.modules["moe_ops.lowering.shared_expert"] = None
from torch._inductor.utils import run_and_get_code
layer = moe_ops.SharedExpertMLP(64, 32)
x = torch.randn(3, 64).bfloat16()
with torch.no_grad():
    y, (code,) = run_and_get_code(torch.compile(layer), x)
    print("= torch.ops.moe_ops" in code, moe_ops.testing.bits_equal(y, layer(x)))
"""
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    assert run_python(code, ROOT, cwd=tmp_path, **cache) == ["True", "True"]


RUN_PACKAGE = """
import sys, torch, torch._inductor
model = torch._inductor.aoti_load_package({package!r})
for x, expected in torch.load({data!r}):
    print(torch.equal(model(x).view(torch.int16), expected.view(torch.int16)))
print("moe_ops" in sys.modules)
"""


def test_aot_inductor_package_runs_without_moe_ops_at_another_t(tmp_path, fresh_compiler):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.mlp = moe_ops.SharedExpertMLP(256, 192)

        def forward(self, x):
            return x + self.mlp(x)

    model, x = Model(), shared_expert_inputs(300, 256, 192).x
    package, data = str(tmp_path / "model.pt2"), str(tmp_path / "data.pt")
    with torch.no_grad():
        tokens = torch.export.Dim("T")
        program = torch.export.export(model, (x[:17],), dynamic_shapes=({0: tokens},))
        torch._inductor.aoti_compile_and_package(program, package_path=package)
        torch.save([(x[:rows].clone(), model(x[:rows])) for rows in (2, 17, 300)], data)
    found = run_python(RUN_PACKAGE.format(package=package, data=data), cwd=tmp_path)
    assert found == ["True", "True", "True", "False"]
