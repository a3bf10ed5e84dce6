"""The MoE layer under torch.compile, export, autocast; opcheck of its operators and of the quantisers."""

import io

import pytest
import torch
import torch._inductor
from expecttest import assert_expected_inline
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

import moe_ops
from moe_ops.testing import bits_equal, mega_moe_inputs

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = 200, 96, 8, 2
OPS = torch.ops.moe_ops
both = pytest.mark.parametrize("weights", ["fp8", "bf16"])


def make(tokens, weights="fp8", **options):
    return mega_moe_inputs(tokens, HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, weights=weights, **options)


def make_layer(weights="fp8", **options):
    return moe_ops.MegaMoE(HIDDEN, INTERMEDIATE, EXPERTS, weights=weights, **options)


class Block(nn.Module):
    """Norm -> router in plain torch -> routed experts -> residual: ours between what Inductor fuses."""

    def __init__(self, layer):
        super().__init__()
        self.norm = nn.RMSNorm(HIDDEN, dtype=torch.bfloat16)
        self.router = nn.Linear(HIDDEN, EXPERTS, bias=False, dtype=torch.bfloat16)
        self.experts = layer

    def forward(self, x):
        normed = self.norm(x)
        weights, index = self.router(normed).float().softmax(-1).topk(TOP_K)
        y, counts = self.experts(normed, index, weights, return_expert_counts=True)
        return x + y, counts, (normed, index, weights, y)


def passes(function, inputs):
    """(y, dx, d topk_weights), and y without gradients."""
    x, routing = (value.detach().clone().requires_grad_() for value in (inputs.x, inputs.topk_weights))
    y = function(x, inputs.topk_idx, routing)
    y.backward(inputs.dy)
    with torch.no_grad():
        quiet = function(inputs.x, inputs.topk_idx, inputs.topk_weights)
    return y.detach(), x.grad, routing.grad, quiet


def same(actual, expected):
    return all(bits_equal(*pair) for pair in zip(actual, expected, strict=True))


@pytest.mark.parametrize("options", [{}, {"profile": "exact-fp8-k128-k128-v1"}, {"weights": "bf16"}], ids=str)
def test_compiled_layer_is_the_eager_layer(options, fresh_compiler):
    """Training and inference, T up and down; at most one recompilation for T, one each for T = 0 and 1."""
    layer = make_layer(swiglu_limit=1.5, **options)
    weights = options.get("weights", "fp8")
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    for tokens in (17, 33):
        inputs = make(tokens, weights, seed=tokens, masked=0.2)
        assert same(passes(compiled, inputs), passes(layer, inputs)), tokens
    seen = counter.frame_count
    assert seen <= 4  # two sizes in two grad modes
    for tokens in (64, 300, 17, 2, 33):
        inputs = make(tokens, weights, seed=tokens, masked=0.2)
        assert same(passes(compiled, inputs), passes(layer, inputs)), tokens
    assert counter.frame_count == seen
    for tokens in (1, 0, 1, 0):
        inputs = make(tokens, weights)
        assert same(passes(compiled, inputs), passes(layer, inputs)), tokens
    assert counter.frame_count <= seen + 4
    assert not counters["graph_break"]


@both
def test_twenty_sizes_on_a_dynamic_dimension_compile_once(weights, fresh_compiler):
    layer = make_layer(weights)
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(layer, fullgraph=True, backend=counter, dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True), torch.no_grad():
        for tokens in range(3, 123, 6):  # not top_k: equal sizes become one symbol
            inputs = make(tokens, weights, seed=tokens)
            assert bits_equal(compiled(*inputs.arguments[:3]), layer(*inputs.arguments[:3])), tokens
    assert counter.frame_count == 1


def test_unbacked_tokens_compile_once(fresh_compiler):
    """With `mark_unbacked` one graph serves T = 0 and 1 as well: neither contracts nor fakes guard on T."""
    layer = make_layer()

    def run(x):
        weights, index = x[:, :EXPERTS].float().softmax(-1).topk(TOP_K)
        return layer(x, index, weights), index, weights

    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(run, fullgraph=True, backend=counter)
    for tokens in (17, 1, 0, 64, 2):
        x = make(tokens).x
        torch._dynamo.decorators.mark_unbacked(x, 0)
        y, *routing = compiled(x)
        assert bits_equal(y, layer(x, *routing)), tokens
    assert counter.frame_count == 1


