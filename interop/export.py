"""Give a run out as transformers, vLLM and llama.cpp read models.

python -m interop.export runs/shakespeare-char --out exported/shakespeare-char
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from data.command_line import parse_options
from errors import run_command


@dataclass(frozen=True)
class Options:
    """Give a run out in Hugging Face's files, in GPT-2's format or Llama's: config.json,
    model.safetensors, tokenizer.json, generation_config.json.
    """

    run: tyro.conf.Positional[str]
    """Run folder (its best.pt, else checkpoint.pt) or checkpoint file."""
    out: str
    """Folder to write."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Of the weights written; the run's own are float32."""
    overwrite: bool = False
    """Replace the files in the folder, if it holds any."""


def main() -> int:
    options = parse_options(
        Options, prog="python -m interop.export", config=(tyro.conf.OmitArgPrefixes,)
    )
    from interop.folder import check_free  # only now: torch is slow to import
    from interop.giving import give_out

    check_free(Path(options.out), options.overwrite)
    print(give_out(options.run, Path(options.out), options.dtype))
    return 0


if __name__ == "__main__":
    run_command(main)
