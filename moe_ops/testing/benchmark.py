"""A benchmark harness for CUDA: graphs in rotated order after a flush of L2, medians, peak memory."""

from collections.abc import Callable, Mapping
from importlib import metadata
from typing import NamedTuple

import torch

_FLUSH_BYTES = 256 << 20  # several times the L2 of any GPU


class Card(NamedTuple):
    """Where figures come from. All of them go into a report."""

    device: str
    torch: str
    triton: str
    cuda: str


def card() -> Card:
    """The current CUDA device and the versions that matter."""
    return Card(
        torch.cuda.get_device_name(), torch.__version__, metadata.version("triton"), torch.version.cuda
    )


def capture(function: Callable[[], object], warmups: int = 3) -> torch.cuda.CUDAGraph:
    """A CUDA graph of `function`, after `warmups` calls that compile and tune what it needs."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(warmups):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph


def time_graphs(
    graphs: Mapping[str, torch.cuda.CUDAGraph], *, flush: bool = True, repeats: int = 21
) -> dict[str, float]:
    """Microseconds of one replay of each graph, the median of `repeats`.

    Every repeat replays all graphs, each time in another order, so that a drift of the clocks hits all alike.

    Args:
        graphs: by name.
        flush: whether to overwrite L2 before each replay. The flush leaves dirty lines whose write-back
            competes with small kernels; a graph of several layers with different weights is the other way to
            keep the weights out of L2.
        repeats: how often.
    """
    buffer = torch.empty(_FLUSH_BYTES if flush else 0, dtype=torch.uint8, device="cuda")
    names = list(graphs)
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in names}
    for graph in graphs.values():
        graph.replay()
    for repeat in range(repeats):
        shift = repeat % len(names)
        for name in names[shift:] + names[:shift]:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            buffer.zero_()
            start.record()
            graphs[name].replay()
            end.record()
            events[name].append((start, end))
    torch.cuda.synchronize()
    return {
        name: sorted(start.elapsed_time(end) for start, end in pairs)[repeats // 2] * 1e3
        for name, pairs in events.items()
    }


def peak_bytes(function: Callable[[], object]) -> int:
    """Bytes that `function` asks the allocator for at its peak, beyond what was allocated before."""
    function()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    torch.cuda.reset_peak_memory_stats()
    function()
    return torch.cuda.memory_stats()["requested_bytes.all.peak"] - before
