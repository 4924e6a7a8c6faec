"""The pictures of docs/tour.md, drawn from the product's own functions.

python -m docs.pictures           # all of them, into docs/pictures/
python -m docs.pictures scale     # one

What a picture shows is computed by a function that the tour and its tests call too, in float64 and
from seeded numbers, so a picture can't tell something else than the text beside it.
"""

import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from configs import PRESETS
from data.tokenizer import CharTokenizer
from model.attention import Mask, attention_scores, softmax
from model.config import ModelConfig
from model.generate import next_distribution
from model.gpt import GPT
from model.positions import RotaryPositions, rotate, sinusoid
from model.sampling import Sampling
from training.optimizer import learning_rate
from viz.figures import make_figure, save_figure

FOLDER = Path(__file__).parent / "pictures"
TEXT = "To be, or not to be"
DEFAULT = PRESETS["shakespeare-char"][1]
LOGITS = [2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -2.0]
"""Of eight tokens, to sample from."""


# --- what is shown ---


def saturation(d_head: int, scaled: bool, n_key: int = 64, n_query: int = 500) -> tuple[float, ...]:
    """(mean of a query's largest weight, mean size of the softmax's gradient) for queries and keys
    of independent normal numbers. The size is the Frobenius norm of the Jacobian
    diag(w) - w w^T of weights w by scores.
    """
    random = torch.Generator().manual_seed(d_head)
    q, k = (
        torch.randn(1, 1, n, d_head, dtype=torch.float64, generator=random)
        for n in (n_query, n_key)
    )
    scores = attention_scores(q, k, Mask(causal=False))[0, 0]
    if not scaled:
        scores = scores * math.sqrt(d_head)
    weights = softmax(scores)
    jacobians = torch.diag_embed(weights) - weights[:, :, None] * weights[:, None, :]
    sizes = jacobians.flatten(1).norm(dim=1)
    return weights.amax(dim=1).mean().item(), sizes.mean().item()


def stream_sizes(n_layer: int, shrink: bool) -> list[float]:
    """Standard deviation of the residual stream of a fresh model before and after each block;
    without `shrink`, what writes to it is as large as all other weights.
    """
    torch.manual_seed(0)
    config = ModelConfig(n_layer=n_layer, n_head=2, d_model=64, context_length=32)
    model = GPT(config, vocab_size=100).double().eval()
    if not shrink:
        for block in model.blocks:
            for project in (block.attention.project, block.mlp.project):
                project.weight.data *= math.sqrt(2 * n_layer)
    sizes = []
    for block in model.blocks:
        block.register_forward_hook(lambda _, inputs, out: sizes.append((inputs[0], out)))
    with torch.no_grad():
        model(torch.randint(100, (4, 32)))
    return [x.std().item() for x in (sizes[0][0], *(after for _, after in sizes))]


def products(n_token: int, d_model: int) -> dict[str, int]:
    """Multiplications of one layer over n tokens, by what grows how: n^2 d for scores and weighted
    sum, n d^2 for the four projections, and the MLP's, four times as wide.
    """
    return {
        "scores and weighted sum, 2 n² d": 2 * n_token**2 * d_model,
        "four projections, 4 n d²": 4 * n_token * d_model**2,
        "MLP, 8 n d²": 8 * n_token * d_model**2,
    }


