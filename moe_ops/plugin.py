"""What makes the operators part of Inductor: their lowerings, and caches that know the sources.

Importing moe_ops imports nothing of Inductor. Every fake calls `install`, and fakes run before Inductor
lowers a graph: once Inductor is loaded, the lowerings are registered, in time for the first compile.
"""

import hashlib
import importlib.util
import logging
import re
import sys
import threading
from pathlib import Path

import torch

_LOG = logging.getLogger("moe_ops")
_LOCK = threading.Lock()
_TAG = re.compile(r";?moe_ops=\w+")
_state = {"installed": False, "enabled": True}


def install() -> None:
    """Register the lowerings if Inductor is loaded, and see that the caches know them; cheap when done."""
    tag_caches()  # also before Inductor is loaded: AOTAutograd asks its cache first
    if _state["installed"] or "torch._inductor.graph" not in sys.modules:
        return
    with _LOCK:
        if _state["installed"]:
            return
        try:
            from .lowering import shared_expert
        except ImportError as error:  # another torch moved what the lowerings are made of
            _LOG.warning(
                "moe_ops compiles as opaque calls: no lowerings for torch %s (%s)", torch.__version__, error
            )
        else:
            shared_expert.register(lambda: _state["enabled"])
        _state["installed"] = True


def use_lowerings(enabled: bool) -> None:
    """Whether what is compiled from now on uses the lowerings (the default) or calls the operators.

    The bits are the same. What is compiled already stays as it is: `torch.compiler.reset()` forgets it.
    """
    _state["enabled"] = enabled
    tag_caches()


def tag_caches() -> None:
    """Have the digest of the sources in `torch.compiler.config.cache_key_tag`, beside the user's own value.

    The caches of Inductor and AOTAutograd key a graph by what is in it, which for an operator is its name.
    Without the tag they return what an earlier version of a kernel or a lowering made of it.
    """
    config = torch.compiler.config
    tag = f"moe_ops={DIGEST}{'' if _state['enabled'] else '_opaque'}"
    users = _TAG.sub("", config.cache_key_tag)
    wanted = f"{users};{tag}" if users else tag
    if config.cache_key_tag != wanted:
        config.cache_key_tag = wanted


def _digest() -> str:
    """Of every source file of the package, by name and content."""
    folders = [("", Path(__file__).parent)]
    for name in ("kernels", "lowering"):  # beside this package in a checkout, inside it where it is installed
        places = importlib.util.find_spec(f"{__package__}.{name}").submodule_search_locations
        folders += [(name, Path(place)) for place in sorted(set(places))]
    total = hashlib.sha256()
    for name, folder in folders:
        for path in sorted(folder.rglob("*")):
            if path.suffix in (".py", ".jinja"):
                total.update(f"{name}/{path.relative_to(folder)}\0".encode())
                total.update(path.read_bytes() + b"\0")
    return total.hexdigest()[:16]


DIGEST = _digest()
"""Of the sources that this process imported."""
