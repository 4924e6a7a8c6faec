"""Continue a prompt with a trained model.

python sample.py runs/shakespeare-char --prompt "To be, or not" python sample.py
runs/shakespeare-char --prompts-file prompts.txt --num-samples 3 --temperature 0.8 --top-k 40
"""

import sys
from dataclasses import dataclass, field
from typing import Annotated, Literal

import tyro

from data.prompts import TextRow, empty_prompt, read_prompts
from errors import run_command
from model.sampling import Sampling
from ops.other_names import SAMPLING, refuse_other_names


@dataclass(frozen=True)
class Options:
    """Continue a prompt with a trained model. A text ends at a stop string, at the end of a
    document, or after max_new_tokens.
    """

    run: tyro.conf.Positional[str]
    """Run folder (its best.pt, else checkpoint.pt) or checkpoint file."""
    prompt: str = ""
    """Text to continue; empty: start a document."""
    prompt_file: str = ""
    """File whose whole text is the prompt; - reads standard input."""
    prompts_file: str = ""
    """File with a prompt on each line; all are continued in one batch."""
    max_new_tokens: int = 500
    """Tokens to add to each prompt."""
    sampling: Sampling = field(default_factory=lambda: Sampling(temperature=0.8))
    stop: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Text at which to end; it is not printed. May be given several times."""
    num_samples: Annotated[int, tyro.conf.arg(aliases=["-n"])] = 1
    """Continuations of each prompt."""
    seed: int = 1337
    """The first text draws with this seed, the next with seed + 1, and so on."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:N or mps."""
    precision: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Of matrix products. auto: as in training, the fastest that the hardware multiplies
    natively.
    """

    def __post_init__(self):
        given = [
            f"--{name.replace('_', '-')}"
            for name in ("prompt", "prompt_file", "prompts_file")
            if getattr(self, name)
        ]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} are given; take one of them")
        for name, least in (("max_new_tokens", 0), ("num_samples", 1)):
            if (value := getattr(self, name)) < least:
                raise ValueError(f"{name} is {value}; it must be at least {least}")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed is {self.seed}; it must be at least 0 and below 2^63")
        if "" in self.stop:
            raise ValueError("a stop string is empty")


def main() -> int:
    refuse_other_names(sys.argv[1:], SAMPLING)
    options = tyro.cli(Options, prog="sample.py", config=(tyro.conf.OmitArgPrefixes,))
    prompts = read_prompts(options.prompt, options.prompt_file, options.prompts_file)
    prompts = [prompt for prompt in prompts for _ in range(options.num_samples)]

    import torch

    from data.tokenizer import StreamDecoder
    from model.fast_sampling import prepare_for_sampling
    from model.generate import generate
    from ops.checkpoint import open_run, what_is_read
    from ops.device import DTYPES, autocast, best_precision, prefers_slabs, resolve_device

    device = resolve_device(options.device)
    precision = best_precision(device) if options.precision == "auto" else options.precision
    model, tokenizer, checkpoint = open_run(options.run, device)
    print(what_is_read(options.run, checkpoint), file=sys.stderr)
    prepare_for_sampling(model, DTYPES[precision], prefers_slabs(device, precision))
    ids = [tokenizer.encode(prompt).tolist() or empty_prompt(tokenizer) for prompt in prompts]
    note_long_prompts(ids, model.config.context_length)

    rows = [TextRow(StreamDecoder(tokenizer), options.stop) for _ in prompts]
    seeds = range(options.seed, options.seed + len(rows))
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    is_live = len(rows) == 1  # one text is shown as it is drawn, several one after the other
    if is_live:
        print(prompts[0], end="", flush=True)
    with autocast(device, precision):
        steps = generate(model, ids, options.max_new_tokens, options.sampling, generators)
        for tokens in steps:
            for row, token in zip(rows, tokens, strict=True):
                shown = row.push(None if token == tokenizer.separator else token)
                if is_live:
                    print(shown, end="", flush=True)
            if all(row.done for row in rows):
                break
    rests = [row.push(None) for row in rows]
    if is_live:
        print(rests[0])
        return 0
    for index, (prompt, row) in enumerate(zip(prompts, rows, strict=True)):
        between = "\n" if index else ""
        print(f"{between}--- {index + 1} of {len(rows)} ---\n{prompt}{row.text}")
    return 0


def note_long_prompts(ids: list[list[int]], limit: int) -> None:
    """Say so where a prompt is longer than the context of `limit` tokens."""
    longest = max(map(len, ids))
    if longest > limit:
        kept = f"its last {max(1, limit // 2)} are read"
        found = f"a prompt has {longest} tokens, the context holds {limit}"
        print(f"note: {found}: {kept}", file=sys.stderr)


if __name__ == "__main__":
    run_command(main)
