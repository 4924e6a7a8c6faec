"""The corpus `induction`: random words said again, of which validation shares none with training;
and that a model learns to look back on it, one head before the other.
"""

import hashlib
import json
import re

import pytest
from helpers import train_here

from configs import PRESETS
from data import prepare
from data.random_words import CONSONANTS, VOWELS, random_words
from data.tokenizer import CharTokenizer
from viz.probe import load_probe
from viz.roles import ROLES, THRESHOLD, excess


@pytest.fixture(scope="module")
def lines():
    return [line for text in random_words(3, 400).values() for line in text.splitlines()]


def takes_turns(word):
    """Whether two consonants and two vowels take turns."""
    kinds = [letter in VOWELS for letter in word]
    return kinds == [position % 4 > 1 for position in range(len(word))]


def test_a_line_is_a_word_said_again(lines):
    assert len(lines) == 1200
    times = set()
    lengths = set()
    for line in lines:
        words = line.split(" ")
        assert len(set(words)) == 1
        assert len(set(words[0])) == len(words[0])  # no letter stands twice
        assert set(words[0]) <= set(CONSONANTS + VOWELS)
        times.add(len(words))
        lengths.add(len(words[0]))
    assert times == {3, 4, 5}
    assert lengths == set(range(6, 17))
    assert sorted(CONSONANTS + VOWELS) == [chr(code) for code in range(97, 123)]


def test_no_word_stands_in_two_lines(lines):
    assert len({line.split()[0] for line in lines}) == len(lines)


def test_most_words_can_be_spoken(lines):
    spoken = [word for word in (line.split()[0] for line in lines) if takes_turns(word)]
    assert 0.55 < len(spoken) / len(lines) < 0.68
    assert {len(word) for word in spoken} >= set(range(6, 13))


def test_letters_are_drawn_evenly(lines):
    """Nothing can be known of the first letter but its kind."""
    free = [line[0] for line in lines if not takes_turns(line.split()[0])]
    counts = [free.count(letter) for letter in CONSONANTS + VOWELS]
    expected = len(free) / 26
    assert sum((count - expected) ** 2 / expected for count in counts) < 60  # chi-squared of 25


def test_it_is_the_same_everywhere():
    text = "".join(random_words(2, 30).values())
    assert text.startswith("jcuymroiv jcuymroiv jcuymroiv\nnbuexviod ")
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "9fb591881e10d260"


@pytest.mark.slow
def test_validation_is_of_words_that_training_has_not(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert prepare.prepare(prepare.Options(("induction",))) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "next: python train.py induction"
    folder = tmp_path / "data" / "prepared" / "induction-char"
    about = json.loads((folder / "dataset.json").read_text())
    assert (about["splits"]["train"]["documents"], about["splits"]["val"]["documents"]) == (18, 2)
    tokenizer = CharTokenizer(about["tokenizer"]["symbols"])
    words = {}
    for split in ("train", "val"):
        raw = (folder / f"{split}.bin").read_bytes()
        words[split] = set(tokenizer.decode(raw[::2]).split())  # uint16, and ids are below 256
        assert about["splits"][split]["tokens"] == len(raw) // 2
    assert len(words["val"]) == 6000
    assert len(words["train"]) == 54_000
    assert not words["val"] & words["train"]
    # "already prepared", the second time: the text is the same.
    assert prepare.prepare(prepare.Options(("induction",))) == 0
    assert re.search("already prepared", capsys.readouterr().out)


@pytest.mark.slow
def test_an_induction_head_forms_behind_a_previous_token_head(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert prepare.prepare(prepare.Options(("induction",))) == 0
    run = tmp_path / "run"
    assert train_here(PRESETS["induction"][1].replace(out=str(run))) == 0
    watched = load_probe(run / "attention", bytes)
    formed = watched.forming()
    names = list(ROLES)
    previous, induction = formed["previous"], formed["induction"]
    assert previous[1] == 0  # in the first layer
    assert induction[1] == 1
    assert previous[0] <= induction[0]
    # Half-way there the former is first by far.
    share = excess(watched.scores, watched.uniform)
    halfway = {}
    for role in ("previous", "induction"):
        best = share[..., names.index(role)].max((1, 2))
        halfway[role] = watched.steps[int((best >= THRESHOLD / 2).argmax())]
    assert halfway["previous"] < halfway["induction"]
    # The loss falls with it: by most of what it falls in all.
    records = map(json.loads, (run / "log.jsonl").read_text().splitlines())
    losses = {r["step"]: r["val_loss"] for r in records if r["kind"] == "eval"}
    before = max(step for step in losses if step <= halfway["previous"])
    after = min(step for step in losses if step >= induction[0])
    assert losses[0] == pytest.approx(3.34, abs=0.1)  # ln 28
    assert losses[before] - losses[after] > 0.5 * (losses[0] - losses[max(losses)])
    assert losses[max(losses)] < 1.65
