"""Snapshots of attention taken while a model learns: one fixed text, eight bits a weight, a bounded
folder.
"""

import io
import os
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data.dataset import Dataset
from data.excerpt import choose_excerpt
from data.tokenizer import Tokenizer
from model.attention import Mask
from model.gpt import GPT
from viz.maps import Decode, read_text
from viz.roles import (
    ROLES,
    THRESHOLD,
    excess,
    induction_scores,
    measure_roles,
    role_targets,
    target_weight,
)

MAX_TOKENS = 256
MAX_SNAPSHOT = 1 << 20
"""Weights in one snapshot; a model with many heads is probed on fewer tokens."""
MAX_FOLDER = 16 << 20
"""Bytes of all snapshots together; beyond, those that stand closest in time are dropped."""
EARLY = (1, 2, 5)
"""Beside evaluations a run is looked at after this many steps, times 10, 100, 1000 ...: roles form
early, and half of what happens to a loss happens in the first tenth of a run.
"""
_FIELDS = ("tokens", "window", "weights", "scores", "uniform", "entropy")


@dataclass(frozen=True)
class Probe:
    """The snapshots of a run, S of them in order of step, over T tokens, L layers of H heads."""

    steps: list[int]
    tokens: list[int]
    pieces: list[bytes]
    """The bytes of each token."""
    maps: list[np.ndarray]
    """S arrays (L, H, T (T + 1) / 2) of uint8: weights times 255, the lower triangle row by row."""
    scores: np.ndarray
    """(S, L, H, roles) as `viz.roles.HeadRoles`; likewise uniform (roles,) and entropy (S, L,
    H).
    """
    uniform: np.ndarray
    entropy: np.ndarray

    def forming(self) -> dict[str, tuple[int, int, int] | None]:
        """For each role the step, layer and head at which it is first reached; None where no head
        has.
        """
        share, found = excess(self.scores, self.uniform), {}
        for index, role in enumerate(ROLES):
            reached = np.argwhere(share[..., index] >= THRESHOLD).tolist()
            found[role] = (self.steps[reached[0][0]], *reached[0][1:]) if reached else None
        return found


def _snapshots(folder: Path) -> dict[int, Path]:
    return {
        int(path.stem.removeprefix("step-")): path for path in sorted(folder.glob("step-*.npz"))
    }


def is_early(step: int) -> bool:
    """Whether `step` is 0 or one of 10, 20, 50, 100, 200, 500, 1,000 ...

    >>> [step for step in range(1100) if is_early(step)]
    [0, 10, 20, 50, 100, 200, 500, 1000]
    """
    while step >= 100 and step % 10 == 0:
        step //= 10
    return step == 0 or step in [10 * early for early in EARLY]


class Watch:
    """Looks at a run while it learns: one text of its validation split, into `folder`.

    The text is what `choose_excerpt` finds, of at most `n_token` tokens (0: nothing is looked at);
    a run that goes on is watched on the text that it began with.
    """

    def __init__(self, folder: Path, dataset: Dataset, tokenizer: Tokenizer, n_token: int):
        self.folder, self.dataset, self.tokenizer = folder, dataset, tokenizer
        self.n_token = n_token
        self.tokens: list[int] = []

    def is_due(self, step: int, is_evaluated: bool) -> bool:
        """Whether there is to be a snapshot at `step`."""
        return self.n_token > 0 and (is_evaluated or is_early(step))

    def look(self, step: int, model: GPT) -> None:
        """Save the attention of `model` as it stands."""
        if not self.tokens:
            n_token = probe_length(model, self.n_token)
            split = self.dataset.tokens["val"]
            known = _saved_tokens(self.folder)
            self.tokens = known or choose_excerpt(split, self.tokenizer, n_token)
        save_probe(self.folder, step, model, self.tokens)


def _saved_tokens(folder: Path) -> list[int]:
    """The text of the latest snapshot in a folder that can be read; none where there is none."""
    for _, path in sorted(_snapshots(folder).items(), reverse=True):
        if (found := _read(path)) is not None:
            return found["tokens"].tolist()
    return []


def _read(path: Path) -> dict[str, np.ndarray] | None:
    """What a snapshot's file holds; None where it is damaged."""
    try:
        with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as file:
            return {name: file[name] for name in _FIELDS}
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error):
        return None


