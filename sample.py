"""Continue a prompt with a trained model.

python sample.py runs/shakespeare-char --prompt "To be, or not" python sample.py
runs/shakespeare-char --prompts-file prompts.txt --num-samples 3 --temperature 0.8 --top-k 40
"""

import sys
from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from data.prompts import TextRow, read_prompts
from errors import run_command


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
    temperature: float = 0.8
    """Below 1 likelier tokens gain, above 1 they lose; 0 always takes the likeliest."""
    top_k: int = 0
    """Draw from the k likeliest tokens; 0: from all."""
    top_p: float = 1.0
    """Draw from the fewest likeliest tokens whose probabilities reach p."""
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
        for wrong, message in (
            (len(given) > 1, f"{' and '.join(given)} are given; take one of them"),
            (
                self.max_new_tokens < 0,
                f"max_new_tokens is {self.max_new_tokens}; it must be at least 0",
            ),
            (
                not 0 <= self.temperature < float("inf"),
                f"temperature is {self.temperature}; it must be at least 0",
            ),
            (self.top_k < 0, f"top_k is {self.top_k}; it must be at least 0 (0: no limit)"),
            (not 0 < self.top_p <= 1, f"top_p is {self.top_p}; it must be above 0 and at most 1"),
            (self.num_samples < 1, f"num_samples is {self.num_samples}; it must be at least 1"),
            (
                not 0 <= self.seed < 2**63,
                f"seed is {self.seed}; it must be at least 0 and below 2^63",
            ),
            ("" in self.stop, "a stop string is empty"),
        ):
            if wrong:
                raise ValueError(message)


def main() -> int:
    options = tyro.cli(Options, prog="sample.py")
    prompts = read_prompts(options.prompt, options.prompt_file, options.prompts_file)
    prompts = [prompt for prompt in prompts for _ in range(options.num_samples)]

    import torch

    from data.tokenizer import StreamDecoder
    from model.generate import generate
    from training.checkpoint import open_run
    from training.inference import prepare_for_sampling
    from training.run import first_tokens
    from training.runtime import autocast, best_precision, resolve_device

    device = resolve_device(options.device)
    precision = best_precision(device) if options.precision == "auto" else options.precision
    model, tokenizer, _ = open_run(options.run, device)
    prepare_for_sampling(model, precision)
    ids = [
        [int(token) for token in tokenizer.encode(prompt)] or first_tokens(tokenizer)
        for prompt in prompts
    ]
    limit = model.config.context_length
    if (longest := max(map(len, ids))) > limit:
        kept = f"its last {max(1, limit // 2)} are read"
        print(
            f"note: a prompt has {longest} tokens, the context holds {limit}: {kept}",
            file=sys.stderr,
        )

    rows = [TextRow(StreamDecoder(tokenizer), options.stop) for _ in prompts]
    generators = [torch.Generator().manual_seed(options.seed + index) for index in range(len(rows))]
    if live := len(rows) == 1:  # one text is shown as it is drawn, several one after the other
        print(prompts[0], end="", flush=True)
    with autocast(device, precision):
        drawing = {
            "temperature": options.temperature,
            "top_k": options.top_k,
            "top_p": options.top_p,
        }
        for tokens in generate(
            model, ids, options.max_new_tokens, generators=generators, **drawing
        ):
            for row, token in zip(rows, tokens, strict=True):
                shown = row.push(None if token == tokenizer.separator else token)
                if live:
                    print(shown, end="", flush=True)
            if all(row.done for row in rows):
                break
    for index, (prompt, row) in enumerate(zip(prompts, rows, strict=True)):
        rest = row.push(None)
        print(
            rest
            if live
            else f"{'' if index == 0 else chr(10)}--- {index + 1} of {len(rows)} ---\n{prompt}{row.text}"
        )
    return 0


if __name__ == "__main__":
    run_command(main)
