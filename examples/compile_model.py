"""A small DeepSeek-V3-style decoder with the MoE layers of moe_ops, eager and compiled, then trained.

    python examples/compile_model.py [TEXT_FILE] [--batch-sizes 1 2 8] [--layers 4] [--steps 20]

Every block after the first has a shared expert (bf16) beside routed experts (fp8) and a router in plain
torch; `model.py` is the model. It reads the bytes of a text file (default: this project's README), runs the
model eagerly and through `torch.compile` at several batch sizes, takes one backward through the frozen
experts to the embeddings, trains everything but the MLPs through the compiled model, and prints what held.
Weights are random; nothing is downloaded. On a machine with a GPU it runs there. The exit status says whether
every bit comparison held and the loss fell.
"""

import argparse
import itertools
import sys
import time
from pathlib import Path

import torch
from model import CONTEXT, EXPERT, Decoder, DenseMLP, MoE, Traffic
from torch import Tensor
from torch._dynamo.utils import counters
from torch.nn import functional as F

import moe_ops
from moe_ops.testing import bit_mismatches, bits_equal

REPLAY_ROWS = (1, 2, 7, 64)
TRAINING_SEQUENCES = 2
LEARNING_RATE = 3e-3


def routed_profile(device: str) -> str:
    """The device's default for fp8 weights, which is Hopper's among GPUs; on others the exact, slow one."""
    try:
        return moe_ops.provenance(device, layer="mega_moe").profile
    except NotImplementedError:
        return f"exact-{moe_ops.profiles(device, 'mega_moe')[0]}"


def read_tokens(path: Path, sequences: int, device: str) -> Tensor:
    """The file's bytes as [sequences, CONTEXT + 1], from the start again where the file is short."""
    data = path.read_bytes()
    if not data:
        raise SystemExit(f"{path} is empty")
    count = sequences * (CONTEXT + 1)
    data = bytes(itertools.islice(itertools.cycle(data), count))
    return torch.tensor(list(data), device=device).view(sequences, CONTEXT + 1)


def replay(function, *rows: Tensor) -> Tensor:
    """`function` over `rows`, [T, ...] each, in small batches of changing size."""
    sizes, left = [], len(rows[0])
    for size in itertools.cycle(REPLAY_ROWS):
        if left == 0:
            break
        sizes.append(min(size, left))
        left -= sizes[-1]
    return torch.cat(
        [function(*parts) for parts in zip(*(value.split(sizes) for value in rows), strict=True)]
    )


def rows_that_differ(function, *rows: Tensor) -> int:
    """How many rows have other bits in small batches than in one batch."""
    return bit_mismatches(replay(function, *rows), function(*rows)).any(1).sum().item()


def replay_counts(moe: MoE, traffic: Traffic) -> tuple[list[int], list[int]]:
    """Rows that differ: the shared expert and its plain twins in bf16 and fp32; the routed experts."""
    shared = [rows_that_differ(moe.shared, traffic.x)]
    for dtype in (torch.bfloat16, torch.float32):
        shared.append(rows_that_differ(plain_twin(moe.shared, dtype), traffic.x.to(dtype)))
    return shared, [rows_that_differ(moe.experts, traffic.x, traffic.index, traffic.weights)]


def plain_twin(expert: moe_ops.SharedExpertMLP, dtype: torch.dtype) -> DenseMLP:
    """A plain MLP of the expert's weights, for contrast."""
    twin = DenseMLP(EXPERT).to(expert.gate_proj.weight.device, dtype)
    twin.load_state_dict(expert.state_dict())
    return twin


def tokens_per_second(function, tokens: Tensor, repeats: int = 5) -> float:
    times = []
    for _ in range(repeats + 1):  # the first one warms up
        _synchronize(tokens)
        start = time.perf_counter()
        function(tokens)
        _synchronize(tokens)
        times.append(time.perf_counter() - start)
    return tokens.numel() / sorted(times[1:])[repeats // 2]


def _synchronize(tokens: Tensor) -> None:
    if tokens.is_cuda:
        torch.cuda.synchronize()


def next_byte_loss(function, tokens: Tensor) -> Tensor:
    logits, _ = function(tokens[:, :-1])
    return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


def embedding_gradient(model: Decoder, function, tokens: Tensor) -> Tensor:
    """One backward of the next-byte loss, through the frozen experts, to the embeddings."""
    model.zero_grad()
    next_byte_loss(function, tokens).backward()
    return model.embedding.weight.grad


def frozen_weights(model: Decoder) -> dict[str, Tensor]:
    return {name: p for name, p in model.named_parameters() if ".shared." in name or ".experts." in name}


def train(model: Decoder, function, tokens: Tensor, steps: int) -> tuple[list[tuple[str, str]], bool]:
    """Lines of the report, and whether the loss fell, the routers moved and no expert weight did."""
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    routers = [p for name, p in parameters.items() if ".router." in name]
    optimizer = torch.optim.AdamW(parameters.values(), lr=LEARNING_RATE, weight_decay=0.0)
    before = [router.detach().clone() for router in routers]
    frozen = frozen_weights(model)
    copies = {name: value.clone() for name, value in frozen.items()}
    losses, gradients = [], []
    for step in range(steps + 1):
        optimizer.zero_grad()
        loss = next_byte_loss(function, tokens)
        losses.append(loss.item())
        if step == steps:
            break
        loss.backward()
        gradients.append([0.0 if p.grad is None else p.grad.float().norm().item() for p in routers])
        optimizer.step()
    moved = [(now - then).abs().max().item() for now, then in zip(routers, before, strict=True)]
    changed = [name for name, value in frozen.items() if not bits_equal(value, copies[name])]
    with_gradient = [name for name, value in frozen.items() if value.grad is not None]
    lines = [
        ("trained", f"{steps} steps of AdamW on {tokens[:, 1:].numel()} bytes, {len(parameters)} tensors"),
        ("next-byte loss", f"{losses[0]:.3f} before, {losses[-1]:.3f} after"),
        ("router gradient", f"norm {_list(gradients[0])} in the first step"),
        ("router weight", f"moved by up to {_list(moved)}"),
        ("expert weights", f"{len(changed)} of {len(frozen)} changed, {len(with_gradient)} got a gradient"),
    ]
    fell = losses[-1] < losses[0] and all(gradients[0]) and all(moved)
    return lines, fell and not changed and not with_gradient


def _list(values: list[float]) -> str:
    return " / ".join(f"{value:.1e}" for value in values)


def log_probabilities(logits: Tensor) -> Tensor:
    return logits.float().log_softmax(-1)


def report(rows: list[tuple[str, str]]) -> None:
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"{name:<{width}}  {value}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    default_text = Path(__file__).resolve().parent.parent / "README.md"
    parser.add_argument(
        "text", nargs="?", type=Path, default=default_text, help="a text file (default: the README)"
    )
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 2, 8], help="sequences per run")
    parser.add_argument("--layers", type=int, default=4, help="blocks, the first of them dense (at least 2)")
    parser.add_argument("--steps", type=int, default=20, help="of training (at least 1)")
    arguments = parser.parse_args()
    if arguments.layers < 2 or min(arguments.batch_sizes) < 1 or arguments.steps < 1:
        parser.error("at least 2 layers, 1 step and batch sizes of at least 1 are needed")
    return arguments


