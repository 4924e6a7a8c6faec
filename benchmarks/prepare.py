"""Preparing a text: megabytes a second of each tokenizer, as a whole command and alone, against
tiktoken and against the disk.

    python -m benchmarks.prepare --megabytes 500
    python -m benchmarks.prepare --folder /dev/shm    # files in memory: what the program allows

The text is Python's own library, repeated (no network needed), or --text FILE. The disk's rate is a
plain write of the same bytes, flushed. The yardstick of gpt2 and bpe is tiktoken's own
encode_ordinary_batch, as many threads as cores, nothing written.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.machine import ROOT, parser, publish, spread
from data.sources import open_corpus
from data.tokenizer import (
    Alphabet,
    BPETokenizer,
    ByteTokenizer,
    CharTokenizer,
    load_gpt2,
    safe_chunks,
    train_bpe,
)
from errors import UserError
from machine import usable_cpus


def write_text(path: Path, n_bytes: int, source: str) -> None:
    """Repeat the text of `source` (a corpus or a file) until `n_bytes` are written."""
    text = "".join(part for _, part in open_corpus([source]).documents()).encode()
    with path.open("wb") as file:
        written = 0
        while written < n_bytes:
            written += file.write(
                text[: n_bytes - written].decode(errors="ignore").encode() or b"\n"
            )


def flush_rate(folder: Path, n_bytes: int) -> float:
    """Bytes per second of a plain write, flushed to the disk."""
    block = bytes(1 << 22)
    began = time.perf_counter()
    with (folder / "plain").open("wb") as file:
        for _ in range(n_bytes // len(block)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    seconds = time.perf_counter() - began
    (folder / "plain").unlink()
    return n_bytes / seconds


def alone(tokenizer, text: Path) -> float:
    """Bytes per second of encoding alone, with the chunks that `data.prepare` uses; nothing is
    written.
    """
    texts = list(open_corpus([str(text)]).documents())
    if isinstance(tokenizer, BPETokenizer):
        texts = list(safe_chunks(texts))
    began = time.perf_counter()
    for first in range(0, len(texts), 256):
        tokenizer.encode_batch([part for _, part in texts[first : first + 256]])
    return text.stat().st_size / (time.perf_counter() - began)


def tiktokens_own(tokenizer: BPETokenizer, text: Path) -> float:
    """Bytes per second of tiktoken's own encode_ordinary_batch, all cores, over documents of 128
    thousand characters.
    """
    whole = text.read_text(encoding="utf-8")
    documents = [whole[i : i + (1 << 17)] for i in range(0, len(whole), 1 << 17)]
    began = time.perf_counter()
    tokenizer._encoding.encode_ordinary_batch(documents, num_threads=usable_cpus())
    return text.stat().st_size / (time.perf_counter() - began)


def command_rate(text: Path, kind: str, out: Path) -> float:
    """Bytes per second of `python -m data.prepare`, from its start to its exit."""
    command = [
        sys.executable,
        "-m",
        "data.prepare",
        str(text),
        "--tokenizer",
        kind,
        "--out",
        str(out),
        "--overwrite",
    ]
    began = time.perf_counter()
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return text.stat().st_size / (time.perf_counter() - began)


def main() -> None:
    command = parser(__doc__, "prepare")
    command.add_argument("--megabytes", type=int, default=500, help="of text; a BPE gets a tenth")
    command.add_argument("--text", default="stdlib", help="a corpus or a text file to repeat")
    command.add_argument(
        "--folder",
        type=Path,
        default=None,
        help="where to write; default: the system's own for temporary files",
    )
    command.add_argument("--rounds", type=int, default=3)
    arguments = command.parse_args()
    rows = []
    record = []
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        long = folder / "long.txt"
        short = folder / "short.txt"
        write_text(long, arguments.megabytes * 10**6, arguments.text)
        write_text(short, arguments.megabytes * 10**5, arguments.text)
        disk = flush_rate(folder, arguments.megabytes * 10**6)
        alphabet = Alphabet()
        for _, part in open_corpus([str(short)]).documents():
            alphabet.add(part)
        tokenizers = {"byte": ByteTokenizer(), "char": CharTokenizer(alphabet.symbols())}
        tokenizers["bpe"] = train_bpe(
            (part for _, part in open_corpus([str(short)]).documents()), 4096
        )
        try:
            tokenizers["gpt2"] = load_gpt2()
        except UserError as error:
            print(f"gpt2 is left out: {error}", file=sys.stderr)
        for kind, tokenizer in tokenizers.items():
            is_bpe = isinstance(tokenizer, BPETokenizer)
            text = short if is_bpe else long
            rates = {"command": [], "alone": [], "tiktoken": []}
            for _ in range(arguments.rounds):
                rates["command"].append(command_rate(text, kind, folder / kind) / 1e6)
                rates["alone"].append(alone(tokenizer, text) / 1e6)
                if is_bpe:
                    rates["tiktoken"].append(tiktokens_own(tokenizer, text) / 1e6)
            ratio = (
                f"{statistics.median(rates['alone']) / statistics.median(rates['tiktoken']):.2f}"
                if is_bpe
                else ""
            )
            rows.append(
                {
                    "tokenizer": kind,
                    "text, MB": text.stat().st_size // 10**6,
                    "whole command, MB/s": spread(rates["command"], ",.0f"),
                    "encoding alone, MB/s": spread(rates["alone"], ",.0f"),
                    "tiktoken's own, MB/s": spread(rates["tiktoken"], ",.0f") if is_bpe else "",
                    "alone / tiktoken": ratio,
                }
            )
            record.append({"tokenizer": kind, **rates})
    notes = (
        f"{usable_cpus()} cores. A plain flushed write here: {disk / 1e6:,.0f} MB/s; "
        "byte and char write two bytes a character."
    )
    publish(arguments.out, {"Preparing": rows}, {"rates": record, "disk": disk / 1e6}, notes)


if __name__ == "__main__":
    main()
