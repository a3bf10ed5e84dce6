"""What the lowerings generate for a GPU, offline: kernels counted, epilogues fused, compiled for sm_90."""

import importlib.util
import re
import subprocess
from pathlib import Path

import pytest
import torch
from torch.testing import FileCheck

triton = pytest.importorskip("triton")

import torch._inductor.graph  # noqa: E402  (lets the first fake install the lowerings)
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

import moe_ops  # noqa: E402, F401

from .rendering import H200, kernels, pretended_h200, render  # noqa: E402

OPS = torch.ops.moe_ops
SHAPES = {"H4096-I2048": (4096, 2048), "H256-I192": (256, 192), "H384-I50": (384, 50)}
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


def forward(x, w_gate, w_up, w_down):
    return x + OPS.shared_expert_mlp(x, w_gate, w_up, w_down)


def save(x, w_gate, w_up, w_down):
    return OPS._shared_expert_mlp_save(x, w_gate, w_up, w_down, swiglu_limit=7.0)


def dx(x, w_gate, w_up, w_down):
    return OPS._shared_expert_mlp_dx(x, x, w_gate, w_up, w_down, swiglu_limit=7.0)


def rendered(function, tokens, hidden, intermediate, *, dynamic=False):
    weights = (intermediate, hidden), (intermediate, hidden), (hidden, intermediate)
    return render(function, (tokens, hidden), *weights, dynamic=dynamic)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("function", [forward, save, dx])
def test_two_kernels_and_nothing_else(function, dynamic):
    code = rendered(function, 1100, 4096, 2048, dynamic=dynamic)
    calls = code.split("def call(")[1]
    FileCheck().check_count(".run(", 2, exactly=True).check_not("extern_kernels").check_not(
        "= torch.ops"
    ).run(calls)
    assert list(kernels(code)) == ["triton_tem_fused_0", "triton_tem_fused_1"]


def test_the_residual_is_added_to_the_rounded_product():
    source = kernels(rendered(forward, 1100, 4096, 2048))["triton_tem_fused_1"]
    order = ("value = product_tile(", "value = value.to(tl.bfloat16).to(tl.float32)", "tl.load(", "tl.store(")
    check = FileCheck()
    for text in order:
        check.check(text)
    check.run(source)


def test_a_static_kernel_has_one_tile_and_a_dynamic_one_chooses():
    for dynamic, tiles in ((False, 1), (True, 6)):
        source = kernels(rendered(forward, 1100, 4096, 2048, dynamic=dynamic))["triton_tem_fused_1"]
        body = source.split("@triton.jit")[1]
        assert body.count("product_tile(") == tiles
        assert ("if choice == 5:" in body) == dynamic


def test_no_descriptors_in_packages():
    """AOTInductor (torch 2.11, 2.13) allocates the memory of device-made descriptors for one program only."""
    shapes = (1100, 4096), (2048, 4096), (2048, 4096), (4096, 2048)
    for aot in (False, True):
        code = render(forward, *shapes, dynamic=True, aot=aot)
        assert ("make_tensor_descriptor" in code) != aot


def test_the_mathematics_is_that_of_the_eager_kernels():
    from moe_ops.kernels import tiles

    source = kernels(rendered(dx, 1100, 4096, 2048))["triton_tem_fused_0"]
    for function in (tiles.swiglu_backward_tile, tiles.sigmoid_tile, tiles.gate_up_tile):
        assert function.src in source


def compiled(source, name, tmp_path):
    """Triton's compiled kernel, without Inductor's decorator."""
    signature = eval(re.search(r"'signature': (\{.*?\})", source)[1])
    options = {key: int(re.search(rf"{key}=(\d+)", source)[1]) for key in ("num_warps", "num_stages")}
    path = tmp_path / f"{name}.py"
    path.write_text(re.sub(r"@triton_heuristics\.template\(.*?\n\)\n", "", source, flags=re.DOTALL))
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    pointers = {
        (index,): [["tt.divisibility", 16]] for index, kind in enumerate(signature.values()) if kind[0] == "*"
    }
    with pretended_h200():
        spec.loader.exec_module(module)
        kernel = ASTSource(getattr(module, name), signature, {}, pointers)
        return triton.compile(kernel, target=GPUTarget("cuda", 90, 32), options=options)


def stack_bytes(kernel, tmp_path):
    path = tmp_path / "kernel.cubin"
    path.write_bytes(kernel.asm["cubin"])
    usage = subprocess.run([CUOBJDUMP, "-res-usage", path], capture_output=True, text=True, check=True).stdout
    return max(map(int, re.findall(r"STACK:(\d+)", usage)))


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("tokens", [64, 4096, "any"], ids=lambda tokens: f"T{tokens}")
@pytest.mark.parametrize("function", [save, dx])
def test_kernels_compile_for_hopper(function, tokens, shape, tmp_path):
    """Tensor cores, the memory that there is, no spills; wgmma and TMA where there are many tokens."""
    dynamic = tokens == "any"
    code = rendered(function, 1100 if dynamic else tokens, *shape, dynamic=dynamic)
    for name, source in kernels(code).items():
        kernel = compiled(source, name, tmp_path)
        assert kernel.metadata.shared <= H200.shared_memory_per_block_optin
        # ptxas keeps a few addresses of large unrolled loops in local memory; accumulators are much more.
        # Rows of 50 elements need a mask for each and have no descriptors.
        assert stack_bytes(kernel, tmp_path) <= (256 if shape[1] == 50 else 80)
        ptx = kernel.asm["ptx"]
        assert "wgmma.mma_async" in ptx or "mma.sync" in ptx
        if shape == (4096, 2048) and (dynamic or tokens == 4096):
            assert "wgmma.mma_async" in ptx and "cp.async.bulk.tensor" in ptx