def test_routings_do_not_recompile(fresh_compiler):
    """Experts without tokens, all tokens on one, masked and dropped slots, counts: one graph."""
    layer = make_layer()
    counter = CompileCounterWithBackend("inductor")

    def run(x, index, weights):
        return layer(x, index, weights, return_expert_counts=True)

    compiled = torch.compile(run, fullgraph=True, backend=counter)
    inputs = make(40)
    first = inputs.topk_idx
    for index in (
        first,
        first * 0,
        first * 0 + 7,
        first * 0 - 1,
        first * 0 + EXPERTS,
        first % 3,
        first.flip(0),
    ):
        actual = compiled(inputs.x, index, inputs.topk_weights)
        expected = run(inputs.x, index, inputs.topk_weights)
        assert bits_equal(actual[0], expected[0]) and torch.equal(actual[1], expected[1])
    assert counter.frame_count == 1


@both
def test_compiled_block_feeds_the_layer_its_own_inputs(weights, fresh_compiler):
    """Inside a compiled block, with a router, the layer gives eager's bits on the inputs that it got."""
    block = Block(make_layer(weights))
    compiled = torch.compile(block, fullgraph=True)
    for tokens in (40, 33):
        x = make(tokens).x.requires_grad_()
        out, counts, (normed, index, routing, y) = compiled(x)
        expected, expected_counts = block.experts(normed, index, routing, return_expert_counts=True)
        assert bits_equal(y, expected) and torch.equal(counts, expected_counts)
        out.float().square().sum().backward()
        assert x.grad.isfinite().all() and block.router.weight.grad.any()
        assert all(value.grad is None for value in block.experts.parameters())
    assert not counters["graph_break"]


@pytest.mark.parametrize("kind", ["transposed", "sliced"])
def test_compiled_strides_are_eager_strides(kind, fresh_compiler):
    layer, inputs = make_layer(), make(40)
    if kind == "transposed":
        inputs = inputs._replace(
            x=inputs.x.t().contiguous().t(), topk_idx=inputs.topk_idx.t().contiguous().t()
        )
    else:
        inputs = inputs._replace(**{name: getattr(inputs, name)[::2] for name in inputs._fields[:4]})
    actual, expected = passes(torch.compile(layer, fullgraph=True), inputs), passes(layer, inputs)
    assert same(actual, expected)
    assert [value.stride() for value in actual] == [value.stride() for value in expected]


def test_pair(fresh_compiler):
    layer, inputs = make_layer(), make(40)
    compiled = torch.compile(
        lambda x, index, weights: layer(moe_ops.quantize_activations(x), index, weights), fullgraph=True
    )
    routing = inputs.topk_weights.requires_grad_()
    y = compiled(inputs.x, inputs.topk_idx, routing)
    y.backward(inputs.dy)
    expected = passes(layer, inputs)
    assert bits_equal(y, expected[0]) and bits_equal(routing.grad, expected[2])


def test_autocast(fresh_compiler):
    layer, inputs = make_layer(), make(40)
    inputs = inputs._replace(x=inputs.x.float())

    def run(*routed):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return layer(*routed)

    actual, expected = passes(torch.compile(run, fullgraph=True), inputs), passes(run, inputs)
    assert actual[0].dtype == torch.bfloat16 and actual[1].dtype == torch.float32
    assert same(actual, expected)


def test_validate_indices(fresh_compiler):
    """The check runs in the graph: it cannot be compiled away, and its message is that of eager."""
    layer, inputs = make_layer(), make(40)
    compiled = torch.compile(
        lambda *routed: layer(*routed, validate_indices=True), fullgraph=True, backend="inductor"
    )
    assert bits_equal(compiled(*inputs.arguments[:3]), layer(*inputs.arguments[:3]))
    inputs.topk_idx[3, 1] = EXPERTS
    with pytest.raises(ValueError, match=r"topk_idx must be in \[-1, E\) with E = 8; got 8 at \[3, 1\]"):
        compiled(*inputs.arguments[:3])


