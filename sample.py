"""Continue a prompt with a trained model.

python sample.py runs/shakespeare-char --prompt "To be, or not"
python sample.py runs/shakespeare-char --prompts-file prompts.txt --num-samples 3 --top-k 40
"""

import sys
from dataclasses import dataclass, field
from typing import Annotated, Literal

import tyro

from data.command_line import parse_options
from data.prompts import Output, TextRow, encode_prompts, note_prompts, read_escapes, read_prompts
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
    prompt: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    r"""Text to continue; may be given several times; empty: start a text. \n, \t and \\ are read as
    newline, tab and backslash, here and in --stop.
    """
    prompt_file: str = ""
    """File whose whole text is the prompt; - reads standard input."""
    prompts_file: str = ""
    """File with a prompt on each line, as it stands."""
    max_new_tokens: int = 500
    """Tokens to add to each prompt."""
    sampling: Sampling = field(default_factory=lambda: Sampling(temperature=0.8))
    stop: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Text at which to end; it is not printed. May be given several times."""
    show_prompt: bool = True
    """Print each prompt before what continues it."""
    num_samples: Annotated[int, tyro.conf.arg(aliases=["-n"])] = 1
    """Continuations of each prompt."""
    seed: int = 1337
    """The first text draws with this seed, the next with seed + 1, and so on."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:N or mps."""
    precision: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Of matrix products. auto: on a CPU float32, in which a text is what it is alone, drawn by
    itself or among others; on a GPU as in training. bfloat16 rounds by the number of texts.
    """

    def __post_init__(self):
        given = [
            f"--{name.replace('_', '-')}"
            for name in ("prompt", "prompt_file", "prompts_file")
            if any(getattr(self, name))
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
    options = parse_options(Options, prog="sample.py", config=(tyro.conf.OmitArgPrefixes,))
    prompts = read_prompts(options.prompt, options.prompt_file, options.prompts_file)
    from ops.drawing import explained  # only now: torch is slow to import

    with explained(options.run):
        draw_texts(options, prompts)
    return 0


def draw_texts(options: Options, prompts: list[str]) -> None:
    """Continue each prompt `num_samples` times, and print the texts."""
    import torch

    from data.tokenizer import StreamDecoder
    from model.generate import generate
    from ops.device import autocast
    from ops.drawing import in_groups, open_to_draw, rows_at_once

    opened = open_to_draw(options.run, options.device, options.precision)
    model, tokenizer, device, precision = opened
    ids = encode_prompts(prompts, tokenizer, options.prompts_file)
    note_prompts(options, prompts, ids, tokenizer, model.config.context_length)
    stops = tuple(map(read_escapes, options.stop))
    output = Output(prompts, options.num_samples, options.show_prompt)

    def draw(group: range) -> None:
        """Continue the prompts of these numbers, each with a generator of its own."""
        rows = [TextRow(StreamDecoder(tokenizer), stops) for _ in group]
        starts = [ids[number // options.num_samples] for number in group]
        generators = [torch.Generator().manual_seed(options.seed + number) for number in group]
        for tokens in generate(model, starts, options.max_new_tokens, options.sampling, generators):
            for row, token in zip(rows, tokens, strict=True):
                row.push(None if token == tokenizer.separator else token)
            output.show(group[0], rows)
            if all(row.done for row in rows):
                break
        for row in rows:
            row.push(None)
        output.show(group[0], rows)

    n_text = len(output.prompts)
    n_row = rows_at_once(n_text, model, ids, options.max_new_tokens, device, precision)
    with autocast(device, precision):
        in_groups(draw, n_text, n_row, device, precision)


if __name__ == "__main__":
    run_command(main)
