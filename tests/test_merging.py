"""The program that learns a BPE's merges: what it reads, and that it says what rustbpe says."""

import base64
import io
import json
import subprocess
import sys

import pytest

from data import merging


def packed(*texts, end=True):
    messages = [text.encode() for text in texts]
    raw = b"".join(len(message).to_bytes(4, "little") + message for message in messages)
    return raw + (merging.END.to_bytes(4, "little") if end else b"")


def test_texts_as_they_were_sent():
    texts = ["one", "", "\u4e2d\n\u6587" * 1000]
    assert list(merging.read_texts(io.BytesIO(packed(*texts) + b"rest"))) == texts


@pytest.mark.parametrize("raw", [b"", packed("one", end=False), packed("one")[:-2]])
def test_texts_that_end_in_the_middle(raw):
    with pytest.raises(EOFError):
        list(merging.read_texts(io.BytesIO(raw)))


def test_the_answer_is_rustbpes():
    import rustbpe

    text = "the cat sat on the mat, the hat's cat"
    trainer = rustbpe.Tokenizer()
    trainer.train_from_iterator(iter([text]), 262, buffer_size=256)
    done = subprocess.run(
        [sys.executable, "-P", merging.__file__],
        input=b'{"n_tokens": 262}\n' + packed(text),
        capture_output=True,
        check=True,
    )
    answer = json.loads(done.stdout)
    ranked = sorted(trainer.get_mergeable_ranks(), key=lambda item: item[1])
    assert [base64.b64decode(token) for token in answer["tokens"]] == [bytes(t) for t, _ in ranked]
    assert answer["pattern"] == trainer.get_pattern()
    assert done.stderr == b""
