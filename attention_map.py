"""Look at what a run's attention learned, on a text: a page for the browser, pictures, numbers.

python attention_map.py runs/shakespeare-char --text "To be, or not to be" --out page.html
python attention_map.py runs/shakespeare-char --layer 2 --head 1 --out head.svg
"""

import json
import math
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from data.command_line import parse_options
from data.prompts import empty_prompt, read_escapes, start_text
from errors import MachineError, UserError, run_command


@dataclass(frozen=True)
class Options:
    """Look at what a run's attention learned. Layers and heads are counted from 0."""

    run: Annotated[str, tyro.conf.Positional]
    """A run folder or a checkpoint file."""
    text: str = ""
    r"""The text to look at; \n, \t and \\ are read as newline, tab and backslash. Default: what the
    run was watched on while it learned, else what the model writes itself.
    """
    out: str = ""
    """FILE.html, FILE.png or FILE.svg; default: attention.html in the run's folder, of a part
    attention-PART.html there, such as attention-layer-0.html.
    """
    layer: tuple[int, ...] = ()
    """Layers to show; default: all."""
    head: tuple[int, ...] = ()
    """Heads of each of these layers to show; default: all."""
    tokens: str = ""
    """FIRST:END, the range of the text's tokens that the model reads, at most its context; default:
    all of the text.
    """
    show: Literal["maps", "roles", "learning"] = "maps"
    """What a picture shows: maps (a head, a layer, the grid), the table of roles, or loss and roles
    over training.
    """
    json: str = ""
    """Write every head's role scores, entropy and distance profile, and the effect of --ablate, to
    this file.
    """
    ablate: tuple[str, ...] = ()
    """L.H ...: zero the output of these heads, one at a time and all together, and report what the
    loss becomes.
    """
    max_mb: float = 15.0
    """Largest page to write, in megabytes. The model is in it where it fits."""
    recorded: bool = False
    """Leave the model out of the page: it shows this one text."""


def choose_tokens(options: Options, model, tokenizer, probe) -> list[int]:
    """The ids that the model is to read. Raises UserError where a range is wrong or they exceed the
    context.
    """
    if options.text:
        ids = tokenizer.encode(read_escapes(options.text)).tolist()
    elif probe:
        ids = probe.tokens
    else:
        ids = own_text(model, tokenizer)
    first, _, end = (options.tokens or f"0:{len(ids)}").partition(":")
    if not (first.isdecimal() and end.isdecimal() and int(first) < int(end) <= len(ids)):
        raise UserError(
            f"--tokens is {options.tokens!r}; "
            f"it must be FIRST:END, 0 <= FIRST < END <= {len(ids)} (all there are)"
        )
    ids = ids[int(first) : int(end)]
    limit = model.config.context_length
    if len(ids) > limit:
        raise UserError(
            f"{len(ids):,} tokens are to be read, the model reads {limit:,} at once\n"
            f"choose a part of the text, for example --tokens {first}:{int(first) + limit}"
        )
    return ids


def own_text(model, tokenizer) -> list[int]:
    """The ids of a text that the model writes itself, the same each time."""
    import torch

    from model.generate import generate
    from model.sampling import Sampling

    print(f"note: the model writes the text itself, from {start_text(tokenizer)}", file=sys.stderr)
    n_token = min(model.config.context_length, 128)
    generators = [torch.Generator().manual_seed(0)]
    steps = generate(
        model, [empty_prompt(tokenizer)], n_token, Sampling(temperature=0.8), generators
    )
    return [row[0] for row in steps]


def ablate(names: tuple[str, ...], model, checkpoint, ids: list[int]) -> list[dict]:
    """The loss on the text, and on validation data where that is there: of the whole model, then
    without each of the heads named, then without all of them.
    """
    from training.evaluate import split_loss
    from viz.roles import ablate_heads

    heads = [parse_head(name) for name in names]
    texts = ablation_texts(checkpoint, ids)
    groups = [[], *([head] for head in heads)]
    if len(heads) > 1:
        groups.append(heads)
    results = []
    for group in groups:
        with ablate_heads(model, group):
            losses = {name: split_loss(model, tokens, 16, 8) for name, tokens in texts.items()}
        if not all(map(math.isfinite, losses.values())):
            raise FloatingPointError("the model's loss is not finite")
        results.append({"ablated": [f"{layer}.{head}" for layer, head in group], "loss": losses})
        print_ablation(results[-1], results[0]["loss"])
    return results


