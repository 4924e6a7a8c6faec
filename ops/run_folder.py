"""The run folder: what lies in it, whether it may be written to, and how it is made ready."""

import json
import shutil
from pathlib import Path

from configs import Config
from data.dataset import Dataset
from errors import UserError
from ops.checkpoint import BEST, LATEST, Checkpoint, load
from ops.log import cut_log
from ops.resume import merge_on_resume

MADE_BY_A_RUN = (
    "config.json",
    "log.jsonl",
    LATEST,
    BEST,
    "loss.png",
    "samples.txt",
    "attention",
    "wandb",
    "wandb_id",
)


def open_folder(config: Config, dataset: Dataset) -> tuple[Path, Config, Checkpoint | None]:
    """The run folder, the configuration to go on with, and the checkpoint to go on from (None: from
    the start). Nothing is touched.

    Raises UserError where the folder holds a run and neither `resume` nor `overwrite` is set, and
    where the checkpoint is of other data or of another configuration.
    """
    folder, run = Path(config.run.out), config.run
    if folder.exists() and not folder.is_dir():
        raise UserError(
            f"{folder} is a file, where the run folder should be: give another with --out"
        )
    found = [folder / name for name in (LATEST, BEST) if run.resume and (folder / name).exists()]
    if found:
        checkpoint = load(found[0])
        if checkpoint.dataset != dataset.fingerprint:
            raise UserError(
                f"{folder} was trained on other data than {dataset.folder} holds: "
                "prepare that again, or give another --out"
            )
        saved = Config.from_dict(checkpoint.config)
        return folder, merge_on_resume(config, saved, checkpoint.step), checkpoint
    if (
        not run.resume
        and not run.overwrite
        and any((folder / name).exists() for name in MADE_BY_A_RUN)
    ):
        raise UserError(
            f"{folder} holds a run: --resume goes on with it, --overwrite replaces it, --out "
            "FOLDER starts another"
        )
    return folder, config, None


def start_folder(folder: Path, config: Config, step: int | None) -> None:
    """Make the folder ready: empty of what a run before left, or, where one goes on from
    `step`, with log and snapshots cut back to it.

    Writes config.json, from which the run can be repeated.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"the run folder {folder} can't be made ({error.strerror}): give another with --out"
        ) from None
    for name in MADE_BY_A_RUN if step is None else ():
        if (folder / name).exists():
            (shutil.rmtree if (folder / name).is_dir() else Path.unlink)(folder / name)
    cut_log(folder / "log.jsonl", step)
    # These are of this start or of this place, not of the run.
    repeatable = config.replace(out="", resume=False, overwrite=False, stop_at=0, max_minutes=0.0)
    (folder / "config.json").write_text(
        json.dumps(repeatable.to_dict(), indent=2) + "\n", encoding="utf-8"
    )