def probe_length(model: GPT, n_token: int = MAX_TOKENS) -> int:
    """How many tokens `model` is probed on: `n_token`, as far as its context and the bounds above
    allow, and 1 at the least.
    """
    config = model.config
    n_fitting = int((2 * MAX_SNAPSHOT / (config.n_layer * config.n_head)) ** 0.5)
    return max(1, min(n_token, MAX_TOKENS, config.context_length, n_fitting))


def save_probe(folder: Path, step: int, model: GPT, tokens: Sequence[int]) -> None:
    """Write the attention of `model` (eager, not wrapped) over the start of `tokens`, and its
    heads' role scores, to step-N.npz.

    Two short forwards in eval mode; random state and the model's mode are left as they were. At
    most MAX_TOKENS tokens are read, `folder` keeps to MAX_FOLDER bytes, and a file is there whole
    or not at all.
    """
    was_training = model.training
    model.eval()
    # Training that has lost its way is recorded too: what is no number becomes 0.
    start = list(tokens)[: probe_length(model)]
    maps = read_text(model, start, lambda ids: b"")
    induction = induction_scores(model)
    model.train(was_training)
    roles = measure_roles(maps, induction)
    lower = np.tril_indices(len(maps.tokens))
    weights = np.stack([maps.weights(layer)[:, *lower] for layer in maps.layers])
    buffer = io.BytesIO()
    np.savez_compressed(
        buffer,
        tokens=np.array(maps.tokens, np.int64),
        window=np.array(maps.window),
        weights=np.round(np.nan_to_num(weights) * 255).astype(np.uint8),
        scores=roles.scores.astype(np.float32),
        uniform=roles.uniform.astype(np.float32),
        entropy=roles.entropy.astype(np.float32),
    )
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / "snapshot.tmp"
    temporary.write_bytes(buffer.getbuffer())
    os.replace(temporary, folder / f"step-{step:09d}.npz")
    _thin(folder)


def _thin(folder: Path) -> None:
    """Drop snapshots until the folder keeps its bound: each time the one whose neighbours are
    closest, never first or last.
    """
    paths = _snapshots(folder)
    sizes = {step: path.stat().st_size for step, path in paths.items()}
    steps = sorted(paths)
    while sum(sizes[step] for step in steps) > MAX_FOLDER and len(steps) > 2:
        closest = min(range(1, len(steps) - 1), key=lambda i: steps[i + 1] - steps[i - 1])
        paths[steps.pop(closest)].unlink()


def cut_probe(folder: Path, step: int) -> None:
    """Remove the snapshots of later steps than `step`, from which a run goes on."""
    for found, path in _snapshots(Path(folder)).items():
        if found > step:
            path.unlink()


def load_probe(folder: Path, decode: Decode) -> Probe | None:
    """The snapshots in `folder`, those over the latest one's tokens; None where there are none. A
    damaged file is left out.

    `decode` gives the tokens' bytes; with them the punctuation score, unknown while training, is
    measured on the 8-bit maps.
    """
    loaded: dict[int, dict[str, np.ndarray]] = {}
    for step, path in sorted(_snapshots(Path(folder)).items()):
        if (found := _read(path)) is not None:
            loaded[step] = found
    if not loaded:
        return None
    last = loaded[max(loaded)]

    def key(snapshot: dict[str, np.ndarray]) -> tuple:
        return snapshot["weights"].shape, snapshot["tokens"].tolist()

    alike = [step for step, snapshot in loaded.items() if key(snapshot) == key(last)]
    maps, scores, entropy = (
        [loaded[step][name] for step in alike] for name in ("weights", "scores", "entropy")
    )
    tokens, marks, uniform = (
        last["tokens"].tolist(),
        list(ROLES).index("punctuation"),
        last["uniform"],
    )
    pieces, lower = [decode([i]) for i in tokens], np.tril_indices(len(tokens))
    target = role_targets(tokens, pieces)["punctuation"]
    allowed = Mask(window=int(last["window"])).allowed(len(tokens), len(tokens))[0, 0].numpy()
    weights_HTS = np.zeros((maps[0].shape[0] * maps[0].shape[1], *allowed.shape), np.float32)
    for snapshot, score in zip(maps, scores, strict=True):
        weights_HTS[:, *lower] = snapshot.reshape(len(weights_HTS), -1)
        weights_HTS /= np.maximum(weights_HTS.sum(-1, keepdims=True), 1)
        measured, uniform[marks] = target_weight(weights_HTS, target, allowed)
        score[..., marks] = measured.reshape(score.shape[:2])
    return Probe(alike, tokens, pieces, maps, np.stack(scores), uniform, np.stack(entropy))