def main() -> int:
    arguments = parse_arguments()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shared = moe_ops.provenance(device)
    routed = moe_ops.provenance(device, profile=routed_profile(device), layer="mega_moe")

    torch.manual_seed(0)
    model = Decoder(arguments.layers, routed.profile).to(device)
    compiled = torch.compile(model, fullgraph=True)
    big = read_tokens(arguments.text, max(arguments.batch_sizes), device)
    inputs = big[:, :-1]

    layer_ok = [[True, True] for _ in model.moes]
    with torch.no_grad():
        for batch in arguments.batch_sizes:
            eager_logits, _ = model(inputs[:batch])
            compiled_logits, traffic = compiled(inputs[:batch])
            for ok, moe, seen in zip(layer_ok, model.moes, traffic, strict=True):
                ok[0] &= bits_equal(moe.shared(seen.x), seen.shared)
                ok[1] &= bits_equal(moe.experts(seen.x, seen.index, seen.weights), seen.routed)
        inference_graphs = counters["stats"]["unique_graphs"]
        compiled_difference = (
            (log_probabilities(compiled_logits) - log_probabilities(eager_logits)).abs().max()
        )

        eager_logits, eager_traffic = model(inputs)
        alone = torch.cat([model(row[None])[0] for row in inputs])
        batch_difference = (log_probabilities(eager_logits) - log_probabilities(alone)).abs().max()
        replayed = [replay_counts(moe, seen) for moe, seen in zip(model.moes, eager_traffic, strict=True)]
        speeds = tokens_per_second(model, inputs), tokens_per_second(compiled, inputs)

    sample = big[:TRAINING_SEQUENCES]
    eager_gradient = embedding_gradient(model, model, sample).clone()
    compiled_gradient = embedding_gradient(model, compiled, sample)
    gradient_norm = eager_gradient.norm()
    gradient_difference = (compiled_gradient - eager_gradient).norm() / gradient_norm
    training_lines, trained = train(model, compiled, sample, arguments.steps)
    training_graphs = counters["stats"]["unique_graphs"] - inference_graphs

    batches = ", ".join(map(str, arguments.batch_sizes))
    report(
        [
            ("device", f"{shared.device} (torch {shared.torch})"),
            ("profile", f"{shared.profile}, backend {shared.backend}"),
            ("routed profile", f"{routed.profile}, backend {routed.backend}"),
            ("text", f"{arguments.text.name}, {inputs.numel()} bytes in the largest batch"),
            ("batch sizes", f"{batches} x {CONTEXT} tokens"),
            ("graph breaks", f"{sum(counters['graph_break'].values())}"),
            ("recompiles", f"{inference_graphs - 1} in inference, {training_graphs - 1} in training"),
        ]
    )
    print()
    print(f"           compiled  rows with other bits when replayed in batches of 1 to {max(REPLAY_ROWS)}")
    print("MoE layer  == eager  shared: ours / plain MLP in bf16 / plain MLP in fp32; routed: ours")
    for index, (oks, layer_counts) in enumerate(zip(layer_ok, replayed, strict=True)):
        for name, ok, counts in zip(("shared", "routed"), oks, layer_counts, strict=True):
            rows = f"{' / '.join(map(str, counts))} of {inputs.numel()}"
            print(f"{index + 1} {name:<7}  {'yes' if ok else 'NO':<8}  {rows}")
    print()
    report(
        [
            (
                "logprobs, batch vs one by one",
                f"differ by up to {batch_difference:.1e} (attention is not ours)",
            ),
            ("logprobs, compiled vs eager", f"differ by up to {compiled_difference:.1e}"),
            (
                "gradient at the embeddings",
                f"norm {gradient_norm:.4f}, compiled differs by {gradient_difference:.1e}",
            ),
            ("tokens/s", f"{speeds[0]:,.0f} eager, {speeds[1]:,.0f} compiled"),
        ]
    )
    print()
    report(training_lines)
    same_bits = all(map(all, layer_ok)) and not any(ours[0] for pair in replayed for ours in pair)
    return 0 if same_bits and trained else 1


if __name__ == "__main__":
    sys.exit(main())