@both
def test_export_saves_loads_and_runs_another_t(weights):
    block = Block(make_layer(weights))
    program = torch.export.export(block, (make(17).x,), dynamic_shapes=({0: torch.export.Dim("T")},))
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    buffer.seek(0)
    loaded = torch.export.load(buffer).module()
    for tokens in (2, 33, 300):
        x = make(tokens, seed=tokens).x
        y, counts, _ = loaded(x)
        expected, expected_counts, _ = block(x)
        assert bits_equal(y, expected) and torch.equal(counts, expected_counts)


@pytest.mark.skipif(
    torch.torch_version.TorchVersion(torch.__version__) < (2, 13),
    reason="torch 2.11 ends in a segmentation fault when it loads a package that calls a custom operator",
)
def test_aot_inductor_package_runs_another_t(tmp_path, fresh_compiler):
    layer = make_layer("bf16")
    dim = torch.export.Dim("T")
    with torch.no_grad():
        program = torch.export.export(layer, make(17).arguments[:3], dynamic_shapes=({0: dim},) * 3)
    package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "layer.pt2"))
    loaded = torch._inductor.aoti_load_package(package)
    for tokens in (2, 17, 300):
        routed = make(tokens, seed=tokens).arguments[:3]
        assert bits_equal(loaded(*routed), layer(*routed)), tokens


@pytest.mark.parametrize("leaves", ["x", "topk_weights", "both"])
def test_graphs(leaves, kept_graphs):
    """One operator forward, one backward, that of the gradients asked for, and nothing else."""
    backend, graphs = kept_graphs
    layer, inputs = make_layer(), make(40)
    x, routing = inputs.x, inputs.topk_weights
    if leaves != "topk_weights":
        x.requires_grad_()
    if leaves != "x":
        routing.requires_grad_()
    torch.compile(layer, fullgraph=True, backend=backend)(x, inputs.topk_idx, routing).backward(inputs.dy)
    assert graphs["forward"] == "moe_ops._mega_moe.default"
    if leaves == "x":
        assert_expected_inline(graphs["backward"], """moe_ops._mega_moe_dx.default""")
    elif leaves == "topk_weights":
        assert_expected_inline(graphs["backward"], """moe_ops._mega_moe_dweights.default""")
    else:
        assert_expected_inline(graphs["backward"], """moe_ops._mega_moe_dx_dweights.default""")


@pytest.mark.parametrize("requires_grad", [False, True], ids=["nograd", "grad"])
@pytest.mark.parametrize("kind", ["fp8", "bf16", "pair"])
@pytest.mark.parametrize("shape", [(5, 200, 96, 4, 2), (1, 64, 32, 2, 1)], ids=str)
def test_opcheck(shape, kind, requires_grad, fp8_allclose):
    """All of opcheck's utilities for every operator, with a strided x and a masked slot."""
    inputs = mega_moe_inputs(*shape, weights="bf16" if kind == "bf16" else "fp8")
    inputs.topk_idx[0, 0] = -1
    pair = moe_ops.quantize_activations(inputs.x) if kind == "pair" else (inputs.x.t().contiguous().t(), None)
    others = (inputs.topk_idx, inputs.topk_weights, *inputs.weights)
    options = {"swiglu_limit": 1.5, "profile": "exact-fp8-k128-k128-v1" if kind != "bf16" else None}
    for name in ("_mega_moe_dx", "_mega_moe_dweights", "_mega_moe_dx_dweights"):
        torch.library.opcheck(getattr(OPS, name).default, (inputs.dy, *pair, *others), options)
    if requires_grad:
        others[1].requires_grad_()
        if kind != "pair":
            pair[0].requires_grad_()
    torch.library.opcheck(OPS._mega_moe.default, (*pair, *others), options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_opcheck_of_the_quantisers(dtype, fp8_allclose):
    x = torch.randn(3, 5, 200).to(dtype)
    for group in (128, 64, 7):
        torch.library.opcheck(OPS.quantize_activations.default, (x, group))
    for block in ((128, 128), (2, 7)):
        torch.library.opcheck(OPS.quantize_weights_block.default, (x, *block))
    torch.library.opcheck(OPS._validated_indices.default, (torch.zeros(4, 2, dtype=torch.int64), 4))
