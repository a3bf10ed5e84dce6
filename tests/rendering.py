"""What Inductor generates for a GPU, on a machine without one: nothing is launched."""

import contextlib
import re
import types
from unittest import mock

import torch
from torch._inductor.runtime.hints import DeviceProperties
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

H200 = types.SimpleNamespace(
    name="NVIDIA H200",
    major=9,
    minor=0,
    multi_processor_count=132,
    total_memory=141 << 30,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    warp_size=32,
    shared_memory_per_block=49152,
    shared_memory_per_block_optin=232448,
    shared_memory_per_multiprocessor=233472,
    L2_cache_size=50 << 20,
    gcnArchName="",
)


class OfflineDriver:
    """Enough of a Triton driver to compile for `capability`."""

    def __init__(self, capability):
        self.capability = capability

    def get_current_target(self):
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self):
        return self.capability  # Triton keeps compiled kernels by device

    def get_current_stream(self, device=None):
        return 0

    def get_device_interface(self):
        return torch.cuda

    def get_active_torch_device(self):
        return torch.device("cuda", 0)


@contextlib.contextmanager
def pretended_h200():
    """Everything that Inductor asks of a machine while it generates code for a GPU."""
    import torch._dynamo.device_interface as interfaces

    cuda = interfaces.CudaInterface
    properties = DeviceProperties(
        type="cuda",
        index=0,
        multi_processor_count=H200.multi_processor_count,
        cc=90,
        major=H200.major,
        regs_per_multiprocessor=H200.regs_per_multiprocessor,
        max_threads_per_multi_processor=H200.max_threads_per_multi_processor,
        warp_size=H200.warp_size,
    )
    answers = {
        "torch.cuda.is_available": True,
        "torch.cuda.device_count": 1,
        "torch.cuda.current_device": 0,
        "torch.cuda.get_device_properties": H200,
        "torch.cuda.get_device_capability": (9, 0),
        "torch.cuda._lazy_init": None,
        "torch.cuda.is_initialized": True,
        "torch.cuda.is_tf32_supported": True,
        "torch.cuda.get_device_name": H200.name,
        "torch._subclasses.fake_tensor.init_gpu_context": None,
        "torch.utils._triton.has_triton": True,  # remembers what the first call found
        "torch._inductor.scheduler.has_triton": True,
    }
    static = {
        (DeviceProperties, "create"): properties,
        (cuda, "get_compute_capability"): 90,
        (cuda, "is_available"): True,
        (cuda, "is_triton_capable"): True,
        (cuda, "raise_if_triton_unavailable"): None,
        (cuda.Worker, "get_device_properties"): H200,
    }
    with contextlib.ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(mock.patch(name, lambda *_, answer=answer, **__: answer, create=True))
        for (owner, name), answer in static.items():
            function = staticmethod(lambda *_, answer=answer, **__: answer)
            stack.enter_context(mock.patch.object(owner, name, function))
        stack.enter_context(mock.patch("torch.version.cuda", "13.0"))
        for name in ("_active", "_default"):
            stack.enter_context(mock.patch.object(driver, name, OfflineDriver(90)))
        yield


def render(function, *shapes, dynamic=False, aot=False):
    """The code of `function` of bf16 CUDA tensors of these shapes.

    `dynamic`: the first size is a symbol. `aot`: lowered as for AOTInductor.
    """
    from torch._dynamo.source import ConstantSource
    from torch._inductor.debug import DebugContext
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V

    shape_env = ShapeEnv()
    mode = FakeTensorMode(shape_env=shape_env, allow_non_fake_inputs=True)
    with pretended_h200():
        sizes = [list(shape) for shape in shapes]
        symbols = []
        if dynamic:
            context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])
            example = torch.empty(shapes[0][0], device="meta")
            tokens = mode.from_tensor(
                example, symbolic_context=context, source=ConstantSource("tokens")
            ).shape[0]
            symbols.append(tokens)
            sizes = [[tokens if size == shapes[0][0] else size for size in shape] for shape in sizes]
        with mode:
            inputs = [torch.empty(size, dtype=torch.bfloat16, device="cuda") for size in sizes]
            module = make_fx(function, decomposition_table=select_decomp_table())(*inputs)
        for symbol in symbols:
            with module.graph.inserting_before(next(iter(module.graph.nodes))):
                module.graph.placeholder("tokens").meta["val"] = symbol
        module.recompile()
        with V.set_fake_mode(mode):
            graph = GraphLowering(module, example_inputs=symbols + inputs, shape_env=shape_env)
            with V.set_graph_handler(graph), V.set_debug_handler(DebugContext()):
                graph.cpp_wrapper = aot
                graph.run(*symbols, *inputs)
                graph.cpp_wrapper = False
                code = graph.codegen()[0]
    return getattr(code, "value", code)


def kernels(code):
    """The Triton kernels of generated code: name -> source."""
    return dict(re.findall(r"async_compile.triton\('(\w+)', '''(.*?)'''", code, re.DOTALL))
