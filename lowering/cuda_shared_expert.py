"""The shared expert as four Triton templates, built from the device functions of the eager kernels.

The last product of each pass ends in `store_output`, into which Inductor fuses what follows: a residual, the
routed experts, a scale, a gate per token. What it sees there is rounded to bf16 already, as in eager.
"""

import sympy
import torch
from torch._inductor import ir
from torch._inductor.lowering import empty_strided
from torch._inductor.select_algorithm import SymbolicGridFn, realize_inputs
from torch._inductor.virtualized import V

from ..kernels import template_configs
from ..kernels.launch import device_facts
from .inductor import Template, select, tunes
from .source import template_source


@SymbolicGridFn
def _programs(rows, columns, meta):
    """Persistent kernels: the number of programs does not depend on the sizes."""
    return (meta["PROGRAMS"], 1, 1)


_GATE_UP, _DOWN, _SWIGLU_BACKWARD, _DX = (
    Template(name=f"moe_ops_{name}", grid=_programs, source=template_source(name))
    for name in (
        "shared_expert_gate_up",
        "shared_expert_down",
        "shared_expert_swiglu_backward",
        "shared_expert_dx",
    )
)


def forward(x, w_gate, w_up, w_down, limit, *, save):
    """(y, g, u): [T, H] bf16 and, with `save`, the pre-activations [T, I] fp32, else `None`.

    Args:
        x: [T, H]. w_gate, w_up: [I, H]. w_down: [H, I]. All bf16 `TensorBox`es, any strides.
        limit: `swiglu_limit`.
        save: whether to return g and u.
    """
    x, (w_gate, w_up, w_down) = _operand(x), map(_weight, (w_gate, w_up, w_down))
    tokens, (intermediate, hidden) = x.get_size()[0], _numbers(w_gate.get_size())
    saved = []
    if save:
        saved = [_empty(x, (tokens, intermediate), torch.float32) for _ in range(2)]
    h = _call(
        _GATE_UP,
        "gate_up",
        [x, w_gate, w_up, *saved],
        (tokens, intermediate),
        tma=[x, w_gate, w_up],
        mutated=saved,
        SAVE=save,
        LIMIT=limit,
    )
    h = _operand(h)
    y = _call(_DOWN, "down", [h, w_down], (tokens, hidden), tma=[h, w_down])
    return y, *(saved or (None, None))


def dx(dy, x, saved, w_gate, w_up, w_down, limit, out_dtype):
    """The gradient of x, [T, H] in `out_dtype`, fp32 or bf16.

    Args:
        dy: [T, H] bf16.
        x: as for the forward, to compute g and u again, or `None`.
        saved: (g, u), [T, I] fp32, where x is `None`.
        w_gate, w_up, w_down, limit: as for the forward.
    """
    dy, (w_gate, w_up, w_down) = _operand(dy), map(_weight, (w_gate, w_up, w_down))
    tokens, (intermediate, hidden) = dy.get_size()[0], _numbers(w_gate.get_size())
    recompute = saved is None
    products = [dy, w_down] + ([_operand(x), w_gate, w_up] if recompute else [])
    dz = _call(
        _SWIGLU_BACKWARD,
        "swiglu_backward_recompute" if recompute else "swiglu_backward",
        products if recompute else products + [_operand(value) for value in saved],
        (tokens, 2 * intermediate),
        columns=intermediate,
        tma=products,
        RECOMPUTE=recompute,
        LIMIT=limit,
    )
    dz = _operand(dz)
    return _call(
        _DX,
        "dx",
        [dz, w_gate, w_up],
        (tokens, hidden),
        dtype=out_dtype,
        tma=[dz, w_gate, w_up],
        # The up half of dz starts at column I.
        has_layout=intermediate % 8 == 0,
        ROUND=out_dtype == torch.bfloat16,
    )


def _call(
    template,
    family,
    inputs,
    size,
    *,
    tma,
    columns=None,
    dtype=torch.bfloat16,
    has_layout=True,
    mutated=(),
    **meta,
):
    """The template's output, [size] in `dtype`: one choice, or several candidates under `max-autotune`."""
    layout = ir.FixedLayout(inputs[0].get_device(), dtype, list(size))
    columns = size[1] if columns is None else columns
    facts = device_facts(layout.device)
    # AOTInductor allocates the memory in which a kernel makes its descriptors for one program, not for all.
    has_layout = has_layout and not V.graph.cpp_wrapper and all(map(_has_tma_layout, tma))
    choices = []
    for tiles in _alternatives(family, facts, size[0], columns, tma=has_layout, tuning=not mutated):
        error = template.maybe_append_choice(
            choices,
            input_nodes=tuple(inputs),
            layout=layout,
            num_stages=tiles[0].num_stages,
            num_warps=tiles[0].num_warps,
            mutated_inputs=list(mutated) or None,
            PROGRAMS=_program_count(tiles, facts, size[0], columns),
            TILES=tuple(_constants(tile) for tile in tiles),
            **meta,
        )
        if error is not None:
            raise error
    return select(template.name, choices, inputs, layout)


def _alternatives(family, facts, rows, columns, *, tma, tuning):
    """Each entry is one kernel, given by the tiles among which it chooses at run time.

    For a static T the one tile chosen by rule, or under `max-autotune` all that fit. For a dynamic T one
    kernel that chooses by the number of tokens at hand, by the same rule, as no benchmark of one T could.
    """
    if not _is_number(rows):
        return [template_configs.dynamic_tiles(family, facts, tma=tma)]
    if tunes() and tuning:
        return [[tile] for tile in template_configs.static_candidates(family, facts, int(rows), tma=tma)]
    return [[template_configs.static_tile(family, facts, int(rows), int(columns), tma=tma)]]


def _program_count(tiles, facts, rows, columns):
    if _is_number(rows):
        return tiles[0].grid(facts, int(rows), int(columns))[0]
    return facts.multiprocessors * tiles[0].blocks


def _constants(tile):
    """A tile as the templates take it (`templates/tiles.jinja`)."""
    cost = round(100 * tile.cost)
    return (tile.block_m, tile.block_n, tile.block_k, tile.group_m, tile.num_stages, tile.tma, cost)


def _operand(value):
    """In memory, with strides that are final: a kernel reads it."""
    value = realize_inputs(value)
    if isinstance(value.get_layout(), ir.FlexibleLayout):
        value = ir.ExternKernel.require_contiguous(value)
    return value


def _weight(value):
    """As `_operand`, with numbers for sizes and strides: unknown ones allow neither wide loads nor TMA."""
    value = _operand(value)
    _numbers([*value.get_size(), *value.get_stride()])
    return value


def _numbers(sizes):
    """Guards on them where they are symbols."""
    return V.graph.sizevars.guard_int_seq(sizes)


def _has_tma_layout(operand):
    """As `Operand.has_tma_layout` of the eager kernels, by what is known while compiling."""
    known = V.graph.sizevars
    layout = operand.get_layout()
    row_stride, column_stride = layout.stride
    elements = 16 // layout.dtype.itemsize
    return (
        operand.get_name() not in V.graph.unaligned_buffers
        and known.statically_known_equals(column_stride, 1)
        and known.statically_known_geq(row_stride, layout.size[1])
        and known.statically_known_multiple_of(row_stride, elements)
        and known.statically_known_multiple_of(layout.offset, elements)
    )


def _empty(like, size, dtype):
    value = empty_strided(list(size), None, dtype=dtype, device=like.get_device())
    value.realize()
    return value


def _is_number(size):
    return isinstance(size, int) or (isinstance(size, sympy.Expr) and size.is_number)
