"""Text to token ids and back: characters, bytes, a BPE trained on the corpus, and GPT-2's BPE.

The two BPE kinds are run by tiktoken; training is rustbpe's. A tokenizer's `spec()` is all that is
needed to build it again, so it travels inside a prepared corpus and inside a checkpoint, and
sampling needs neither the corpus nor a network.

Text that spells a special token ("<|endoftext|>") is ordinary text everywhere; only `separator`, an
id, ends a document.
"""

from __future__ import annotations

import base64
import codecs
import contextlib
import http.client
import json
import re
import subprocess
import sys
import tempfile
import threading
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, groupby, pairwise
from pathlib import Path
from typing import IO

import numpy as np

from data import merging, patterns
from data.characters import known_forms
from data.foreign import open_reader, word_bytes
from data.names import TOKENIZERS, PatternName
from errors import MachineError, UserError
from machine import usable_cpus

FORMAT = 1  # of a spec
SEPARATOR_TEXT = "<|endoftext|>"  # how the separator's id is printed
# A BPE's text is cut into pieces of at least this size, to be shared out among the cores.
CHUNK_CHARACTERS = 1 << 17
# A longer run of characters without a safe cut, which is no ordinary text, is cut after every so
# many. In one piece tiktoken's time would grow faster than the text, and at about a million
# characters its regular expressions fail.
LONGEST_RUN = 1 << 16
# A BPE is trained on at most so many characters of text with hardly a break: nearly every piece of
# it is new, and is kept in memory.
DENSE_CHARACTERS = 1 << 23
UNKNOWN = 0xFFFFFFFF  # in place of an id
ALL_BYTES = [bytes([i]) for i in range(256)]


def dtype_for(vocab_size: int) -> str:
    """The dtype that holds ids below `vocab_size` on disk: little-endian, two bytes up to 65,536
    ids, else four.

    >>> dtype_for(65_536), dtype_for(65_537)
    ('<u2', '<u4')
    """
    return "<u2" if vocab_size <= 1 << 16 else "<u4"


class Tokenizer(ABC):
    """What the rest of the program knows about a tokenizer. Ids run from 0 to `vocab_size - 1`.

    `pieces` are the bytes of every id in order, save the separator's, which comes last if there is
    one.
    """

    kind: str
    """One of `TOKENIZERS`."""
    vocab_size: int
    """The separator included."""
    separator: int | None
    """The id that stands between two documents, if there is one."""
    start: int | None = None
    """The id that a text without a prompt starts from, where it is known what training has seen."""
    cuts_anywhere = True
    """encode(a + b) == encode(a) + encode(b) for every a and b; else cut as `safe_cut` does."""
    has_cut_runs = False
    """Whether a text had a run without a break so long that it was cut (`run_cuts`)."""

    def __init__(self, pieces: list[bytes], separator: bool):
        self.pieces = pieces
        self.separator = None
        self._printed = list(pieces)
        if separator:
            self.separator = len(pieces)
            self._printed.append(SEPARATOR_TEXT.encode())
        self.vocab_size = len(self._printed)
        self.dtype = np.dtype(dtype_for(self.vocab_size))

    def encode(self, text: str) -> np.ndarray:
        """Ids of `text`, shape (tokens,), dtype `dtype_for(vocab_size)`. UserError for text that
        has no ids.
        """
        try:
            return self._encode(text).astype(self.dtype)
        except UnicodeEncodeError as error:
            found = ascii(error.object[error.start])
            raise UserError(
                f"{found} in the text is half a surrogate pair, which is not a character"
            ) from None

    @abstractmethod
    def _encode(self, text: str) -> np.ndarray:
        """`encode`, in any integer dtype."""

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """`encode` of each text, on all cores where that pays."""
        return [self.encode(text) for text in texts]

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The UTF-8 bytes of `ids`, which may begin or end inside a character. The separator reads
        "<|endoftext|>".
        """
        return b"".join([self._printed[i] for i in ids])

    def decode(self, ids: Iterable[int]) -> str:
        """`decode_bytes` as text; bytes that are not UTF-8 become U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def byte_lengths(self) -> np.ndarray:
        """UTF-8 bytes of text that each id stands for, shape (vocab_size,), int64; the separator
        stands for none.
        """
        lengths = [len(piece) for piece in self.pieces]
        if self.separator is not None:
            lengths.append(0)
        return np.array(lengths, np.int64)

    @abstractmethod
    def spec(self) -> dict:
        """A dictionary of JSON types from which `load_tokenizer` rebuilds this tokenizer."""


