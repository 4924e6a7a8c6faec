"""Tokens per second of sampling, against transformers' `generate` with its cache, and against
reading every weight once a token.

    python -m benchmarks.sample                # 10.7M parameters, 500 tokens
    python -m benchmarks.sample --size 124m    # 128 tokens

GPT-2 architecture, random weights, context 1,024, greedy; the same shape in both programs. Rounds
alternate; the median is shown, and in brackets the least and the largest. On CUDA, where there is
one, the same again. Needs transformers (requirements-dev.txt).
"""

import os
import statistics
import time

import torch

from benchmarks.machine import cpu_precisions, parser, publish, spread
from model.config import ModelConfig
from model.fast_sampling import prepare_for_sampling
from model.generate import generate
from model.gpt import GPT
from model.sampling import Sampling
from ops.device import DTYPES, autocast, prefers_slabs

SIZES = {
    "10.7m": (ModelConfig(n_layer=6, n_head=6, d_model=384), 65, 500),
    "124m": (ModelConfig(), 50257, 128),
}


def ours(
    config: ModelConfig, vocab_size: int, n_token: int, batch: int, precision: str, device: str
):
    """A function that draws n_token tokens for each row of a batch."""
    with torch.device(device):
        model = GPT(config, vocab_size).eval()
    prepare_for_sampling(model, DTYPES[precision], prefers_slabs(device, precision))

    def draw() -> None:
        with autocast(device, precision):
            for _ in generate(model, [[1]] * batch, n_token, Sampling(temperature=0.0)):
                pass

    return draw


def theirs(
    config: ModelConfig, vocab_size: int, n_token: int, batch: int, precision: str, device: str
):
    """The same with transformers."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # before it is imported
    from transformers import GPT2Config, GPT2LMHeadModel, logging

    logging.set_verbosity_error()
    shape = {
        "n_layer": config.n_layer,
        "n_head": config.n_head,
        "n_embd": config.d_model,
        "n_positions": config.context_length,
    }
    options = GPT2Config(vocab_size=vocab_size, bos_token_id=0, eos_token_id=None, **shape)
    with torch.device(device):
        model = GPT2LMHeadModel(options).eval()
    model.to(getattr(torch, precision))
    prompt = torch.ones(batch, 1, dtype=torch.long, device=device)

    def draw() -> None:
        options = {
            "do_sample": False,
            "use_cache": True,
            "pad_token_id": 0,
            "attention_mask": torch.ones_like(prompt),
        }
        model.generate(prompt, min_new_tokens=n_token, max_new_tokens=n_token, **options)

    return draw


def past_the_edge(config: ModelConfig, vocab_size: int, precision: str) -> float:
    """Tokens per second of one row from a full context on, over one whole round of outgrowing it:
    half a context.
    """
    model = GPT(config, vocab_size).eval()
    prepare_for_sampling(model, DTYPES[precision], prefers_slabs("cpu", precision))
    n_token = config.context_length // 2
    with autocast("cpu", precision):
        tokens = generate(
            model, [[1] * config.context_length], n_token + 1, Sampling(temperature=0.0)
        )
        next(tokens)  # reads the prompt
        began = time.perf_counter()
        for _ in tokens:
            pass
    return n_token / (time.perf_counter() - began)


def read_rate(n_bytes: int, device: str = "cpu") -> float:
    """Bytes per second at which the device reads a float32 array of so many bytes."""
    weights = torch.ones(n_bytes // 4, device=device)
    best = float("inf")
    for _ in range(5):
        began = time.perf_counter()
        weights.sum().item()
        best = min(best, time.perf_counter() - began)
    return n_bytes / best


def main() -> None:
    command = parser(__doc__, "sample")
    command.add_argument("--size", choices=SIZES, default="10.7m")
    command.add_argument("--batches", type=int, nargs="*", default=[1, 8, 32])
    command.add_argument("--rounds", type=int, default=3)
    command.add_argument(
        "--tokens", type=int, default=0, help="tokens to draw; default 500, or 128 at 124m"
    )
    arguments = command.parse_args()
    config, vocab_size, n_token = SIZES[arguments.size]
    n_token = arguments.tokens or n_token
    places = [("cpu", precision) for precision in cpu_precisions()]
    places += (
        [("cuda", precision) for precision in ("float32", "bfloat16")]
        if torch.cuda.is_available()
        else []
    )
    rows, record, bounds = [], [], []
    n_weight = sum(p.numel() for p in GPT(config, vocab_size).parameters())
    for batch in arguments.batches:
        programs = {
            (name, *place): make(config, vocab_size, n_token, batch, place[1], place[0])
            for place in places
            for name, make in (("ours", ours), ("transformers", theirs))
        }
        rates: dict[tuple, list[float]] = {key: [] for key in programs}
        for _ in range(arguments.rounds):
            bounds.append(read_rate(4 * n_weight) / 4 / n_weight)
            for key, draw in programs.items():
                began = time.perf_counter()
                draw()
                rates[key].append(batch * n_token / (time.perf_counter() - began))
        middle = {key: statistics.median(values) for key, values in rates.items()}
        for device, precision in places:
            mine, other = (
                middle["ours", device, precision],
                middle["transformers", device, precision],
            )
            exact = middle["transformers", device, "float32"]
            rows.append(
                {
                    "batch": batch,
                    "on": f"{device}, {precision}",
                    "tokens/s": spread(rates["ours", device, precision], ",.0f"),
                    "transformers": spread(rates["transformers", device, precision], ",.0f"),
                    "ratio": f"{mine / other:.2f}",
                    "ratio to its float32": f"{mine / exact:.2f}",
                }
            )
            record.append(
                {
                    "batch": batch,
                    "device": device,
                    "precision": precision,
                    "ours": rates["ours", device, precision],
                    "transformers": rates["transformers", device, precision],
                }
            )
    bound, last = statistics.median(bounds), cpu_precisions()[-1]
    edge = past_the_edge(config, vocab_size, last)
    single = [
        statistics.median(r["ours"]) for r in record if r["batch"] == 1 and r["device"] == "cpu"
    ]
    notes = [
        f"Reading the {n_weight:,} weights once a token in float32, at "
        f"{bound * n_weight / 2.5e8:.1f} GB/s, allows {bound:,.0f} "
        "tokens/s"
        + (f"; one prompt reaches {max(single) / bound:.0%} of that." if single else "."),
        f"Past the context's edge: {edge:,.0f} tokens/s on average in {last}. After "
        f"{config.context_length // 2:,} tokens each "
        "the last half of the context is read anew, in one pass, as its positions have changed; "
        "the rest goes through the cache.",
        *(
            []
            if torch.cuda.is_available()
            else ["GPU: none at hand, so nothing was measured on one."]
        ),
    ]
    size = f"{n_weight / 1e6:.1f}M parameters, context {config.context_length:,}"
    title = f"Sampling {n_token} tokens, {size}"
    publish(
        arguments.out.with_name(f"{arguments.out.name}-{arguments.size}"),
        {title: rows},
        {"rates": record, "bound": bound, "edge": edge},
        "\n\n".join(notes),
    )


if __name__ == "__main__":
    main()
