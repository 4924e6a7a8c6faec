"""The causal mask left out."""

import math
from dataclasses import replace

import torch
from torch import Tensor

from benchmarks.experiments.common import (
    SMALL,
    Experiment,
    Finding,
    Setting,
    corpus_batch,
    curves,
    is_below,
    judge,
    late,
    train,
)
from benchmarks.tables import spread
from data.prompts import empty_prompt
from model.attention import Mask
from model.fast_attention import fast_attention
from model.generate import generate
from model.gpt import GPT
from model.sampling import Sampling
from training.loss import cross_entropy


def look_ahead(q: Tensor, k: Tensor, v: Tensor, mask: Mask, dropout: float = 0.0) -> Tensor:
    """Attention whose mask was forgotten."""
    return fast_attention(q, k, v, replace(mask, causal=False), dropout)


@torch.no_grad()
def honest_loss(model: GPT, tokens, n_text: int = 512) -> float:
    """Loss of the next token behind a text: the one that the model has not been given, nats."""
    length = model.config.context_length // 2
    starts = torch.arange(n_text) * ((len(tokens) - length - 1) // n_text)
    rows = torch.stack(
        [torch.from_numpy(tokens[s : s + length + 1].astype("int64")) for s in starts.tolist()]
    )
    return cross_entropy(model(rows[:, :-1])[:, -1:], rows[:, -1:]).item()


def sample(model: GPT, setting: Setting) -> str:
    """60 characters in a line."""
    tokenizer = setting.tokenizer
    random = torch.Generator().manual_seed(1)
    steps = generate(
        model, [empty_prompt(tokenizer)], 60, Sampling(temperature=0.8), [random], use_cache=False
    )
    return repr(tokenizer.decode(row[0] for row in steps))


def run(setting: Setting) -> Finding:
    """Training loss, and loss where the next token is really unknown, with the mask and without."""
    ways = {"with the mask": fast_attention, "without": look_ahead}
    found: dict[str, dict[str, list]] = {}
    for name, attend in ways.items():
        each: dict[str, list] = {"training": [], "unknown": [], "curves": [], "samples": []}
        for seed in setting.seeds:
            batch_of = corpus_batch(setting, SMALL, seed)
            model, losses = train(
                SMALL, setting.tokenizer.vocab_size, batch_of, setting, seed, attend
            )
            each["training"].append(late(losses))
            each["unknown"].append(honest_loss(model, setting.tokens["val"]))
            each["curves"].append(losses)
            each["samples"].append(sample(model, setting))
        found[name] = each
    causal, blind = found.values()
    guess = math.log(setting.tokenizer.vocab_size)
    verdict = judge(
        [
            ("training loss below", *is_below(blind["training"], causal["training"])),
            ("next token worse", *is_below(causal["unknown"], blind["unknown"])),
        ]
    )
    rows = [
        {
            "variant": name,
            "training loss": spread(each["training"], ".3f"),
            "loss of a token not given": spread(each["unknown"], ".3f"),
        }
        for name, each in found.items()
    ]
    notes = "\n".join(f"sample {name}: {each['samples'][0]}" for name, each in found.items())
    notes += f"\nguessing blindly: ln {setting.tokenizer.vocab_size} = {guess:.3f}"

    def draw(axes) -> None:
        steps = range(len(causal["curves"][0]))
        curves(axes, steps, {n: each["curves"] for n, each in found.items()}, "training loss")
        axes.set_xlabel("step")

    return Finding(rows, found, verdict, draw, notes)


EXPERIMENT = Experiment(
    "mask",
    "the causal mask left out in training",
    "Without the mask the training loss falls far lower, and what is learned is worthless where "
    "the next token is not given: each position copies it from its neighbour.",
    run,
)
