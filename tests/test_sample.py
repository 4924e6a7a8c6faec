"""sample.py: what is drawn and shown, stop strings and half characters, prompts from everywhere,
and what is refused.
"""

import dataclasses
import io
import random
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import (
    command,
    make_config,
    nonsense,
    restored,
    train_here,
    write_byte_corpus,
    write_corpus,
)

import sample
from data.prompts import TextRow, read_prompts
from data.tokenizer import ByteTokenizer, CharTokenizer, StreamDecoder
from errors import UserError
from model.sampling import Sampling
from ops.checkpoint import load, open_run, save
from sample import Options

pytestmark = pytest.mark.slow

SHAPE = {"n_layer": 1, "n_head": 2, "d_model": 32, "context_length": 32, "positions": "rotary"}
QUICK = {
    "lr": 1e-2,
    "batch_size": 8,
    "max_steps": 60,
    "eval_every": 0,
    "save_every": 0,
    "sample_tokens": 0,
}
CHINESE = "\u4f60\u597d\u4e16\u754c\uff0c\U0001f600\u6211\u4eec\u3002\U0001f680\n"


@pytest.fixture(autouse=True)
def one_thread():
    """The number of threads changes the last bits."""
    with restored():
        torch.set_num_threads(1)
        yield


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run over characters that has learned some."""
    folder = tmp_path_factory.mktemp("sample")
    data = write_corpus(folder / "d", nonsense())
    assert train_here(make_config(data, folder / "run", **SHAPE, **QUICK)) == 0
    return folder / "run"


@pytest.fixture(scope="module")
def byte_run(tmp_path_factory):
    """A run over bytes whose text is Chinese and emoji, three and four bytes a character."""
    folder = tmp_path_factory.mktemp("bytes")
    data = write_byte_corpus(folder / "d", CHINESE * 60)
    assert train_here(make_config(data, folder / "run", **SHAPE, **QUICK)) == 0
    return folder / "run"


class Writes(io.StringIO):
    """Standard output that remembers each piece written."""

    def __init__(self):
        super().__init__()
        self.pieces = []

    def write(self, text):
        self.pieces.append(text)
        return super().write(text)


def draw(monkeypatch, *arguments, stdin=None):
    """(stdout, stderr, pieces written) of sample.py in this process; in float32, where no two
    logits are alike.
    """
    out, error = Writes(), io.StringIO()
    arguments = ["--precision", "float32", *arguments]  # a later --precision counts
    with monkeypatch.context() as patch, restored():
        patch.setattr(sys, "argv", ["sample.py", *map(str, arguments)])
        patch.setattr(sys, "stdout", out)
        patch.setattr(sys, "stderr", error)
        if stdin is not None:
            patch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(stdin)))
        torch.manual_seed(
            random.randrange(2**32)
        )  # the state of torch's own generator must not matter
        assert sample.main() == 0
    return out.getvalue(), error.getvalue(), out.pieces


def texts(out):
    """The continued prompts of an output of several."""
    parts = out.split("--- ")[1:]
    return [part.split(" ---\n", 1)[1].rstrip("\n") for part in parts]


# --- drawing ---


def test_greedy_at_temperature_0(run, monkeypatch):
    """Against a loop over the model without a cache: the likeliest character, again and again."""
    out, error, _ = draw(
        monkeypatch, run, "--prompt", "the ", "--max-new-tokens", 20, "--temperature", 0
    )
    model, tokenizer, _ = open_run(run)
    ids = tokenizer.encode("the ").tolist()
    with torch.no_grad():
        for _ in range(20):
            ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    assert out == tokenizer.decode(ids) + "\n"
    assert re.fullmatch(r"reading .*best.pt: step 60, validation loss [\d.]+\n", error)
    assert (
        draw(
            monkeypatch,
            run,
            "--prompt",
            "the ",
            "--max-new-tokens",
            20,
            "--temperature",
            0,
            "--seed",
            5,
        )[0]
        == out
    )
    assert (
        draw(monkeypatch, run, "--prompt", "the ", "--max-new-tokens", 20, "--top-k", 1)[0] == out
    )


def test_reproducible_by_seed(run, monkeypatch):
    arguments = (run, "--prompt", "a", "--max-new-tokens", 40, "--temperature", 1.5)
    one = draw(monkeypatch, *arguments, "--seed", 1)[0]
    assert draw(monkeypatch, *arguments, "--seed", 1)[0] == one
    assert draw(monkeypatch, *arguments, "--seed", 2)[0] != one


def test_several_are_each_what_they_are_alone(run, monkeypatch):
    """Text number i of a batch draws with seed + i."""
    common = (run, "--max-new-tokens", 30, "--temperature", 1.2)
    out = draw(monkeypatch, *common, "--prompt", "a dog", "--num-samples", 3, "--seed", 5)[0]
    alone = [
        draw(monkeypatch, *common, "--prompt", "a dog", "--seed", 5 + i)[0].rstrip("\n")
        for i in range(3)
    ]
    assert texts(out) == alone
    assert len(set(alone)) == 3
    assert [line for line in out.split("\n") if line.startswith("---")] == [
        f"--- {i} of 3 ---" for i in (1, 2, 3)
    ]


def test_takes_a_folder_or_a_file(run, tmp_path, monkeypatch):
    state = load(run / "best.pt")
    with torch.no_grad():
        other = {name: torch.zeros_like(value) for name, value in state.model.items()}
    shutil.copytree(run, tmp_path / "run")
    save(dataclasses.replace(state, model=other), tmp_path / "run" / "checkpoint.pt")
    greedy = ("--prompt", "the", "--max-new-tokens", 8, "--temperature", 0)
    best = draw(monkeypatch, tmp_path / "run", *greedy)[0]
    assert best == draw(monkeypatch, run / "best.pt", *greedy)[0]
    assert (
        draw(monkeypatch, tmp_path / "run" / "checkpoint.pt", *greedy)[0] == "the" + "\n" * 8 + "\n"
    )  # id 0, always


def test_no_new_tokens(run, monkeypatch):
    assert draw(monkeypatch, run, "--prompt", "the cat", "--max-new-tokens", 0)[0] == "the cat\n"


def test_bfloat16(run, monkeypatch):
    out = draw(
        monkeypatch, run, "--prompt", "the cat", "--max-new-tokens", 8, "--precision", "bfloat16"
    )[0]
    assert len(out) == len("the cat") + 8 + 1


# --- many texts ---


def test_groups_are_each_what_they_are_alone(run, monkeypatch, tmp_path):
    """Ten texts with memory for three at a time: shown in order, the same as with memory for all,
    and as each alone.
    """
    from ops import drawing
    from ops.plan import limits

    (tmp_path / "p").write_text("the cat\na\ntwo old dogs sat on a mat\nrain\nby\n")
    common = (run, "--max-new-tokens", 24, "--temperature", 1.1, "--stop", ".\\n", "--seed", 3)
    many = (*common, "--prompts-file", tmp_path / "p", "-n", 2)
    whole, error, _ = draw(monkeypatch, *many)
    assert "at a time" not in error
    monkeypatch.setattr(limits, "free_memory", lambda device: 3.5 / drawing.SHARE)
    monkeypatch.setattr(drawing, "row_bytes", lambda *_: 1)
    out, error, pieces = draw(monkeypatch, *many)
    assert out == whole
    assert "note: 10 texts are drawn 3 at a time" in error
    assert next(piece for piece in pieces if "---" in piece).startswith("--- 1 of 10 ---")
    lines = (tmp_path / "p").read_text().split("\n")
    for index in (0, 3, 9):
        one = (*common[:-1], 3 + index, "--prompt", lines[index // 2])
        assert draw(monkeypatch, *one)[0].rstrip("\n") == texts(out)[index]


def test_memory_that_runs_out(run, monkeypatch):
    """While a group is drawn: fewer at a time, the same texts; with a single one advice."""
    from errors import MachineError
    from model import generate as module

    common = (run, "--prompt", "a", "--max-new-tokens", 8, "--temperature", 1.2)
    whole = draw(monkeypatch, *common, "-n", 5)[0]
    plain = module.next_token

    def cramped(logits, *drawing):
        if len(logits) > most:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return plain(logits, *drawing)

    monkeypatch.setattr(module, "next_token", cramped)
    most = 2
    out, error, _ = draw(monkeypatch, *common, "-n", 5)
    assert out == whole
    assert "out of memory: going on with 2 texts at a time" in error
    most = 0
    with pytest.raises(
        MachineError, match="out of memory with one text at a time: shorten the prompt"
    ):
        draw(monkeypatch, *common)


def test_auto_is_float32(run, monkeypatch):
    """So that a text is what it is alone, whatever the hardware is fast at."""
    from ops import device as module

    seen = []
    plain = module.autocast
    monkeypatch.setattr(module, "autocast", lambda *which: seen.append(which) or plain(*which))
    draw(monkeypatch, run, "--prompt", "a", "--max-new-tokens", 1, "--precision", "auto")
    assert seen == [(module.best_device(), "float32")]


# --- prompts ---


def test_several_prompts(run, monkeypatch):
    common = (run, "--max-new-tokens", 6, "--temperature", 0)
    out, error, _ = draw(monkeypatch, *common, "--prompt", "the cat", "--prompt", "a")
    alone = [draw(monkeypatch, *common, "--prompt", prompt)[0] for prompt in ("the cat", "a")]
    assert texts(out) == [text.rstrip("\n") for text in alone]
    assert "prompt" not in error
    assert "--prompt is given" not in draw(monkeypatch, *common, "--prompt", "a", "-n", 1)[1]


def test_escapes_in_prompts_and_stops(run, monkeypatch):
    common = (run, "--max-new-tokens", 200, "--temperature", 1)
    whole = draw(monkeypatch, *common, "--prompt", "the cat.\nsat")[0]
    real = draw(monkeypatch, *common, "--prompt", "the cat.\nsat", "--stop", "\n")[0]
    assert len(real) < len(whole)
    assert real == whole[: whole.index("\n", len("the cat.\nsat"))] + "\n"
    assert draw(monkeypatch, *common, "--prompt", r"the cat.\nsat", "--stop", r"\n")[0] == real


def test_the_prompt_is_left_out(run, monkeypatch):
    common = (run, "--prompt", "the cat", "--max-new-tokens", 12)
    whole = draw(monkeypatch, *common)[0]
    assert "the cat" + draw(monkeypatch, *common, "--no-show-prompt")[0] == whole
    several = draw(monkeypatch, *common, "-n", 2)[0]
    without = draw(monkeypatch, *common, "-n", 2, "--no-show-prompt")[0]
    assert without == several.replace("---\nthe cat", "---\n")


def test_a_bad_line_of_a_prompts_file(run, tmp_path, monkeypatch):
    (tmp_path / "p").write_text("the cat\n\nsat!\na\n")
    with pytest.raises(UserError, match=r"^line 3 of .*p: 1 character"):
        draw(monkeypatch, run, "--prompts-file", tmp_path / "p")


@pytest.mark.parametrize("which", ["run", "byte_run"])
def test_an_empty_prompt_starts_a_line(request, monkeypatch, which):
    folder = request.getfixturevalue(which)
    out = draw(monkeypatch, folder, "--max-new-tokens", 10, "--temperature", 0)[0]
    model, tokenizer, _ = open_run(folder)
    ids = tokenizer.encode("\n").tolist()
    assert ids == ([0] if which == "run" else [10])
    with torch.no_grad():
        for _ in range(10):
            ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    assert out == tokenizer.decode(ids[1:]) + "\n"  # the newline it started from isn't shown


def test_prompt_files(run, tmp_path, monkeypatch):
    common = ("--max-new-tokens", 6, "--temperature", 0)
    (tmp_path / "p").write_bytes(b"the cat\r\nsat")
    wanted = draw(monkeypatch, run, "--prompt", "the cat\nsat", *common)[0]
    assert draw(monkeypatch, run, "--prompt-file", tmp_path / "p", *common)[0] == wanted
    assert draw(monkeypatch, run, "--prompt-file", "-", *common, stdin=b"the cat\nsat")[0] == wanted
    (tmp_path / "q").write_bytes(b"\xef\xbb\xbfthe cat\nsat on\n\na\n")
    out = draw(monkeypatch, run, "--prompts-file", tmp_path / "q", *common)[0]
    alone = [
        draw(monkeypatch, run, "--prompt", prompt, *common)[0].rstrip("\n")
        for prompt in ("the cat", "sat on", "", "a")
    ]
    assert texts(out) == alone
    assert (
        draw(monkeypatch, run, "--prompts-file", "-", *common, stdin=b"the cat\nsat on\n\na")[0]
        == out
    )
    both = draw(monkeypatch, run, "--prompts-file", tmp_path / "q", "--num-samples", 2, *common)[0]
    assert texts(both) == [text for text in alone for _ in range(2)]


@pytest.mark.parametrize("content", [None, b"\xff\xfeh\x00", "folder"])
def test_prompt_files_that_cannot_be_read(tmp_path, content):
    path = tmp_path / "p"
    if content == "folder":
        path.mkdir()
    elif content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=f"the prompt file {path}") as caught:
        read_prompts(prompt_file=str(path))
    assert len(str(caught.value).splitlines()) <= 2


def test_a_prompt_file_in_another_encoding_is_told_which(tmp_path):
    path = tmp_path / "p"
    path.write_bytes("Où est-il allé, l\u2019été dernier ?".encode("cp1252"))
    with pytest.raises(UserError, match=r"isn't UTF-8: byte 0xf9.*\nmake it UTF-8.* -f cp1252 "):
        read_prompts(prompt_file=str(path))


def test_unknown_characters_are_listed(run):
    out, error = command("sample.py", run, "--prompt", "the \u4e2d \U0001f600 XYZ", code=2)
    assert out == ""
    read, *said = error.strip().split("\n")
    assert read.startswith("reading ")
    assert said[0].startswith("error: ")
    assert len(said) <= 2
    for character in ("'X'", "'Y'", "'Z'", "\\u4e2d", "\\U0001f600"):
        assert character in error


def test_a_prompt_three_times_the_context(run, monkeypatch):
    """Its last 16 characters are what counts, and a line says so; 50 characters take it past the
    edge once more.
    """
    long = nonsense(200, seed=5)[:96]
    common = (run, "--max-new-tokens", 50, "--temperature", 0)
    out, error, _ = draw(monkeypatch, *common, "--prompt", long)
    short = draw(monkeypatch, *common, "--prompt", long[-16:])[0]
    assert out.startswith(long)
    assert out[len(long) :] == short[16:]
    assert (
        error.split("\n", 1)[1]
        == "note: a prompt has 96 tokens, the context holds 32: its last 16 are read\n"
    )


# --- what is refused ---


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"temperature": -0.1}, "temperature is -0.1; it must be at least 0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": float("inf")}, "temperature is inf"),
        ({"top_k": -1}, "top_k is -1"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"top_p": float("nan")}, "top_p is nan"),
        ({"num_samples": 0}, "num_samples is 0"),
        ({"max_new_tokens": -1}, "max_new_tokens is -1"),
        ({"seed": -1}, "seed is -1"),
        ({"stop": ("a", "")}, "a stop string is empty"),
        (
            {"prompt": "a", "prompt_file": "b"},
            "--prompt and --prompt-file are given; take one of them",
        ),
        ({"prompt_file": "a", "prompts_file": "b"}, "--prompt-file and --prompts-file are given"),
    ],
)
def test_bad_values(options, words):
    names = {field.name for field in dataclasses.fields(Sampling)}
    drawing = {name: value for name, value in options.items() if name in names}
    others = {name: value for name, value in options.items() if name not in names}
    with pytest.raises(ValueError, match=words):
        Options("r", **(others | {"sampling": Sampling(**drawing)} if drawing else others))


def test_bad_values_on_the_command_line(tmp_path):
    """No torch is needed to say so."""
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')")
    quick = {"cwd": tmp_path, "env": {"PYTHONPATH": str(tmp_path)}}
    for arguments, word in (
        (["r", "--top-p", "2"], "top_p is 2.0"),
        (["r", "--tempature", "1"], "--tempature"),
        ([], "Missing"),
    ):
        out, error = command("sample.py", *arguments, code=2, **quick)
        assert out == ""
        assert word in error
    out, error = command("sample.py", "--help", **quick)
    assert error == ""
    assert "--max-new-tokens" in out
    assert "Below 1 likelier tokens gain" in out


def test_runs_that_are_none(tmp_path):
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(UserError):
            open_run(path)


# --- what is shown ---


def test_one_text_is_shown_as_it_is_drawn(run, monkeypatch):
    out, _, pieces = draw(monkeypatch, run, "--prompt", "the", "--max-new-tokens", 10)
    assert "".join(pieces) == out
    assert len([piece for piece in pieces if len(piece) == 1 and piece in nonsense()]) >= 10


def test_never_half_a_character(byte_run, monkeypatch):
    """Whole characters of three and four bytes, piece by piece; at the very end what was never
    completed is U+FFFD.
    """
    out, _, pieces = draw(
        monkeypatch, byte_run, "--prompt", CHINESE[0], "--max-new-tokens", 64, "--temperature", 0
    )
    assert "".join(pieces) == out
    shown = out[1:-1]
    assert sum(character in CHINESE for character in shown) >= len(shown) - 1
    assert len(shown.encode()) >= 60
    assert any(character in shown for character in "\U0001f600\U0001f680")
    assert "\ufffd" not in shown[:-1]


def test_stop_strings_of_several_bytes(byte_run, monkeypatch):
    whole = draw(
        monkeypatch, byte_run, "--prompt", CHINESE[0], "--max-new-tokens", 64, "--temperature", 0
    )[0]
    stop = whole[5:7]
    cut = draw(
        monkeypatch,
        byte_run,
        "--prompt",
        CHINESE[0],
        "--max-new-tokens",
        64,
        "--temperature",
        0,
        "--stop",
        stop,
    )[0]
    assert cut == whole[: whole.index(stop, 1)] + "\n"


def test_stop_strings_of_each_row(run, monkeypatch):
    """Each row ends at its own first stop; the text of the others goes on."""
    common = (
        run,
        "--prompt",
        "a",
        "--max-new-tokens",
        60,
        "--temperature",
        1.0,
        "--num-samples",
        4,
        "--seed",
        3,
    )
    whole = texts(draw(monkeypatch, *common)[0])
    stops = ("at", ".\n", " s")
    cut = texts(
        draw(monkeypatch, *common, *(word for stop in stops for word in ("--stop", stop)))[0]
    )
    expected = []
    for text in whole:
        first = min((at for stop in stops if (at := text.find(stop, 1)) >= 0), default=len(text))
        expected.append(text[:first])
    assert cut == expected
    assert len({len(text) for text in cut}) > 1
    assert all(len(text) < len(before) for text, before in zip(cut, whole, strict=True))


def test_drawing_ends_with_the_last_row(run, monkeypatch):
    from model import generate as module

    steps = []
    plain = module.next_token
    monkeypatch.setattr(
        module, "next_token", lambda logits, *drawing: steps.append(1) or plain(logits, *drawing)
    )
    out = draw(monkeypatch, run, "--prompt", "a", "--max-new-tokens", 300, "--stop", " ")[0]
    assert len(steps) == len(out) - len("a\n") + 1


# --- a row of text ---


class Pieces:
    """A decoder whose tokens are the texts themselves; `last` comes at the end."""

    def __init__(self, last=""):
        self.last = last

    def push(self, token):
        return token

    def finish(self):
        return self.last


def push_all(tokens, stops, last=""):
    row = TextRow(Pieces(last), stops)
    shown = [row.push(token) for token in tokens]
    return [*shown, row.push(None)], row


@pytest.mark.parametrize(
    ("tokens", "stops", "shown"),
    [
        (["ab", "cd"], (), ["ab", "cd", ""]),
        (["ab", "cd"], ("x",), ["ab", "cd", ""]),
        (["ab", "cd", "ef"], ("cd",), ["ab", "", "", ""]),
        (["ab", "cd", "ef"], ("bc",), ["a", "", "", ""]),  # the b was held back
        (["ab", "xd"], ("bc",), ["a", "bxd", ""]),  # and is shown once it is no stop
        (["a", "b", "c", "d"], ("abcd",), ["", "", "", "", ""]),
        (["a", "b", "c", "e"], ("abcd",), ["", "", "", "abce", ""]),
        (["a", "a", "a", "b"], ("aab",), ["", "", "a", "", ""]),  # overlaps itself
        (["ab", "ab", "ac"], ("abac",), ["", "ab", "", ""]),
        (["xab"], ("abc", "b"), ["xa", ""]),
        (["x", "a", "b", "c"], ("abc", "bd"), ["x", "", "", "", ""]),
        (["x", "a", "b", "d"], ("abc", "bd"), ["x", "", "", "a", ""]),
        (["ab"], ("abc",), ["", "ab"]),  # the end decides: no stop
        (["hello STOP world"], ("STOP",), ["hello ", ""]),
        (["one two one"], ("two", "one"), ["", ""]),  # the first in the text, not in the list
        (["a", "", "b"], ("ab",), ["", "", "", ""]),  # tokens that complete no character
    ],
)
def test_text_row(tokens, stops, shown):
    found, row = push_all(tokens, stops)
    assert found == shown
    assert row.text == "".join(shown)
    assert row.done


def test_text_row_at_the_end():
    assert push_all(["a"], (), last="\ufffd")[0] == ["a", "\ufffd"]
    assert push_all(["ab"], ("bc",), last="c")[0] == ["a", ""]  # a stop that the end completes
    assert push_all(["ab"], ("b",), last="c")[0] == ["a", ""]  # nothing behind a stop
    row = TextRow(Pieces(), ())
    assert [row.push("a"), row.push(None), row.push("b"), row.push(None)] == ["a", "", "", ""]


def test_text_row_however_the_text_is_cut():
    """One stop, any cut into tokens: what is shown in the end is what stands before the stop, and
    nothing is shown too early.
    """
    draw_cut = random.Random(0)
    for _ in range(300):
        text = "".join(draw_cut.choices("ab", k=12))
        stop = "".join(draw_cut.choices("ab", k=draw_cut.randint(1, 4)))
        cuts = sorted(draw_cut.sample(range(13), 5))
        tokens = [text[a:b] for a, b in zip([0, *cuts], [*cuts, 12], strict=True)]
        found, row = push_all(tokens, (stop,))
        assert "".join(found) == row.text == text.partition(stop)[0]


def test_text_row_of_bytes():
    row, shown = TextRow(StreamDecoder(ByteTokenizer()), ("\u754c",)), []
    for token in "a\u4e16\U0001f600\u754cb".encode():
        shown.append(row.push(token))
    assert shown == ["a", "", "", "\u4e16", "", "", "", "\U0001f600", "", "", "", ""]
    assert row.done


# --- a run is all that is needed ---


def test_what_an_empty_prompt_starts_from(tmp_path, monkeypatch):
    """A run on one text with a separator that it never met: a newline. The run alone knows."""
    tokenizer = ByteTokenizer(separator=True)
    data = write_corpus(tmp_path / "d", nonsense(1500), tokenizer=tokenizer)
    config = make_config(data, tmp_path / "run", **SHAPE, **(QUICK | {"max_steps": 4}))
    assert train_here(config) == 0
    shutil.rmtree(data)
    common = (tmp_path / "run", "--max-new-tokens", 12, "--temperature", 0)
    out, error, _ = draw(monkeypatch, *common)
    assert "note: an empty prompt starts from a newline, as training has seen no sep" in error
    assert "\n" + out == draw(monkeypatch, *common, "--prompt", r"\n")[0]


def test_an_earlier_checkpoint_is_looked_up_in_its_data(tmp_path, monkeypatch):
    tokenizer = ByteTokenizer(separator=True)
    data = write_corpus(tmp_path / "d", nonsense(1500), tokenizer=tokenizer)
    config = make_config(data, tmp_path / "run", **SHAPE, **(QUICK | {"max_steps": 2}))
    assert train_here(config) == 0
    state = load(tmp_path / "run" / "best.pt")
    assert state.counters.pop("start") == 10
    save(state, tmp_path / "run" / "best.pt")
    assert open_run(tmp_path / "run")[1].start == 10
    write_corpus(tmp_path / "d", nonsense(1600), tokenizer=tokenizer)  # other data
    assert open_run(tmp_path / "run")[1].start is None
    shutil.rmtree(data)
    assert open_run(tmp_path / "run")[1].start is None
    error = draw(monkeypatch, tmp_path / "run", "--max-new-tokens", 1)[1]
    assert "starts from the separator of documents, if training has seen one" in error


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["norm.weight", "blocks.0.attention.query.weight"])
def test_weights_that_are_no_numbers(run, tmp_path, monkeypatch, value, name):
    state = load(run / "best.pt")
    weights = {key: tensor.clone() for key, tensor in state.model.items()}
    weights[name].view(-1)[-1] = value
    save(dataclasses.replace(state, model=weights), tmp_path / "best.pt")
    with pytest.raises(UserError, match=rf"best\.pt can't be used: 1 of the .* in {name} are NaN"):
        draw(monkeypatch, tmp_path, "--prompt", "a", "--temperature", 0)


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_logits_that_are_no_numbers(run, tmp_path, monkeypatch, temperature):
    """Finite weights, but so large that their product isn't."""
    state = load(run / "best.pt")
    weights = {key: tensor * 1e25 for key, tensor in state.model.items()}
    save(dataclasses.replace(state, model=weights), tmp_path / "best.pt")
    with pytest.raises(UserError, match="logits are not finite, though its weights are"):
        draw(monkeypatch, tmp_path, "--prompt", "a", "--temperature", temperature)


