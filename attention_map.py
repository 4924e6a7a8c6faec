"""Look at what a run's attention learned, on a text: a page for the browser, pictures, numbers.

    python attention_map.py runs/shakespeare-char --text "To be, or not to be" --out page.html
    python attention_map.py runs/shakespeare-char --layer 2 --head 1 --out head.svg
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from errors import UserError, run_command


@dataclass(frozen=True)
class Options:
    """Look at what a run's attention learned: a page for the browser (.html), pictures (.png, .svg), numbers (--json).

    Layers and heads are counted from 0.
    """

    run: Annotated[str, tyro.conf.Positional]
    """A run folder or a checkpoint file."""
    text: str = ""
    """The text to look at. Without it: the text on which the run was watched while it trained, else one the model writes itself."""
    text_file: str = ""
    """A UTF-8 file with the text to look at."""
    out: str = ""
    """FILE.html, FILE.png or FILE.svg; default: attention.html in the run's folder."""
    layer: tuple[int, ...] = ()
    """Layers to show; default: all."""
    head: tuple[int, ...] = ()
    """Heads of each of these layers to show; default: all."""
    tokens: str = ""
    """FIRST:END, the range of the text's tokens that the model reads, at most its context; default: all of the text."""
    show: Literal["maps", "roles", "learning"] = "maps"
    """What a picture shows: maps (a head, a layer, the grid), the table of roles, or loss and roles over training."""
    json: str = ""
    """Write every head's role scores, entropy and distance profile, and the effect of --ablate, to this file."""
    ablate: tuple[str, ...] = ()
    """L.H ...: zero the output of these heads, one at a time and all together, and report the loss."""
    max_mb: float = 15.0
    """Largest page to write, in megabytes."""


def _choose_text(options: Options, model, tokenizer, probe) -> list[int]:
    """Token ids to look at. Raises UserError where there are none or more than the model can read."""
    from model.generate import generate

    text = options.text
    if options.text and options.text_file:
        raise UserError("--text and --text-file are both given: choose one")
    if options.text_file:
        try:
            text = Path(options.text_file).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{options.text_file} can't be read as UTF-8 text: {error}") from None
    limit = model.config.context_length
    if text:
        ids = tokenizer.encode(text).tolist()
    elif options.text_file:
        raise UserError(f"{options.text_file} is empty: nothing to look at")
    elif probe:
        ids = probe.tokens
    else:
        import torch

        start = [0] if tokenizer.separator is None else [tokenizer.separator]
        drawn = generate(model, [start], min(limit, 128), temperature=0.8, generators=[torch.Generator().manual_seed(0)])
        ids = [row[0] for row in drawn]
    if options.tokens:
        first, _, end = options.tokens.partition(":")
        if not (first.isdigit() and end.isdigit() and int(first) < int(end) <= len(ids)):
            raise UserError(f"--tokens is {options.tokens!r}; it must be FIRST:END with 0 <= FIRST < END <= {len(ids)}, the text's tokens")
        ids = ids[int(first) : int(end)]
    if len(ids) > limit:
        raise UserError(
            f"the text is {len(ids):,} tokens long, the model reads {limit:,} at once\n"
            f"choose a part of it, for example --tokens 0:{limit}"
        )
    return ids


