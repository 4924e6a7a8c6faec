"""A prepared corpus on disk: token files, and dataset.json, which says what they are."""

import hashlib
import json
import sys
from pathlib import Path

import numpy as np

from data.prompts import find_start
from data.tokenizer import Tokenizer
from errors import UserError

FORMAT = 1
"""Version of dataset.json that this program writes and reads."""
CHECKED_AT_ONCE = 1 << 24  # bytes; Ctrl-C waits for no more
DIGESTED_BYTES = 1 << 30  # of token files; up to so many are hashed before training, in a second


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
        try:
            self.tokens = {split: self._map(split) for split in ("train", "val")}
            self.tokenizer_spec = self.info["tokenizer"]
        except OSError as error:
            raise UserError(f"{self.folder} can't be read: {error}") from None
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UserError(
                f"{self.folder / 'dataset.json'} is damaged ({error!r}): "
                "prepare it again with --overwrite"
            ) from None

    def _map(self, split: str) -> np.ndarray:
        path = self.folder / f"{split}.bin"
        dtype = np.dtype({"uint16": "<u2", "uint32": "<u4"}[self.info["dtype"]])
        size = path.stat().st_size if path.exists() else 0
        about = self.info["splits"][split]
        for key, kind in (("tokens", int), ("bytes", int), ("sha256", str)):
            if not isinstance(about[key], kind):
                raise TypeError(f"{key} of {split} is {about[key]!r}")
        wanted = about["tokens"] * dtype.itemsize
        if size != wanted:
            raise UserError(
                f"{path} has {size:,} bytes, dataset.json says {wanted:,}: "
                "prepare it again with --overwrite"
            )
        return np.memmap(path, dtype=dtype, mode="r") if size else np.empty(0, dtype)

    def check_content(self, vocab_size: int, with_digests: bool | None = None) -> None:
        """Read both token files through: every id must be below `vocab_size`, and the SHA-256 the
        one recorded when they were written, if any. Raises UserError, naming the file, where not.

        With `with_digests` None, digests are compared up to `DIGESTED_BYTES`; of larger files a
        note names the command that does it. Ids are looked at in any case.
        """
        n_bytes = sum(tokens.nbytes for tokens in self.tokens.values())
        if with_digests is None:
            with_digests = n_bytes <= DIGESTED_BYTES
            if not with_digests:
                print(
                    f"note: the SHA-256 of {n_bytes / 1e9:.1f} GB in {self.folder} is not compared "
                    f"now, as that takes long; python -m data.prepare --check {self.folder} does "
                    "it",
                    file=sys.stderr,
                )
        for split in self.tokens:
            self._check_split(split, vocab_size, with_digests)

    def _check_split(self, split: str, vocab_size: int, with_digest: bool) -> None:
        tokens = self.tokens[split]
        path = self.folder / f"{split}.bin"
        digest = hashlib.sha256()
        for start in range(0, len(tokens), CHECKED_AT_ONCE // tokens.itemsize):
            part = tokens[start : start + CHECKED_AT_ONCE // tokens.itemsize]
            if part.max() >= vocab_size:
                first = int((part >= vocab_size).argmax())
                raise UserError(
                    f"{path} is damaged: token {start + first:,} is {part[first]:,}, and the "
                    f"vocabulary has {vocab_size:,} ids: prepare it again with --overwrite"
                )
            if with_digest:
                digest.update(part.data)
        found = digest.hexdigest()
        recorded = self.info["splits"][split]["sha256"]
        if with_digest and recorded and found != recorded:
            raise UserError(
                f"{path} is damaged: its SHA-256 is {found[:16]}..., dataset.json records "
                f"{recorded[:16]}...: prepare it again with --overwrite"
            )

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