class CharTokenizer(Tokenizer):
    """One id per distinct character of a corpus, in code point order.

    >>> CharTokenizer("abc").encode("cab").tolist()
    [2, 0, 1]
    """

    kind = "char"

    def __init__(self, symbols: str, separator: bool = False):
        if not symbols or list(symbols) != sorted(set(symbols)):
            raise UserError(
                "a character vocabulary must be distinct characters in code point order"
            )
        super().__init__([symbol.encode() for symbol in symbols], separator)
        self.symbols = symbols
        self.ids = {symbol: i for i, symbol in enumerate(symbols)}
        self._table = CodePointTable(self.ids)

    def _encode(self, text: str) -> np.ndarray:
        # [self.ids[character] for character in text], up to thirty times as fast.
        ids, suspect = self._table.look_up(text)
        if suspect:
            unknown = sorted(set(text) - self.ids.keys())
            if unknown:
                raise self._error(unknown, text)
        return ids

    def _error(self, unknown: list[str], text: str) -> UserError:
        forms = known_forms(text, set(unknown), self.ids.keys())
        offered = [f"{form!a} ({form}) for {part!a}" for part, form in forms.items()][:5]
        way = f"known in another form: write {', '.join(offered)}; else " if offered else ""
        shown = ", ".join(map(ascii, unknown[:10]))
        if len(unknown) > 10:
            shown += ", ..."
        return UserError(
            f"{len(unknown)} character(s) of the text are not among the {len(self.symbols)} "
            f"of the vocabulary: {shown}\n"
            f"{way}leave them out, or prepare the corpus with --tokenizer byte or bpe, "
            "which know every character"
        )

    def spec(self) -> dict:
        return {
            "format": FORMAT,
            "kind": self.kind,
            "symbols": self.symbols,
            "separator": self.separator is not None,
        }


class CodePointTable:
    """The dictionary of a `CharTokenizer` as an array, id by code point, which numpy looks a whole
    text up in at once.
    """

    def __init__(self, ids: dict[str, int]):
        codes = [ord(character) for character in ids]
        # Code point -> id. There is one entry more than needed: it stands for all beyond.
        self._table = np.full(max(256, max(codes) + 2), UNKNOWN, np.uint32)
        self._table[codes] = list(ids.values())
        # Latin-1 text takes one byte a character, and `bytes.translate` maps it to ids at gigabytes
        # a second: in code point order those ids fit a byte. Id 255 may mean "unknown" there: it is
        # a character's only if all 256 are known.
        self._latin = np.minimum(self._table[:256], 255).astype(np.uint8).tobytes()

    def look_up(self, text: str) -> tuple[np.ndarray, bool]:
        """The ids of a text, and whether some of them may stand for unknown characters."""
        try:
            raw = text.encode("latin-1").translate(self._latin)
            return np.frombuffer(raw, np.uint8), b"\xff" in raw
        except UnicodeEncodeError:
            codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")
            ids = np.take(self._table, codes, mode="clip")
            return ids, bool((ids == UNKNOWN).any())


class Alphabet:
    """Collects the distinct characters of a corpus, a chunk at a time."""

    def __init__(self):
        self._latin = b""
        self._seen = np.zeros(0x110000, bool)

    def add(self, text: str) -> None:
        try:
            # Without what was seen before, which is nearly always everything.
            new = text.encode("latin-1").translate(None, self._latin)
            self._latin += bytes(set(new))
        except UnicodeEncodeError:
            self._seen[np.frombuffer(text.encode("utf-32-le"), "<u4")] = True

    def symbols(self) -> str:
        """The characters seen so far, in code point order."""
        codes = {*self._latin, *self._seen.nonzero()[0].tolist()}
        return "".join(chr(code) for code in sorted(codes))


class ByteTokenizer(Tokenizer):
    """The 256 bytes of UTF-8: every text has ids, none is unknown."""

    kind = "byte"

    def __init__(self, separator: bool = False):
        super().__init__(ALL_BYTES, separator)

    def _encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode(), np.uint8)

    def spec(self) -> dict:
        return {"format": FORMAT, "kind": self.kind, "separator": self.separator is not None}


