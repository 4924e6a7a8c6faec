"""Which tokenizer a published model's ids are of."""

from pathlib import Path

from data.tokenizer import ByteTokenizer, Tokenizer, load_gpt2
from data.tokenizer_in import read_old_files, read_tokenizer
from data.vocabulary import borrow_tokenizer
from errors import UserError

GPT2_SIZES = (50_257, 50_304)
"""Rows of GPT-2's embeddings, and as nanoGPT pads them."""


def find_tokenizer(
    folder: Path, given: str, is_gpt2: bool, n_row: int, end: int | None
) -> Tokenizer:
    """The tokenizer of a model with `n_row` embeddings, whose documents end with the id `end`:
    `given`, as --tokenizer-from has it, else what lies in `folder`, else GPT-2's where that fits.
    Raises UserError.
    """
    if given in ("byte", "gpt2"):
        return load_gpt2() if given == "gpt2" else ByteTokenizer(separator=n_row > 256)
    if given:
        return borrow_tokenizer(given, end)
    if (folder / "tokenizer.json").is_file():
        return read_tokenizer(folder / "tokenizer.json", end)
    if (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        return read_old_files(folder, end)
    if is_gpt2 and n_row in GPT2_SIZES:
        return load_gpt2()
    raise UserError(
        f"{folder} holds no tokenizer.json: say which tokenizer the {n_row:,} embeddings are for, "
        "with --tokenizer-from (a run, a prepared folder, a tokenizer.json, byte or gpt2)"
    )