def parse_head(name: str) -> tuple[int, int]:
    """Layer and head of LAYER.HEAD. Raises UserError where it is something else."""
    layer, _, head = name.partition(".")
    if not (layer.isdecimal() and head.isdecimal()):
        raise UserError(f"--ablate takes LAYER.HEAD, such as 2.1; found {name!r}")
    return int(layer), int(head)


def ablation_texts(checkpoint, ids: list[int]) -> dict:
    """The token ids to measure losses on, by name: the text's, and the validation split's if the
    run's data is there in the same tokens.
    """
    import numpy as np

    from data.dataset import Dataset
    from data.tokenizer import load_tokenizer

    texts = {}
    if len(ids) > 1:
        texts["text"] = np.array(ids)
    folder = Path(checkpoint.config["data"]["data"])
    if (folder / "dataset.json").exists():
        dataset = Dataset(folder)
        if dataset.tokenizer_spec == checkpoint.tokenizer:
            n_ids = load_tokenizer(checkpoint.tokenizer).vocab_size
            dataset.check_content(n_ids, with_digests=False)
            texts["validation"] = dataset.tokens["val"]
    return texts


def print_ablation(result: dict, whole: dict[str, float]) -> None:
    """A line that says what the losses became, and by how much they differ from the `whole`
    model's.
    """
    ablated = " ".join(result["ablated"]) or "ablation"
    losses = [
        f"{name} {loss:.4f} ({loss - whole[name]:+.4f})" for name, loss in result["loss"].items()
    ]
    print(f"loss without {ablated}: {', '.join(losses)}")


def default_out(options: Options, folder: Path) -> Path:
    """What to write in the run's folder where --out doesn't say: a part has a name of its own, so
    that it doesn't take the place of the whole page.
    """
    parts = [] if options.show == "maps" else [options.show]
    for name in ("layer", "head"):
        if numbers := getattr(options, name):
            parts.append("-".join([name, *map(str, numbers)]))
    if options.tokens:
        parts.append("tokens-" + options.tokens.replace(":", "-"))
    suffix = ".html" if options.show == "maps" else ".png"
    return folder / ("-".join(["attention", *parts]) + suffix)


def check_paths(out: Path, json_file: str, show: str, recorded: bool = False) -> None:
    """Raise UserError where something can't be written as named."""
    if out.suffix not in (".html", ".png", ".svg"):
        raise UserError(f"--out is {out}; it must end in .html, .png or .svg")
    if out.suffix != ".html" and recorded:
        raise UserError(f"--recorded is about a page, and --out is the picture {out}: leave it out")
    if out.suffix == ".html" and show != "maps":
        raise UserError(
            f"--show {show} draws a picture: give --out FILE.png or FILE.svg, not {out}"
        )
    for path in [out, Path(json_file)] if json_file else [out]:
        if path.is_dir():
            raise UserError(f"{path} is a folder: name a file in it")
        if not path.parent.is_dir():
            raise UserError(f"there is no folder {path.parent} to write {path.name} to")
    if json_file and Path(json_file).resolve() == out.resolve():
        raise UserError(f"--json and --out both name {out}: give each a name of its own")


def write_text(out: Path, text: str) -> None:
    """Write beside `out` and rename, so that no half file is left. MachineError where it can't be
    written.
    """
    temporary = out.with_name(f"{out.name}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8", newline="\n")
        os.replace(temporary, out)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise MachineError(f"{out} can't be written: {error.strerror}") from None


def draw(folder: Path, out: Path, show: str, shown, measured, watched, curve) -> None:
    """Draw the picture that --show asks for. UserError where there is nothing to draw it from."""
    from viz import figures

    title = folder.resolve().name
    if show == "maps":
        figures.draw_maps(shown, measured, title, out)
    elif show == "roles":
        figures.draw_roles(measured, shown.layers, shown.heads, title, out)
    elif watched:
        figures.draw_learning(watched, curve, title, out)
    else:
        raise UserError(
            f"{folder} holds no snapshots of its training (attention/); "
            "train.py writes them as it goes, unless --probe-tokens is 0"
        )


