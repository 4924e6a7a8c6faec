"""Learn the merges of a BPE from texts on standard input: a program of its own, run by
`data.tokenizer.train_bpe`.

rustbpe holds Python's lock from the first merge to the last, which may take minutes; in its own
process it leaves Ctrl-C to the one that waits for it. Imports nothing of this project.

In comes a line of JSON, {"n_tokens": ..., "pattern": ...}, then each text as its length, four
bytes, and its UTF-8; a length of `END` ends them. Out goes {"pattern": ..., "tokens": [base64,
...]}, in order of rank.
"""

import base64
import json
import signal
import sys
from collections.abc import Iterator
from typing import BinaryIO

END = 0xFFFFFFFF


def die_with_parent() -> None:
    """End when the process does that started this one, where the system can see to that."""
    if sys.platform == "linux":
        import contextlib
        import ctypes

        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1: PR_SET_PDEATHSIG


def read_texts(file: BinaryIO) -> Iterator[str]:
    """The texts, until their end is said. EOFError where the sender ended before."""
    while True:
        header = file.read(4)
        if len(header) < 4:
            raise EOFError("the texts ended in the middle")
        size = int.from_bytes(header, "little")
        if size == END:
            return
        yield file.read(size).decode("utf-8")


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends Ctrl-C here too
    die_with_parent()
    import rustbpe

    asked = json.loads(sys.stdin.buffer.readline())
    trainer = rustbpe.Tokenizer()
    texts = read_texts(sys.stdin.buffer)
    trainer.train_from_iterator(
        texts, asked["n_tokens"], buffer_size=256, pattern=asked.get("pattern")
    )
    ranked = sorted(trainer.get_mergeable_ranks(), key=lambda item: item[1])
    tokens = [base64.b64encode(bytes(token)).decode() for token, _ in ranked]
    json.dump({"pattern": trainer.get_pattern(), "tokens": tokens}, sys.stdout)


if __name__ == "__main__":
    main()