class BPETokenizer(Tokenizer):
    """Byte-pair encoding, run by tiktoken; kind "bpe" (trained by `train_bpe`) or "gpt2". The
    highest id is the separator.

    `pattern` is the regular expression that cuts text into pieces before any pair is merged;
    `tokens` the bytes of each id in the order of merging.
    """

    cuts_anywhere = False

    def __init__(self, kind: str, pattern: str, tokens: list[bytes]):
        import tiktoken

        super().__init__(tokens, separator=True)
        self.kind = kind
        self.pattern = pattern
        self._encoding = tiktoken.Encoding(
            kind,
            pat_str=pattern,
            mergeable_ranks={token: rank for rank, token in enumerate(tokens)},
            special_tokens={SEPARATOR_TEXT: len(tokens)},
        )

    def _encode(self, text: str) -> np.ndarray:
        cuts = run_cuts(text)
        self.has_cut_runs = self.has_cut_runs or bool(cuts)
        # No special token is looked for, and none is refused: all text is ordinary.
        ids = [
            self._encoding.encode_to_numpy(text[begin:end], disallowed_special=())
            for begin, end in pairwise([0, *cuts, len(text)])
        ]
        return ids[0] if len(ids) == 1 else np.concatenate(ids)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        n = usable_cpus()
        shares = [texts[i::n] for i in range(n)]
        ids = [np.empty(0)] * len(texts)
        is_over = threading.Event()

        def encode_share(share: Sequence[str]) -> list[np.ndarray]:
            return [self.encode(text) for text in share if not is_over.is_set()]

        with ThreadPoolExecutor(n) as pool:  # tiktoken lets go of the interpreter's lock
            try:
                for i, share in enumerate(pool.map(encode_share, shares)):
                    ids[i::n] = share
            finally:
                is_over.set()  # Ctrl-C waits for a text, not for a share
        return ids

    def spec(self) -> dict:
        tokens = " ".join(base64.b64encode(token).decode() for token in self.pieces)
        return {"format": FORMAT, "kind": self.kind, "pattern": self.pattern, "tokens": tokens}


class ForeignTokenizer(Tokenizer):
    """What a tokenizer.json describes, run by the library `tokenizers`: for imported models whose
    tokenizer is none of the other kinds. `end` is the id that ends a document, if there is one.
    """

    kind = "tokenizers"
    cuts_anywhere = False

    def __init__(self, text: str, end: int | None):
        self._reader = open_reader(text)
        super().__init__(word_bytes(text, self._reader), separator=False)
        if end is not None and not 0 <= end < self.vocab_size:
            raise UserError(f"id {end} cannot end a document: there are {self.vocab_size:,} ids")
        self.separator = end
        self.text = text

    def _encode(self, text: str) -> np.ndarray:
        text.encode()  # half a surrogate pair is refused as elsewhere
        try:
            ids = self._reader.encode(text, add_special_tokens=False).ids
        except Exception as error:  # the library raises nothing narrower
            raise MachineError(f"the tokenizer.json can't take this text: {error}") from None
        return np.array(ids, np.int64)

    def byte_lengths(self) -> np.ndarray:
        lengths = [len(piece) for piece in self.pieces]
        if self.separator is not None:
            lengths[self.separator] = 0
        return np.array(lengths, np.int64)

    def spec(self) -> dict:
        return {"format": FORMAT, "kind": self.kind, "json": self.text, "separator": self.separator}


