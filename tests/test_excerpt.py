"""The stretch of a text that attention is looked at on: where much is said again, whatever the
corpus.
"""

import random

import numpy as np
import pytest
from helpers import nonsense

from data import excerpt
from data.excerpt import choose_excerpt
from data.tokenizer import ByteTokenizer, CharTokenizer

DIALOGUE = "\n\n".join(["ANNA:\nIs it you?", "BERTHOLD:\nIt is I.", "ANNA:\nThen come."] * 2) + "\n"
TITLE = "THE TITLE OF THE PLAY\n\nDramatis Personae\n\n"


def letters(n, seed=0, alphabet="abcdefghijklmnopqrstuvwxyz"):
    return "".join(random.Random(seed).choices(alphabet, k=n))


def prose(n, seed=0):
    """Paragraphs in which hardly anything stands twice."""
    return "".join(f"{letters(70, seed + i)}\n\n" for i in range(n))


def chosen(text, n_token, tokenizer=None):
    tokenizer = tokenizer or CharTokenizer("".join(sorted(set(text))))
    ids = choose_excerpt(tokenizer.encode(text), tokenizer, n_token)
    assert len(ids) == min(n_token, len(tokenizer.encode(text)))
    return tokenizer.decode(ids)


@pytest.mark.parametrize("kind", [None, ByteTokenizer()])
def test_dialogue_is_found_from_the_beginning_of_a_speech(kind):
    text = TITLE + prose(40) + DIALOGUE + "\n" + prose(40, seed=100)
    found = chosen(text, 60, kind)
    assert found == chosen(text, 60, kind)
    assert found.startswith(("ANNA:\n", "BERTHOLD:\n"))
    assert text[text.index(found) - 2 :].startswith("\n\n")
    assert found in DIALOGUE


def test_what_is_said_over_and_over_counts_once():
    dull = "-" * 200 + "\n\n" + "=" * 200 + "\n\n" + "no\n\n" * 60
    assert chosen(dull + prose(30) + DIALOGUE + dull, 60) in DIALOGUE


def test_lines_serve_where_there_are_no_paragraphs():
    names = [f"{letters(9, seed)}\n" for seed in range(200)]
    names[120:120] = ["annabella\n", "annabell\n", "annabelle\n"]
    found = chosen("".join(names), 38)
    assert found.count("annabel") == 3
    assert f"{found.split()[0]}\n" in names


def test_any_place_serves_where_there_are_no_lines():
    text = letters(3000, alphabet="ACGT")
    motif = letters(30, seed=1, alphabet="ACGT")
    found = chosen(text[:2011] + motif * 2 + text[2011:], 60)
    assert found in motif * 3 or found.count(motif) == 2


def test_documents_begin_behind_their_separator():
    tokenizer = ByteTokenizer(separator=True)
    ids = []
    for seed in range(40):
        ids += [*(letters(20, seed) if seed != 9 else "echo, echo, echo, ec").encode(), 256]
    assert bytes(choose_excerpt(np.array(ids), tokenizer, 20)) == b"echo, echo, echo, ec"


@pytest.mark.parametrize("text", ["a", "ab\n", "\n\n\n\n", "a" * 50])
@pytest.mark.parametrize("n_token", [1, 2, 4, 16, 300])
def test_short_and_uniform_texts(text, n_token):
    assert chosen(text, n_token) in text


def test_no_more_is_searched_than_announced(monkeypatch):
    monkeypatch.setattr(excerpt, "SEARCHED", 3000)
    monkeypatch.setattr(excerpt, "CANDIDATES", 7)
    monkeypatch.setattr(excerpt, "AT_ONCE", 2)
    text = nonsense(3000) + DIALOGUE * 3
    assert chosen(text, 60) in text[:3000]


def test_pieces_are_counted_that_stand_twice_or_more():
    pieces = np.array([[1, 2, 3, 4, 5], [1, 1, 1, 1, 1], [1, 2, 1, 2, 3], [5, 5, 4, 3, 3]])
    assert excerpt._said_again(pieces).tolist() == [0, 1, 2, 2]
