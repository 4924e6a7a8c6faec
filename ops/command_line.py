"""train.py's command line: a preset or a run's config.json, varied field by field.

Imports no torch, so that --help is instant.
"""

import dataclasses
import difflib
from pathlib import Path

import tyro

from configs import PRESETS, Config, read_config
from data.command_line import parse_options
from data.names import CORPORA, TOKENIZERS
from errors import UserError
from ops.other_names import TRAINING, refuse_other_names, refuse_other_values


def list_presets() -> str:
    """The presets, a line each, and how to use one."""
    width = max(map(len, PRESETS))
    lines = [f"  {name:{width}}  {description}" for name, (description, _) in PRESETS.items()]
    lines = ["usage: python train.py PRESET [--field value ...]", "", "presets:", *lines, ""]
    lines += [
        "  or the config.json of a run, to repeat or vary it",
        "",
        "options of a preset: python train.py PRESET --help",
    ]
    return "\n".join(lines)


def parse(arguments: list[str]) -> Config | None:
    """The configuration that the arguments describe; None where there are none and the presets are
    to be listed.

    Raises UserError for a preset that doesn't exist; tyro itself exits with code 2 for an option or
    value that doesn't.
    """
    if not arguments or arguments[0] in ("-h", "--help"):
        return None
    name, *rest = arguments
    path = Path(name)
    if name in PRESETS:
        config = PRESETS[name][1]
        out = f"runs/{name}"
    elif name.endswith(".json") or path.is_file():
        config = read_config(name)
        out = f"runs/{path.stem}"
        if holds_a_run(path.parent):
            config = config.replace(out="")
            out = str(path.parent)
    elif (path / "config.json").is_file():
        config = read_config(path / "config.json").replace(out="")
        out = name  # the folder named is the run, wherever it was when it began
    else:
        close = difflib.get_close_matches(name, PRESETS, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        if name.startswith("-"):
            hint = "a preset comes first, then its options; "
        raise UserError(
            f"there is no preset or config.json {name!r}: {hint}presets are {', '.join(PRESETS)}"
        )
    refuse_other_names(rest, TRAINING)
    refuse_other_values(rest, [type(getattr(config, f.name)) for f in dataclasses.fields(config)])
    flat = (tyro.conf.OmitArgPrefixes,)
    config = parse_options(
        Config, rest, prog=f"train.py {name}", description=" ", default=config, config=flat
    )
    return config if config.run.out else config.replace(out=out)


def holds_a_run(folder: Path) -> bool:
    """Whether a folder is a run's, wherever it lay when the run began."""
    return any((folder / name).exists() for name in ("checkpoint.pt", "best.pt", "log.jsonl"))


def preparing_command(folder: str) -> str:
    """The command that prepares the data folder a preset names: data/prepared/CORPUS-TOKENIZER."""
    corpus, _, tokenizer = Path(folder).name.rpartition("-")
    if Path(folder).parent != Path("data/prepared") or tokenizer not in TOKENIZERS:
        return f"python -m data.prepare YOUR_TEXT.txt --out {folder}"
    if corpus not in CORPORA:
        return f"python -m data.prepare YOUR_TEXT --tokenizer {tokenizer} --out {folder}"
    return f"python -m data.prepare {corpus} --tokenizer {tokenizer}"


def check_data(config: Config) -> None:
    """Raise UserError, with the command that mends it, where the data isn't prepared."""
    folder = config.data.data
    if not Path(folder, "dataset.json").exists():
        advice = ". Run this first"
        if config.run.resume:  # prepared anew, it may not be what the run was trained on
            advice = " here. If it lies elsewhere, name it with --data; if not, run this first"
        raise UserError(f"{folder} isn't prepared{advice}:\n  {preparing_command(folder)}")
