"""Lists in an order are noticed; shuffled ones, verse and prose are not."""

import random
from math import log2

import numpy as np
import pytest

from data.order import LineSample, jensen_shannon, order_of

SYLLABLES = ["ka", "lo", "mi", "ren", "sta", "vi", "den", "or", "tha", "bel"]
OTHERS = ["xu", "qing", "zh", "yue", "hui"]


def items(n, syllables, seed=0):
    draw = random.Random(seed)
    return ["".join(draw.choices(syllables, k=draw.randint(1, 4))) for _ in range(n)]


def why(lines, val_fraction=0.1, chunk=1 << 18):
    sample = LineSample()
    text = "\n".join(lines) + "\n"
    for start in range(0, len(text), chunk):
        sample.add(0, text[start : start + chunk])
    return sample.why_uneven(val_fraction)


@pytest.mark.parametrize("n", [25, 60, 500, 30_000])
def test_sorted_lists(n):
    words = sorted({f"{word} {i % 997}" for i, word in enumerate(items(n, SYLLABLES))})
    assert why(words) == "the lines are sorted by letter"
    assert why(words[::-1]) == "the lines are sorted by letter"
    assert why(sorted(words, key=len)) == "the lines are sorted by length"
    random.Random(1).shuffle(words)
    assert why(words) == ""


def test_a_list_whose_end_is_another_language():
    words = items(900, SYLLABLES) + items(100, OTHERS)
    assert why(words) == "the last lines are unlike the others"
    assert why(words, chunk=7) == why(words)
    random.Random(1).shuffle(words)
    assert why(words) == ""


@pytest.mark.parametrize("seed", range(20))
def test_chance_is_no_order(seed):
    assert why(items(random.Random(seed).randint(40, 2000), SYLLABLES, seed)) == ""


def test_sentences_count_only_where_they_are_sorted():
    draw = random.Random(0)
    early = [" ".join(items(8, SYLLABLES, draw.random())) for _ in range(300)]
    late = [" ".join(items(8, OTHERS, draw.random())) for _ in range(30)]
    assert why(early + late) == ""  # prose may turn to another subject
    assert why(sorted(early + late)) == "the lines are sorted by letter"


@pytest.mark.parametrize(
    "lines",
    [
        [f"item {i:02}" for i in range(15)],  # too few
        [*["one"] * 30, "two"],  # too few to compare
        ["a" * 300 + str(i) for i in range(1000)],  # long lines
        [line for i in range(1000) for line in (f"word{i:04}", "")],  # paragraphs
        ["ab"] * 500,
        [],
    ],
)
def test_what_is_no_list(lines):
    assert why(lines) == ""


def test_a_text_without_lines_is_not_kept():
    sample = LineSample()
    for _ in range(100):
        sample.add(0, "acgt" * 1000)
    assert sample._rest == ""
    assert not sample.is_list


def test_the_sample_is_even_and_bounded(monkeypatch):
    monkeypatch.setattr("data.order.SAMPLE", 10)
    sample = LineSample()
    for start in range(0, 1000, 9):
        sample.add(0, "".join(f"{i}\n" for i in range(start, min(start + 9, 1000))))
    steps = np.diff([int(line) for line in sample.lines])
    assert len(sample.lines) <= 20
    assert sample.lines[0] == "0"
    assert set(steps) == {64}


def test_the_latest_of_a_few_documents_is_looked_at():
    sample = LineSample()
    sample.add(0, "prose " * 1000)
    sample.add(1, "".join(f"{word}\n" for word in sorted(set(items(500, SYLLABLES)))))
    assert sample.why_uneven(0.1) == "the lines are sorted by letter"


def test_order_by_hand():
    assert order_of([f"Word{i:02}" for i in range(12)]) == "by letter"
    assert order_of(["x" * i for i in range(12)]) == "by length"  # and by letter
    assert order_of(["b", "a"] * 12) == ""


def test_divergence_by_hand():
    assert jensen_shannon(np.array([2, 0]), np.array([0, 5])) == 1
    assert jensen_shannon(np.array([1, 3]), np.array([2, 6])) == 0
    # p = (1, 0), q = (1/2, 1/2), middle (3/4, 1/4)
    expected = (log2(4 / 3) + (log2(2 / 3) + log2(2)) / 2) / 2
    assert jensen_shannon(np.array([4, 0]), np.array([1, 1])) == pytest.approx(expected)
