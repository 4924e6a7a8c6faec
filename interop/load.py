"""Take published weights in: an ordinary run folder of a model that was trained elsewhere.

python -m interop.load ~/models/gpt2 --out runs/gpt2
python -m interop.load HuggingFaceTB/SmolLM-135M --out runs/smollm
python -m interop.load nanogpt/ckpt.pt --tokenizer-from data/prepared/mine --out runs/ours
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import tyro

from data.command_line import parse_options
from errors import run_command


@dataclass(frozen=True)
class Options:
    """Take published weights in as a run, for sample.py, attention_map.py and --init-from: models
    of GPT-2's and of Llama's shape, and nanoGPT's checkpoints.
    """

    source: tyro.conf.Positional[str]
    """Folder with config.json and safetensors, a safetensors file beside its config.json, a
    checkpoint of nanoGPT, or a model's name on huggingface.co.
    """
    out: str
    """Run folder to write."""
    tokenizer_from: str = ""
    """A run, a prepared folder, a tokenizer.json, byte or gpt2, where the source has no tokenizer;
    empty: the source's own.
    """
    overwrite: bool = False
    """Replace the run in the folder, if it holds one."""


def main() -> int:
    options = parse_options(
        Options, prog="python -m interop.load", config=(tyro.conf.OmitArgPrefixes,)
    )
    from interop.folder import check_free  # only now: torch is slow to import
    from interop.taking import take_in

    check_free(Path(options.out), options.overwrite)
    for line in take_in(options.source, Path(options.out), options.tokenizer_from):
        print(line, file=sys.stderr if line.startswith("note") else sys.stdout)
    return 0


if __name__ == "__main__":
    run_command(main)