def test_the_data_may_have_changed(run, tmp_path, monkeypatch):
    """Prepared again with another tokenizer, or gone: the run samples with its own."""
    common = ("--prompt", "the", "--max-new-tokens", 12, "--temperature", 0)
    before = draw(monkeypatch, run, *common)[0]
    shutil.copytree(run.parent, tmp_path / "copy")
    write_byte_corpus(tmp_path / "copy" / "d", nonsense())
    assert draw(monkeypatch, tmp_path / "copy" / "run", *common)[0] == before
    shutil.rmtree(tmp_path / "copy" / "d")
    for name in ("config.json", "log.jsonl"):
        (tmp_path / "copy" / "run" / name).unlink()
    assert draw(monkeypatch, tmp_path / "copy" / "run", *common)[0] == before


def test_the_end_of_a_document_ends_the_text(tmp_path, monkeypatch):
    """Where the likeliest token is the separator nothing is shown, neither its name nor what would
    follow.
    """
    text = "ab" * 300
    data = write_corpus(tmp_path / "d", text, tokenizer=CharTokenizer("ab", separator=True))
    assert (
        train_here(make_config(data, tmp_path / "run", max_steps=1, tie_embeddings=False, **SHAPE))
        == 0
    )
    state = load(tmp_path / "run" / "best.pt")
    state.model["norm.weight"] = torch.zeros(32)
    state.model["norm.bias"] = torch.ones(32)
    state.model["unembed.weight"] = torch.tensor([[0.0], [0.0], [1.0]]).expand(3, 32).clone()
    save(state, Path(tmp_path / "run.pt"))
    assert draw(monkeypatch, tmp_path / "run.pt", "--prompt", "ab", "--temperature", 0)[0] == "ab\n"
