"""Whole runs of train.py: the time to nanoGPT's loss, and a run that is interrupted."""

import contextlib
import io
import shutil
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.task import Missing, Task
from benchmarks.train import best_so_far
from configs import Config
from ops import checkpoint
from ops.command_line import parse
from ops.device import resolve
from ops.log import read_log


def prepared(task: Task) -> str:
    """The folder of tinyshakespeare. Raises Missing where it isn't prepared."""
    if not (task.data / "dataset.json").exists():
        raise Missing(f"{task.data} isn't prepared: python -m data.prepare tinyshakespeare")
    return str(task.data)


def run(config: Config) -> list[dict[str, Any]]:
    """Train here, with nothing printed; the records of the log."""
    import train

    with contextlib.redirect_stdout(io.StringIO()):
        train.train(config)
    return read_log(Path(config.run.out) / "log.jsonl")


def speedruns(task: Task) -> None:
    """Minutes of each run until its whole-split loss is at or below the target. The runs share the
    time that is left.
    """
    data = prepared(task)
    runs = task.scale.runs
    for number, arguments in enumerate(runs):
        seconds = task.left() / (len(runs) - number)
        if seconds < 1:
            task.note(f"{arguments[0]}: left out, the time was up")
            continue
        out = task.folder / f"speedrun-{number}"
        config = parse([*arguments, "--data", data, "--out", str(out), "--device", task.device])
        log = run(config.replace(max_minutes=seconds / 60))
        task.row("Time to the loss of nanoGPT's GPU recipe", run=arguments[0], **found(task, log))
        task.figures(**{arguments[0]: log})


def found(task: Task, log: list[dict[str, Any]]) -> dict[str, str]:
    """When the target was reached, and what was reached at last."""
    curve = best_so_far(log)
    target = task.scale.target
    reached = next((point for point in curve if point["best_loss"] <= target), None)
    trained = [record for record in log if record["kind"] == "train"]
    cells = {f"seconds to {target}": "not reached in this time", "at step": ""}
    if reached:
        cells = {
            f"seconds to {target}": f"{60 * reached['minutes']:.1f}",
            "at step": f"{reached['step']:,}",
        }
    return cells | {
        "best loss": f"{curve[-1]['best_loss']:.4f}" if curve else "none",
        "steps": f"{trained[-1]['step']:,}" if trained else "0",
        "tokens/s at the end": f"{trained[-1]['tokens_per_second']:,.0f}" if trained else "",
    }


def resume(task: Task) -> None:
    """A deterministic run in one go, and one that stops in the middle and goes on: the same to the
    last bit? Then the same stopped run goes on on the CPU.
    """
    folder = task.folder / "resume"
    words = [*task.scale.resumed, "--data", prepared(task), "--device", task.device]
    config = resolve(parse([*words, "--out", str(folder / "whole"), "--deterministic"]))
    half = config.optim.max_steps // 2
    stopped = config.replace(out=str(folder / "parts"), stop_at=half)
    run(config)
    run(stopped)
    shutil.copytree(folder / "parts", folder / "moved")
    run(stopped.replace(stop_at=0, resume=True))
    task.row("Resuming", what=f"stopped at step {half}", weights=compared(folder, "parts"))
    moved = stopped.replace(out=str(folder / "moved"), stop_at=0, resume=True)
    run(moved.replace(device="cpu", precision="auto"))
    task.row("Resuming", what="the same, then on the CPU", weights=compared(folder, "moved"))


def compared(folder: Path, other: str) -> str:
    """How far the last checkpoint of a run is from that of the undisturbed one."""
    whole, parts = (checkpoint.load(folder / name / "checkpoint.pt") for name in ("whole", other))
    if whole.step != parts.step:
        return f"at step {parts.step}, not {whole.step}"
    if all(torch.equal(whole.model[name], parts.model[name]) for name in whole.model):
        return "the same to the last bit"
    largest = max((whole.model[n] - parts.model[n]).abs().max().item() for n in whole.model)
    return f"differ by {largest:.1e} at most"