def _ablate(options: Options, model, checkpoint, ids: list[int]) -> list[dict]:
    """The loss on the text and on validation data, whole and without the heads named, one by one and together."""
    import numpy as np

    from data.batches import Dataset
    from training.evaluate import split_loss
    from viz.roles import ablate_heads

    heads = []
    for name in options.ablate:
        layer, _, head = name.partition(".")
        if not (layer.isdigit() and head.isdigit()):
            raise UserError(f"--ablate takes LAYER.HEAD, such as 2.1; found {name!r}")
        heads.append((int(layer), int(head)))
    texts = {"text": np.array(ids)} if len(ids) > 1 else {}
    folder = Path(checkpoint.config["data"]["data"])
    if (folder / "dataset.json").exists():
        dataset = Dataset(folder)
        if dataset.tokenizer_spec == checkpoint.tokenizer:  # else its ids mean something else
            texts["val"] = dataset.tokens["val"]
    results = []
    for group in [[], *([head] for head in heads), *([heads] if len(heads) > 1 else [])]:
        try:
            with ablate_heads(model, group):
                losses = {name: split_loss(model, tokens, 16, 8) for name, tokens in texts.items()}
        except ValueError as error:
            raise UserError(str(error)) from None
        results.append({"ablated": [f"{layer}.{head}" for layer, head in group], "loss": losses})
        change = [f"{name} {loss:.4f} ({loss - results[0]['loss'][name]:+.4f})" for name, loss in losses.items()]
        print(f"loss without {' '.join(results[-1]['ablated']) or 'any ablation'}: {', '.join(change)}")
    return results


def main() -> int:
    options = tyro.cli(Options, config=(tyro.conf.OmitArgPrefixes,))
    folder = Path(options.run) if Path(options.run).is_dir() else Path(options.run).parent
    out = Path(options.out) if options.out else folder / "attention.html"
    if out.suffix not in (".html", ".png", ".svg"):
        raise UserError(f"--out {out} must end in .html, .png or .svg")
    for path in filter(None, (out, options.json and Path(options.json))):
        if not path.parent.is_dir():
            raise UserError(f"there is no folder {path.parent} to write {path.name} to")

    from training.checkpoint import open_run
    from training.log import read_log
    from viz import figures, maps, page, probe, roles

    model, tokenizer, checkpoint = open_run(options.run)
    watched = probe.load_probe(folder / "attention")
    ids = _choose_text(options, model, tokenizer, watched)
    try:
        shown = maps.read_text(model, ids, tokenizer.decode_bytes).select(options.layer, options.head)
    except ValueError as error:
        raise UserError(str(error)) from None
    measured = roles.measure_roles(shown, roles.induction_scores(model))
    evaluations = [line for line in read_log(folder / "log.jsonl") if line["kind"] == "eval"]
    learning = None
    if watched:
        pieces = [tokenizer.decode_bytes([i]) for i in watched.tokens]
        learning = page.Learning(watched, pieces, [(line["step"], line["train_loss"], line["val_loss"]) for line in evaluations])
    title = folder.resolve().name
    if out.suffix == ".html":
        c = model.config
        facts = [f"{c.n_layer} layers of {c.n_head} heads, width {c.d_model}, context {c.context_length}", f"step {checkpoint.step:,}"]
        facts += [f"validation loss {line['val_loss']:.3f}" for line in evaluations if line["step"] == checkpoint.step]
        text = page.render_page(shown, measured, title, facts, learning, int(options.max_mb * 1e6))
        temporary = out.with_suffix(".tmp")
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, out)
    elif options.show == "maps":
        figures.draw_maps(shown, measured, title, out)
    elif options.show == "roles":
        figures.draw_roles(measured, shown.layers, shown.heads, title, out)
    elif learning:
        figures.draw_learning(learning, title, out)
    else:
        raise UserError(f"{folder} holds no snapshots of its training (attention/); train.py writes them at its evaluations")
    size = f"{len(shown.layers)} layers x {len(shown.heads)} heads x {len(ids):,} tokens"
    print(f"{out}: {size}, {out.stat().st_size / 1e6:.1f} MB")
    names = measured.names()
    for role in (*roles.ROLES, "mixed"):
        found = [f"L{shown.layers[i]} H{shown.heads[j]}" for i, j in zip(*(names == role).nonzero(), strict=True)]
        if found:
            print(f"  {role}: {', '.join(found)}")
    ablations = _ablate(options, model, checkpoint, ids) if options.ablate else []
    if options.json:
        report = roles.report(measured, shown.layers, shown.heads)
        report |= {"run": str(options.run), "step": checkpoint.step, "n_token": len(ids), "ablations": ablations}
        report["forming"] = watched.forming() if watched else None
        Path(options.json).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    run_command(main)
