"""Prints the results tables of the README from JSON files of the benchmarks beside it.

    python examples/benchmarks/table.py examples/benchmarks/results/h200_*.json

Files may hold different baselines: each ratio is of one run. The microseconds are those of the first file (by
name) that has the row.
"""

import json
import sys
from pathlib import Path

PASSES = ("forward", "dx", "forward_dx")
BASELINES = ("eager", "compile", "max-autotune")
FAST, STRICT = "tc-fp32-v1", "fp32-serial-v1"
MOE_DEFAULT, MOE_WIDE = "fp8-k128-k64-v1", "fp8-k128-k128-v1"
MOE_BASELINES = ("grouped_mm", "grouped_mm compiled", "fp8 rowwise")


def table(paths: list[Path]) -> str:
    """Markdown: one line per shape and T."""
    cells: dict[tuple[int, int, int], dict[str, dict]] = {}
    for path in sorted(paths, key=lambda path: "eager" not in path.name):
        for row in json.loads(path.read_text())["rows"]:
            passes = cells.setdefault((row["hidden"], row["intermediate"], row["tokens"]), {})
            entry = passes.setdefault(row["pass"], {**row, "ratio": {}, "ratio_per_layer": {}})
            for key in ("ratio", "ratio_per_layer"):
                entry[key] = row[key] | entry[key]
    titles = ("H x I", "T", "forward", "forward, layers", "dX", "forward + dX", "strict forward + dX")
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for (hidden, intermediate, tokens), passes in cells.items():
        forward, dx, both = (_cell(passes[name], "us", "ratio") for name in PASSES)
        layers = _cell(passes["forward"], "us_per_layer", "ratio_per_layer")
        strict = f"{passes['forward_dx']['us'][STRICT] / 1e3:.2f} ms"
        columns = (f"{hidden} x {intermediate}", str(tokens), forward, layers, dx, both, strict)
        lines.append(f"| {' | '.join(columns)} |")
    return "\n".join(lines)


def _cell(entry: dict, us: str, ratio: str) -> str:
    ratios = [f"{entry[ratio][key]:.2f}" if key in entry[ratio] else "-" for key in BASELINES]
    while len(ratios) > 1 and ratios[-1] == "-":
        ratios.pop()
    return f"{entry[us][FAST]:.1f} us ({' / '.join(ratios)})"


def moe_table(path: Path) -> str:
    """Markdown of one file of `bench_mega_moe.py`: one line per shape and T; "-" where there is no figure."""
    cells: dict[tuple[str, int], dict[str, dict]] = {}
    for row in json.loads(path.read_text())["rows"]:
        cells.setdefault((row["shape"], row["tokens"]), {})[row["pass"]] = row
    titles = ("layer", "T", "forward", "TFLOP/s", "forward, k128-k128", "forward + dX", "memory, MiB")
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for (shape, tokens), passes in cells.items():
        forward, both = passes["forward"], passes["forward_dx"]
        figures = (
            _moe_cell(forward, MOE_DEFAULT, MOE_BASELINES),
            f"{forward['tflops'][MOE_DEFAULT]:.0f}",
            _moe_cell(forward, MOE_WIDE, MOE_BASELINES),
            _moe_cell(both, MOE_DEFAULT, MOE_BASELINES[:2]),
            " / ".join(f"{row['peak_bytes'][MOE_DEFAULT] / 2**20:.1f}" for row in (forward, both)),
        )
        lines.append(f"| {' | '.join((shape, str(tokens), *figures))} |")
    return "\n".join(lines)


def _moe_cell(row: dict, key: str, baselines: tuple[str, ...]) -> str:
    us = row["us"]
    ratios = [f"{us[name] / us[key]:.2f}" if name in us else "-" for name in baselines]
    return f"{us[key]:.1f} us ({' / '.join(ratios)})"


def block_table(path: Path) -> str:
    """Markdown of one file of `bench_compiled_block.py`: one line per pass and T."""
    kinds = ("lowered", "dynamic", "opaque", "plain")
    titles = ("pass", "T", "lowered", "lowered, any T", "opaque", "plain torch", "as called")
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for row in json.loads(path.read_text())["rows"]:
        cells = [f"{row['us'][kind]:.1f} us ({row['kernels'][kind]})" for kind in kinds]
        called = " / ".join(f"{row['us_called'][kind]:.0f}" for kind in kinds)
        name = row["pass"].replace("_dx", " + dX")
        lines.append(f"| {' | '.join((name, str(row['tokens']), *cells, called))} us |")
    return "\n".join(lines)


def render(paths: list[Path]) -> str:
    """The table of the files' benchmark."""
    rows = json.loads(paths[0].read_text())["rows"]
    if "block" in rows[0]:
        return "\n\n".join(map(block_table, paths))
    if any("experts" in row for row in rows):
        return "\n\n".join(map(moe_table, paths))
    return table(paths)


if __name__ == "__main__":
    print(render([Path(name) for name in sys.argv[1:]]))
