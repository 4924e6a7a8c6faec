"""A prepared corpus on disk: token files, and dataset.json, which says what they are."""

import hashlib
import json
from pathlib import Path

import numpy as np

from data.prompts import find_start
from data.tokenizer import Tokenizer
from errors import UserError

FORMAT = 1
"""Version of dataset.json that this program writes and reads."""


class Dataset:
    """A folder written by `data.prepare`: the splits "train" and "val" as memory-mapped token
    arrays, and dataset.json.

    Raises UserError where the folder is missing, incomplete or of another format.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        try:
            self.info = json.loads((self.folder / "dataset.json").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UserError(
                f"{self.folder} holds no prepared data ({error}); "
                "prepare it with `python -m data.prepare`"
            ) from None
        found = self.info.get("format") if isinstance(self.info, dict) else None
        if found != FORMAT:
            raise UserError(
                f"{self.folder} is in format {found}, this version reads {FORMAT}: "
                "prepare it again with --overwrite"
            )
        self.tokens = {split: self._map(split) for split in ("train", "val")}
        self.tokenizer_spec = self.info["tokenizer"]

    def _map(self, split: str) -> np.ndarray:
        path = self.folder / f"{split}.bin"
        dtype = np.dtype(self.info["dtype"]).newbyteorder("<")
        size = path.stat().st_size if path.exists() else 0
        wanted = self.info["splits"][split]["tokens"] * dtype.itemsize
        if size != wanted:
            raise UserError(
                f"{path} has {size:,} bytes, dataset.json says {wanted:,}: "
                "prepare it again with --overwrite"
            )
        return np.memmap(path, dtype=dtype, mode="r")

    @property
    def fingerprint(self) -> str:
        """SHA-256 over the tokenizer and both splits: the same data, wherever it lies."""
        parts = [
            self.tokenizer_spec,
            self.info["splits"]["train"]["sha256"],
            self.info["splits"]["val"]["sha256"],
        ]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    def start(self, tokenizer: Tokenizer) -> int:
        """The id that a text without a prompt starts from: one that the training split holds."""
        n_document = self.info["splits"]["train"].get("documents", 1)
        return find_start(tokenizer, self.tokens["train"], n_document)

    def bytes_per_token(self, split: str) -> float:
        """UTF-8 bytes of text a token of the split stands for, on average."""
        info = self.info["splits"][split]
        return info["bytes"] / info["tokens"]

    def check_context(self, context_length: int) -> None:
        """Raise UserError where a split is shorter than one window of `context_length`."""
        for split, least in (("train", context_length + 1), ("val", 2)):
            found = len(self.tokens[split])
            if found < least:
                raise UserError(
                    f"the {split} split has {found:,} tokens, a window needs {least:,}: "
                    "use a longer text or a shorter --context-length"
                )