def kept_bytes(attend: Callable[..., Tensor], n_token: int, n_head: int, d_head: int) -> int:
    """Bytes that attention keeps for the backward pass, beside queries, keys and values."""
    q, k, v = (torch.randn(1, n_head, n_token, d_head, requires_grad=True) for _ in range(3))
    given = {x.untyped_storage().data_ptr() for x in (q, k, v)}
    kept: dict[int, int] = {}

    def keep(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in given:
            kept[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        out = attend(q, k, v, Mask(), 0.0)
    return sum(kept.values()) - kept.get(out.untyped_storage().data_ptr(), 0)


def rotary_scores(n_token: int, d_head: int) -> Tensor:
    """Scores of a query with an equal key 0, 1, 2 ... places before it, by rotation alone:
    (n_token,), float64, 1 where they stand at the same place.
    """
    places = torch.arange(n_token)[None]
    config = ModelConfig(n_head=1, d_model=d_head, positions="rotary")
    cos, sin = RotaryPositions(config).rotation(places)
    same = torch.ones(1, 1, n_token, d_head, dtype=torch.float64)
    turned = rotate(same, cos, sin)[0, 0]
    return turned.flip(0) @ turned[-1] / d_head


# --- pictures ---


def _cells(axis, rows: list[list[str]], labels: list[str]) -> None:
    """Rows of boxes with a word in each, under each other."""
    for y, row in enumerate(rows):
        for x, word in enumerate(row):
            axis.text(x, -y, word, ha="center", va="center", fontsize=9, family="monospace")
            left, right, low, high = x - 0.5, x + 0.5, -y - 0.4, -y + 0.4
            corners = [left, right, right, left, left], [low, low, high, high, low]
            axis.plot(*corners, color="0.75", lw=0.8)
        axis.text(-0.8, -y, labels[y], ha="right", va="center", fontsize=9)
    axis.set(xlim=(-3.5, len(rows[0])), ylim=(-len(rows) + 0.4, 0.6))
    axis.axis("off")


def draw_tokens():
    """A text, its ids, and the ids that are to be predicted."""
    figure, axes = make_figure(7.5, 1.5)
    tokenizer = CharTokenizer("".join(sorted(set(TEXT))))
    ids = tokenizer.encode(TEXT).tolist()
    shown = [character if character != " " else "␣" for character in TEXT]
    rows = [shown[:-1], list(map(str, ids[:-1])), list(map(str, ids[1:])), shown[1:]]
    _cells(axes[0][0], rows, ["text", "inputs", "targets", "to come"])
    return figure


def draw_scale():
    """Saturation and gradient over d_head, with the root and without."""
    figure, axes = make_figure(7.5, 2.8, 1, 2)
    widths = [2**i for i in range(1, 11)]
    for scaled, label in ((True, "with 1/√d"), (False, "without")):
        largest, sizes = zip(*(saturation(width, scaled) for width in widths), strict=True)
        for axis, values in zip(axes[0], (largest, sizes), strict=True):
            axis.plot(widths, values, "o-", ms=3, label=label)
    for axis, title in zip(
        axes[0], ("largest of a query's 64 weights", "size of the softmax's gradient"), strict=True
    ):
        axis.set(xscale="log", xlabel="width of a head", title=title, ylim=(0, None))
        axis.set_xscale("log", base=2)
    axes[0][0].legend(frameon=False)
    return figure


def draw_masks():
    """Who may look at whom: causal, within a window, with padding."""
    masks = {
        "causal": Mask(),
        "causal, window 3": Mask(window=3),
        "5 tokens, then padding": Mask(lengths=(5,)),
    }
    figure, axes = make_figure(7.5, 2.8, 1, 3)
    for axis, (title, mask) in zip(axes[0], masks.items(), strict=True):
        allowed = mask.allowed(8, 8)[0, 0]
        axis.imshow(allowed.float().numpy(), cmap="Blues", vmin=0, vmax=1.6)
        axis.set(title=title, xlabel="key", ylabel="query")
        axis.set_xticks(range(8))
        axis.set_yticks(range(8))
        for t, s in (~allowed).nonzero().tolist():
            axis.text(
                s,
                t,
                "\N{MINUS SIGN}\N{INFINITY}",
                ha="center",
                va="center",
                fontsize=6,
                color="0.5",
            )
    return figure


def draw_positions():
    """The sinusoids, and what rotation makes of a product."""
    figure, axes = make_figure(7.5, 2.8, 1, 2)
    table = sinusoid(torch.arange(64), 64)
    axes[0][0].imshow(table.numpy(), cmap="RdBu", aspect="auto")
    axes[0][0].set(title="sinusoidal positions", xlabel="channel", ylabel="position")
    axes[0][1].plot(rotary_scores(128, 48).numpy())
    axes[0][1].set(title="rotary: product of equal vectors", xlabel="distance in tokens")
    return figure


def draw_stream():
    """The stream's size over depth, with and without smaller weights in what writes to it."""
    figure, axes = make_figure(6.0, 2.8)
    for shrink, label in ((True, "0.02 / √(2 n_layer)"), (False, "0.02")):
        axes[0][0].plot(stream_sizes(48, shrink), label=f"standard deviation {label}")
    axes[0][0].set(title="size of the residual stream at the start", xlabel="blocks passed")
    axes[0][0].set_ylim(0, None)
    axes[0][0].legend(frameon=False)
    return figure


def draw_schedule():
    """The learning rate over the default run, and under the other schedules."""
    figure, axes = make_figure(6.0, 2.5)
    optim = replace(DEFAULT.optim, warmup_steps=100, max_steps=1000)
    for schedule in ("linear", "cosine", "constant"):
        kind = replace(optim, schedule=schedule)
        axes[0][0].plot([learning_rate(step, kind) for step in range(1001)], label=schedule)
    axes[0][0].set(title="learning rate: 100 steps up, then as named", xlabel="step")
    axes[0][0].legend(frameon=False)
    return figure


def draw_cost():
    """Multiplications and kept bytes over the number of tokens, for the default model's width."""
    width, n_head = DEFAULT.model.d_model, DEFAULT.model.n_head
    figure, axes = make_figure(7.5, 3.0, 1, 2)
    counts = [2**i for i in range(5, 14)]
    for name in products(1, width):
        axes[0][0].plot(counts, [products(n, width)[name] for n in counts], label=name)
    axes[0][0].axvline(2 * width, color="0.6", lw=0.8, ls=":")
    axes[0][0].set(title=f"multiplications in a layer, d = {width}", xlabel="tokens")
    axes[0][1].plot(counts, [4 * n_head * n * n / 2**20 for n in counts], label="n² weights")
    row = 4 * n_head * (DEFAULT.model.d_head + 1)
    axes[0][1].plot(counts, [row * n / 2**20 for n in counts], label="output and row sums (fused)")
    axes[0][1].set(title="kept for the backward pass, MiB a layer", xlabel="tokens")
    for axis in axes[0]:
        axis.set(xscale="log", yscale="log")
        axis.set_xscale("log", base=2)
        axis.legend(frameon=False, fontsize=8)
    return figure


def draw_cache():
    """Multiplications for one more token, in the default model's blocks."""
    width, n_layer = DEFAULT.model.d_model, DEFAULT.model.n_layer
    figure, axes = make_figure(6.0, 2.5)
    counts = range(1, DEFAULT.model.context_length + 1)
    anew = [n_layer * sum(products(n, width).values()) / 1e6 for n in counts]
    kept = [n_layer * (12 * width**2 + 2 * n * width) / 1e6 for n in counts]
    axes[0][0].plot(counts, anew, label="all read anew")
    axes[0][0].plot(counts, kept, label="with the cache")
    axes[0][0].set(title="million multiplications for one more token", xlabel="tokens so far")
    axes[0][0].set_yscale("log")
    axes[0][0].legend(frameon=False)
    return figure


def draw_sampling():
    """One row of logits under four settings."""
    settings = {
        "temperature 1": Sampling(),
        "temperature 0.5": Sampling(temperature=0.5),
        "top-k 4": Sampling(top_k=4),
        "top-p 0.7": Sampling(top_p=0.7),
    }
    figure, axes = make_figure(7.5, 2.2, 1, 4)
    for axis, (title, sampling) in zip(axes[0], settings.items(), strict=True):
        kept = next_distribution(torch.tensor([LOGITS]), sampling)[0]
        axis.bar(range(len(LOGITS)), (kept / kept.sum()).numpy())
        axis.set(title=title, ylim=(0, 0.7), xlabel="token")
    return figure


PICTURES = {
    name.removeprefix("draw_"): function
    for name, function in list(globals().items())
    if name.startswith("draw_")
}
"""Name of a picture -> the function that draws it."""


def main(names: list[str]) -> None:
    """Draw the pictures named, or all."""
    FOLDER.mkdir(exist_ok=True)
    for name in names or PICTURES:
        path = FOLDER / f"{name}.svg"
        save_figure(PICTURES[name](), path)
        print(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


if __name__ == "__main__":
    main(sys.argv[1:])