def write_page(options: Options, out: Path, run: tuple, ids: list[int], *shown) -> None:
    """Write the page, with the model in it where it can be; where it can't, a line says why. `run`
    is its model, tokenizer and checkpoint, `shown` what `render_page` takes up to the curve.
    """
    from viz import living, page

    model, tokenizer, checkpoint = run
    limit = int(options.max_mb * 1e6)
    alive, why = None, ""
    if not options.recorded:
        folder = Path(checkpoint.config["data"]["data"])
        examples = living.example_texts(folder, tokenizer, model.config.context_length)
        try:
            beside = page.beside_numbers()
            alive = living.put_into_page(model, tokenizer, ids, limit, beside, examples)
        except ValueError as error:
            why = f"note: the page shows this one text: {error}"
    write_text(out, page.render_page(*shown, limit, alive))
    if why:
        print(why, file=sys.stderr)


def page_facts(config, step: int, curve: list[tuple[int, float, float]]) -> list[str]:
    """What stands under the page's title."""
    shape = f"{config.n_layer} layers of {config.n_head} heads, width {config.d_model}"
    facts = [f"{shape}, context {config.context_length}", f"step {step:,}"]
    for evaluated, _, val_loss in curve:
        if evaluated == step:
            facts.append(f"validation loss {val_loss:.3f}")
    return facts


def read_curve(path: Path) -> list[tuple[int, float, float]]:
    """Step, training loss and validation loss of every evaluation in a log."""
    from ops.log import read_log

    evaluations = [line for line in read_log(path) if line["kind"] == "eval"]
    return [(line["step"], line["train_loss"], line["val_loss"]) for line in evaluations]


def print_roles(heads: list[dict]) -> None:
    """A line for each role that a head plays: which heads."""
    from viz.roles import ROLES

    for role in (*ROLES, "mixed"):
        found = [f"{head['layer']}.{head['head']}" for head in heads if head["role"] == role]
        if found:
            print(f"  {role}: {' '.join(found)}")


def main() -> int:
    options = parse_options(Options, config=(tyro.conf.OmitArgPrefixes,))
    folder = Path(options.run) if Path(options.run).is_dir() else Path(options.run).parent
    out = Path(options.out) if options.out else default_out(options, folder)
    check_paths(out, options.json, options.show, options.recorded)

    # Only now what is slow to import: --help and mistakes are answered at once.
    from ops.drawing import explained

    with explained(options.run, "have fewer tokens read, with --tokens FIRST:END"):
        look(options, folder, out)
    return 0


def look(options: Options, folder: Path, out: Path) -> None:
    """Read the run and the text, write what was asked for, and name each file written."""
    import torch

    from ops.checkpoint import open_run, what_is_read
    from ops.device import default_threads
    from viz import maps, probe, roles

    # Read the run and the text.
    torch.set_num_threads(default_threads())
    model, tokenizer, checkpoint = open_run(options.run)
    print(what_is_read(options.run, checkpoint), file=sys.stderr)
    watched = probe.load_probe(folder / "attention", tokenizer.decode_bytes)
    curve = read_curve(folder / "log.jsonl")
    ids = choose_tokens(options, model, tokenizer, watched)
    try:
        whole = maps.read_text(model, ids, tokenizer.decode_bytes, must_be_finite=True)
        shown = whole.select(options.layer, options.head)
        ablations = ablate(options.ablate, model, checkpoint, ids) if options.ablate else []
    except ValueError as error:  # a layer or head that isn't there
        raise UserError(str(error)) from None
    measured = roles.measure_roles(shown, roles.induction_scores(model))
    roles.check_finite(measured)

    # Write the page or the picture, then the numbers.
    if out.suffix == ".html":
        title = folder.resolve().name
        facts = page_facts(model.config, checkpoint.step, curve)
        run = (model, tokenizer, checkpoint)
        write_page(options, out, run, ids, shown, measured, title, facts, watched, curve)
    else:
        draw(folder, out, options.show, shown, measured, watched, curve)
    size = f"{len(shown.layers)} layers x {len(shown.heads)} heads x {len(ids):,} tokens"
    print(f"{out}: {size}, {out.stat().st_size / 1e6:.1f} MB")
    report = roles.report(measured, shown.layers, shown.heads)
    print_roles(report["heads"])
    if options.json:
        report["run"] = options.run
        report["step"] = checkpoint.step
        report["n_token"] = len(ids)
        report["ablations"] = ablations
        report["forming"] = watched.forming() if watched else None
        write_text(Path(options.json), json.dumps(report, indent=1) + "\n")
        print(f"{options.json}: roles, entropy and distances of {len(report['heads'])} heads")


if __name__ == "__main__":
    run_command(main)
