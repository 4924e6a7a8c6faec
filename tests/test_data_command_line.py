"""Options given twice: said, for every command, in one way."""

import sys
from dataclasses import dataclass

import pytest
import tyro

import attention_map
import sample
from configs import Config
from data import prepare
from data.command_line import option_names, parse_options, repeated_options

FLAT = (tyro.conf.OmitArgPrefixes,)


@pytest.mark.parametrize(
    ("kind", "arguments", "named"),
    [
        (sample.Options, ["r", "--seed", "1", "--seed", "2"], ["--seed"]),
        (sample.Options, ["r", "-n", "2", "--num_samples=3"], ["--num-samples"]),
        (sample.Options, ["r", "--top-k", "1", "--top_k", "2", "--top-k=3"], ["--top-k"]),
        (sample.Options, ["r", "--stop", "a", "--stop", "b", "--prompt", "x", "--prompt", "y"], []),
        (sample.Options, ["r", "--prompt-file", "a", "--prompts-file", "b"], []),
        (attention_map.Options, ["r", "--layer", "0", "--layer", "1", "2"], ["--layer"]),
        (attention_map.Options, ["r", "--layer", "0", "1", "--head", "1"], []),
        (Config, ["--qk-norm", "--lr", "1", "--no-qk-norm", "--lr=2"], ["--qk-norm", "--lr"]),
        (Config, ["--lr", "-1", "--seed", "1"], []),
        (prepare.Options, ["a", "b", "--out", "x", "--out=y"], ["--out"]),
        (prepare.Options, ["a", "--separator"], []),
    ],
)
def test_repeated_options(kind, arguments, named):
    notes = repeated_options(kind, arguments)
    assert [note.split(" is given")[0] for note in notes] == [f"note: {name}" for name in named]
    assert all(note.endswith(" times: the last one counts") for note in notes)


def test_the_number_of_times():
    (note,) = repeated_options(sample.Options, ["r", *["--seed", "1"] * 3])
    assert "--seed is given 3 times" in note


@dataclass(frozen=True)
class Some:
    first: int = 0
    second: tyro.conf.UseAppendAction[tuple[int, ...]] = ()


def test_parsing_says_it_and_the_last_one_does_count(capsys):
    arguments = ["--first", "1", "--second", "1", "--first", "2", "--second", "2"]
    assert parse_options(Some, arguments) == Some(2, (1, 2))
    assert capsys.readouterr().err == "note: --first is given 2 times: the last one counts\n"
    assert parse_options(Some, ["--first", "3"]) == Some(3)
    assert capsys.readouterr().err == ""


def test_one_process_of_many_says_it(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    parse_options(Some, ["--first", "1", "--first", "2"])
    assert capsys.readouterr().err == ""


def test_every_command_parses_so(monkeypatch, capsys):
    """Each of the four, from its own line."""
    from ops.command_line import parse

    assert parse(["shakespeare-char", "--lr", "1", "--lr", "2"]).optim.lr == 2
    for module, line in (
        (sample, ["sample.py", "nowhere", "--seed", "1", "--seed", "2"]),
        (attention_map, ["attention_map.py", "nowhere", "--max-mb", "1", "--max-mb", "2"]),
        (prepare, ["prepare", "nowhere.txt", "--seed", "1", "--seed", "2"]),
    ):
        monkeypatch.setattr(sys, "argv", line)
        monkeypatch.setattr("signal.signal", lambda *_: None)
        with pytest.raises(Exception, match="nowhere"):
            module.main()
    said = capsys.readouterr().err
    assert [line.split()[1] for line in said.splitlines()] == [
        "--lr",
        "--seed",
        "--max-mb",
        "--seed",
    ]


def test_names_of_options():
    names, collecting = option_names(sample.Options)
    assert names["-n"] == names["--num-samples"] == "--num-samples"
    assert names["--temperature"] == "--temperature"  # of a section
    assert collecting == {"--prompt", "--stop"}
