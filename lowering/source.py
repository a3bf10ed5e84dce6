"""The text of a Triton template: a shell of `templates/` and the device functions that it calls.

The functions are those of which the eager kernels are made: the mathematics exists once.
"""

import re

from triton.runtime.jit import JITFunction

from ..kernels import shared_expert_backward, shared_expert_forward, tiles
from .shells import shell


def template_source(name: str) -> str:
    """The template `name`: macros, kernel, device functions."""
    kernel = shell("tiles") + shell(name)
    functions = "".join(f"\n\n@triton.jit\n{function.src}" for function in _called(kernel))
    return kernel + functions


def _called(text: str) -> list[JITFunction]:
    """The device functions that the text names, and those that they name in turn."""
    available = {
        name: value
        for module in (tiles, shared_expert_forward, shared_expert_backward)
        for name, value in vars(module).items()
        if isinstance(value, JITFunction)
    }
    names, waiting = set(), [text]
    while waiting:
        words = set(re.findall(r"\w+", waiting.pop()))
        waiting += [available[name].src for name in words & available.keys() - names]
        names |= words & available.keys()
    return [function for name, function in available.items() if name in names]