def load_tokenizer(spec: dict) -> Tokenizer:
    """The tokenizer that `spec()` described. UserError if the description is unknown or damaged."""
    try:
        kind = spec["kind"]
        found = spec["format"]
        if found != FORMAT:
            raise UserError(
                f"the tokenizer's description is of format {found!r}, not {FORMAT}: "
                "prepare the corpus again"
            )
        if kind == "char":
            return CharTokenizer(spec["symbols"], spec["separator"])
        if kind == "byte":
            return ByteTokenizer(spec["separator"])
        if kind in ("bpe", "gpt2"):
            tokens = [base64.b64decode(token, validate=True) for token in spec["tokens"].split(" ")]
            distinct = set(tokens)
            if len(distinct) < len(tokens) or not distinct.issuperset(ALL_BYTES):
                raise ValueError("not a set of tokens with all 256 bytes")
            return BPETokenizer(kind, spec["pattern"], tokens)
        if kind == "tokenizers":
            return ForeignTokenizer(spec["json"], spec["separator"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(
            f"the description of the tokenizer is damaged ({error!r}): prepare the corpus again"
        ) from None
    known = f"{', '.join(TOKENIZERS[:-1])} and {TOKENIZERS[-1]}"
    raise UserError(f"unknown tokenizer {kind!r}; this program knows {known}")


def train_bpe(texts: Iterable[str], vocab_size: int, pattern: PatternName = "gpt4") -> BPETokenizer:
    """Train a BPE on `texts` and make a tokenizer of it.

    `vocab_size` counts the 256 bytes, the merges and the separator; a small corpus runs out of
    pairs to merge and yields fewer. `pattern` names how text is cut into pieces first. Texts should
    be short (`safe_chunks`): 256 of them are held at once. Of text with hardly a break, a genome,
    say, `DENSE_CHARACTERS` are enough, and a note says so. UserError for a `vocab_size` out of
    range, MachineError if the training fails.
    """
    if not 257 <= vocab_size <= 1 << 24:
        raise UserError(
            f"--vocab-size {vocab_size} is not between 257 (256 bytes and a separator) "
            "and 16,777,216"
        )
    learned = _learn_merges(_bounded(texts), vocab_size - 1, patterns.TRAINED[pattern])
    tokens = [base64.b64decode(token) for token in learned["tokens"]]
    return BPETokenizer("bpe", learned["pattern"], tokens)


def _learn_merges(texts: Iterable[str], n_tokens: int, pattern: str) -> dict:
    """What `data.merging` makes of the texts, in a process of its own."""
    command = [sys.executable, "-P", str(Path(merging.__file__))]
    with tempfile.TemporaryFile() as error:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=error
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            _send(process.stdin, texts, {"n_tokens": n_tokens, "pattern": pattern})
            answer = process.stdout.read()
            process.wait()
        finally:
            process.kill()
            process.wait()
            process.stdout.close()
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
        if process.returncode != 0:
            error.seek(0)
            lines = error.read().decode(errors="replace").split("\n")
            reason = next((line for line in reversed(lines) if line.strip()), "")
            if process.returncode < 0:
                reason = f"signal {-process.returncode}; is there memory enough?"
            raise MachineError(
                f"training the BPE failed ({reason[:200]}); --tokenizer byte needs no training"
            )
    return json.loads(answer)


def _send(stream: IO[bytes], texts: Iterable[str], asked: dict) -> None:
    """Write to the process that learns; if that is gone, its exit code says why."""
    header = json.dumps(asked).encode() + b"\n"
    for message in chain([header], map(_packed, texts), [_length(merging.END)]):
        try:
            stream.write(message)
        except BrokenPipeError:
            return
    with contextlib.suppress(BrokenPipeError):
        stream.close()


def _packed(text: str) -> bytes:
    raw = text.encode()
    return _length(len(raw)) + raw


def _length(n_bytes: int) -> bytes:
    return n_bytes.to_bytes(4, "little")


def _bounded(texts: Iterable[str]) -> Iterator[str]:
    """The texts, without those with hardly a break once there were `DENSE_CHARACTERS` of them."""
    n_dense = 0
    n_left_out = 0
    for text in texts:
        if is_dense(text):
            n_dense += len(text)
            if n_dense > DENSE_CHARACTERS:
                n_left_out += len(text)
                continue
        yield text
    if n_left_out:
        print(
            f"note: the BPE was not trained on {n_left_out:,} characters of text with hardly a "
            f"break, after {DENSE_CHARACTERS:,} of it; they are encoded all the same",
            file=sys.stderr,
        )


def is_dense(text: str) -> bool:
    """Whether safe cuts are more than 50 characters apart, by the beginning of a text."""
    sample = min(len(text), 4096)
    return sample >= 64 and 50 * len(_SAFE_CUT.findall(text, 0, sample)) < sample


def load_gpt2() -> BPETokenizer:
    """GPT-2's own BPE: 50,257 ids. The first use fetches 1.5 MB into tiktoken's cache; UserError if
    that fails.
    """
    import tiktoken
    import tiktoken.load

    original = tiktoken.load.read_file  # waits for the network without a limit
    tiktoken.load.read_file = lambda blobpath: urllib.request.urlopen(blobpath, timeout=20).read()
    try:
        encoding = tiktoken.get_encoding("gpt2")
    except (OSError, ValueError, http.client.HTTPException) as error:
        # no network, no right to write the cache, damage
        raise UserError(
            "GPT-2's vocabulary is not in tiktoken's cache and could not be fetched "
            f"({str(error)[:120]})\n"
            "set TIKTOKEN_CACHE_DIR to a folder that holds it, or use --tokenizer bpe, "
            "which needs no network"
        ) from None
    finally:
        tiktoken.load.read_file = original
    tokens = [encoding.decode_single_token_bytes(i) for i in range(encoding.n_vocab - 1)]
    return BPETokenizer("gpt2", encoding._pat_str, tokens)


# A BPE never merges across the pieces that its pattern cuts, so text may be cut wherever the
# pattern cuts it in any surroundings, and nowhere else. That holds at these places for GPT-2's
# pattern and for rustbpe's (GPT-4's), where S is no white space:
#
#   S \n | S    No piece crosses. White space pieces begin at white space, so none begins before
#               "\n"; letters, digits and GPT-2's punctuation end before "\n"; GPT-4's punctuation
#               may take "\n" with it, and ends there as S is no newline. No piece that begins at S
#               takes "\n" as its prefix either: GPT-2's optional prefix is " " alone, GPT-4's all
#               but newlines.
#   S | " " S   A space is only ever the first character of the piece that holds it, or inside a run
#               of white space, which S stops.
#   L | P       Between a letter or digit and a punctuation mark: each ends the other's run, and a
#               mark that opens a piece (the apostrophe of 's, GPT-4's prefix of a word) comes first
#               in it. The marks are listed, as Python's tables of Unicode and tiktoken's may differ
#               in what is a letter.
#
# Looking ahead, `\s+(?!\S)` and `\s++$`, changes nothing: the left part ends in S or S\n, which
# read alike at the end of text.
_MARKS = r"!-/:-@\[-`{-~\u3001\u3002\uff01\uff0c\uff1a\uff1b\uff1f"
_SAFE_CUT = re.compile(rf"(?<=\S\n)(?=\S)|(?<=\S)(?= \S)|(?<=[^\W_])(?=[{_MARKS}])")


def safe_cut(text: str, start: int, end: int = sys.maxsize) -> int:
    """The first place at or after `start` where a BPE's text may be cut without changing its
    tokens, or -1; what lies at `end` and after is not looked at.
    """
    match = _SAFE_CUT.search(text, start, end)
    return match.start() if match else -1


def run_cuts(text: str) -> list[int]:
    """Places at which a BPE's text is cut although that may change its tokens: after every
    `LONGEST_RUN` characters of a run that has no safe cut. Ordinary text has no such run.
    """
    half = LONGEST_RUN // 2
    blocks = range(0, len(text) - half + 1, half)
    # A longer run holds one of these blocks whole.
    if len(text) <= LONGEST_RUN or all(safe_cut(text, at, at + half) >= 0 for at in blocks):
        return []
    cuts = []
    last = 0
    for end in chain((match.start() for match in _SAFE_CUT.finditer(text)), [len(text)]):
        while end - last > LONGEST_RUN:
            last += LONGEST_RUN
            cuts.append(last)
        last = end
    return cuts


def safe_chunks(
    pieces: Iterable[tuple[int, str]], size: int = CHUNK_CHARACTERS
) -> Iterator[tuple[int, str]]:
    """Re-cut (document, text) into chunks of at least `size` characters, save a document's last and
    one before a long run; encoding them one by one gives the tokens of the whole.

    They are cut safely, and where no safe cut comes for `LONGEST_RUN` characters, as `run_cuts`
    does; so no more than that and `size` are held beside the piece in hand.
    """
    for document, group in groupby(pieces, key=lambda piece: piece[0]):
        held = ""
        for _, text in group:
            held += text
            begin = 0
            while (end := _chunk_end(held, begin, size)) > 0:
                yield document, held[begin:end]
                begin = end
            held = held[begin:]
        yield document, held


def _chunk_end(text: str, begin: int, size: int) -> int:
    """Where a chunk that begins at `begin` ends, or -1 if that depends on text still to come."""
    near = begin + size
    far = near + LONGEST_RUN
    cut = safe_cut(text, near, far + 2)  # a cut looks two characters ahead
    if cut >= 0 or len(text) < far + 2:
        return cut
    last = begin
    for match in _SAFE_CUT.finditer(text, begin + 1, near + 2):
        last = match.start()
    if last > begin:
        return last  # from there on there is nothing but the run
    return begin + max(1, size // LONGEST_RUN) * LONGEST_RUN


class StreamDecoder:
    """Decodes ids one at a time, and never shows half a character.

    >>> decoder = StreamDecoder(ByteTokenizer())
    >>> [decoder.push(i) for i in "é!".encode()]
    ['', 'é', '!']
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """The text that `token` completes; "" inside a character."""
        return self._decoder.decode(self._tokenizer.decode_bytes([token]))

    def finish(self) -> str:
        """What is left at the end: "", or U+FFFD for a character that was never completed."""
        return self._decoder.decode(b"", final=True)
