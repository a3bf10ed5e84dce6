import pytest
import torch

import moe_ops


def pytest_collection_modifyitems(items):
    """Tests marked `gpu` need a CUDA device."""
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture
def fresh_compiler():
    """A compiler without traces of other tests: no compiled frames, no counters, an empty code cache."""
    from torch._dynamo.utils import counters
    from torch._inductor.utils import fresh_cache

    torch._dynamo.reset()
    counters.clear()
    with fresh_cache():
        yield
    torch._dynamo.reset()


@pytest.fixture
def opaque():
    """Operators are compiled as calls."""
    moe_ops.use_lowerings(False)
    yield
    moe_ops.use_lowerings(True)


@pytest.fixture
def kept_graphs(fresh_compiler):
    """(a compiler backend that runs graphs as they are, the calls of each, one a line: forward, backward)."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    graphs = {}

    def keep(name):
        def compiler(graph_module, example_inputs):
            calls = [str(node.target) for node in graph_module.graph.nodes if node.op == "call_function"]
            graphs[name] = "\n".join(call for call in calls if "getitem" not in call)
            return make_boxed_func(graph_module.forward)

        return compiler

    return aot_autograd(fw_compiler=keep("forward"), bw_compiler=keep("backward")), graphs


@pytest.fixture(params=[1, 2], ids=["threads1", "threads2"])
def threads(request):
    """The intra-op thread count."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture
def fp8_allclose(monkeypatch):
    """`torch.allclose` of fp8 tensors, with which opcheck compares arguments: torch multiplies no fp8."""
    original = torch.allclose

    def allclose(one, other, **options):
        if one.dtype == torch.float8_e4m3fn:
            one, other = one.float(), other.float()
        return original(one, other, **options)

    monkeypatch.setattr(torch, "allclose", allclose)


@pytest.fixture
def nan_memory():
    """Every uninitialised tensor is filled with NaN, so that an unwritten element cannot pass."""
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(before[0])
    torch.utils.deterministic.fill_uninitialized_memory = before[1]
