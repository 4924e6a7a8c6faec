"""Every experiment runs, in a tiny form; its sentence is judged by the numbers."""

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import ROOT, nonsense

from benchmarks.experiments import __main__ as command, common, context, induction, mask, overfit
from benchmarks.experiments.common import SMALL, Setting, is_below, judge, late, train
from data.tokenizer import CharTokenizer
from model.attention import Mask, explicit_attention
from viz.figures import make_figure

PAGE = ROOT / "docs" / "experiments.md"


@pytest.fixture
def setting():
    text = nonsense(3000)
    tokenizer = CharTokenizer("".join(sorted(set(text))))
    ids = tokenizer.encode(text)
    return Setting({"train": ids[:2000], "val": ids[2000:]}, tokenizer, seeds=(1, 2), steps=2)


@pytest.fixture
def tiny(monkeypatch):
    """Models and texts of next to no size."""
    small = replace(SMALL, n_layer=1, n_head=1, d_model=16, context_length=8)
    for module in (command.heads, command.positions, mask, overfit, context, induction):
        monkeypatch.setattr(module, "SMALL", small)
    monkeypatch.setattr(command.scale, "WIDE", replace(small, qk_norm=True))
    monkeypatch.setattr(context, "LENGTHS", (4, 8))


@pytest.mark.slow
@pytest.mark.parametrize("name", command.EXPERIMENTS)
def test_it_runs(name, setting, tiny):
    """A row a variant, each with a spread; a verdict; a picture."""
    finding = command.EXPERIMENTS[name].run(setting)
    assert len(finding.rows) >= 2
    for row in finding.rows:
        numbers = [str(value) for key, value in row.items() if key != "variant"]
        assert all(re.match(r"-?\d+\.\d+ \(", number) for number in numbers)
    assert finding.verdict.startswith(("supported: ", "not supported here: "))
    _, ((axes,),) = make_figure(4, 3)
    finding.draw(axes)
    assert axes.lines


def test_a_training_learns_and_repeats(setting):
    """The loss of a text that repeats falls; a seed gives the same losses."""
    setting = replace(setting, steps=30)
    batch = torch.tensor([[0, 1, 2, 3] * 4]), torch.tensor([[1, 2, 3, 0] * 4])
    config = replace(SMALL, n_layer=1, context_length=16, dropout=0.1)
    losses = [train(config, 4, lambda _: batch, setting, seed)[1] for seed in (1, 1, 2)]
    assert losses[0] == losses[1] != losses[2]
    assert late(losses[0]) < 0.5 < losses[0][0]


def test_what_is_below():
    """Every seed has to be, not the median alone."""
    assert is_below([1.0, 1.2, 1.1], [1.3, 1.6, 1.5]) == (True, "0.400 apart, spread 0.300")
    assert not is_below([1.0, 1.2, 1.31], [1.3, 1.6, 1.5])[0]
    assert judge([("a", True, "x")]) == "supported: a: yes (x)"
    assert judge([("a", True, "x"), ("b", False, "y")]) == (
        "not supported here: a: yes (x); b: no (y)"
    )
    assert late([9.0] * 39 + [1.0] * 2) == 1.0


def test_the_mask_that_was_forgotten():
    """All keys at their weights, those ahead too."""
    q, k, v = torch.randn(3, 1, 1, 4, 8)
    wanted = explicit_attention(q, k, v, Mask(causal=False))
    torch.testing.assert_close(mask.look_ahead(q, k, v, Mask()), wanted)


def test_the_scale_that_was_left_out():
    q, k, v = torch.randn(3, 1, 1, 4, 16, dtype=torch.float64)
    wanted = explicit_attention(4 * q, k, v, Mask())
    torch.testing.assert_close(command.scale.unscaled(q, k, v, Mask()), wanted)


def test_texts_that_repeat():
    """Each with its own period; the seed that is tested is none that is trained on."""
    texts, periods = induction.repeated(50, seed=1, step=0)
    assert texts.shape == (50, induction.LENGTH + 1)
    assert len(set(periods[:, 0].tolist())) > 5
    for text, period in zip(texts, periods[:, 0].tolist(), strict=True):
        assert torch.equal(text[period:], text[:-period])
        assert not torch.equal(text[period - 1 :], text[: -(period - 1)])
    assert not torch.equal(texts, induction.repeated(50, seed=1, step=1)[0])


def test_losses_of_first_and_of_later_tokens():
    """A model that always says what stood a period before: only what comes again is known."""

    class Copier(torch.nn.Module):
        def forward(self, tokens):
            texts, periods = induction.repeated(256, seed=0, step=0)
            logits = torch.zeros(*tokens.shape, induction.N_ID)
            for row, period in enumerate(periods[:, 0].tolist()):
                for t in range(period, tokens.shape[1]):
                    logits[row, t, texts[row, t + 1 - period]] = 50.0
            return logits

    first, again = induction.losses_of(Copier())
    assert first == pytest.approx(np.log(induction.N_ID), rel=1e-5)
    assert again == pytest.approx(0, abs=1e-5)


def test_the_page_tells_of_each_what_it_claims():
    """docs/experiments.md has a section, the command, the picture and the sentence of each."""
    page = PAGE.read_text(encoding="utf-8")
    plain = " ".join(page.split())
    for name, experiment in command.EXPERIMENTS.items():
        assert f"python -m benchmarks.experiments {name}" in page
        assert f"(pictures/experiment-{name}.svg)" in page
        assert experiment.sentence in plain
    assert set(re.findall(r"^## \d\. `(\w+)`", page, re.MULTILINE)) == set(command.EXPERIMENTS)


def test_the_command(tmp_path, monkeypatch, capsys, setting, tiny):
    """Without a name it lists; with one it prints, writes and draws."""
    monkeypatch.setattr("sys.argv", ["experiments"])
    assert command.main() == 0
    listed = capsys.readouterr().out
    assert all(f"  {name} " in listed for name in command.EXPERIMENTS)
    monkeypatch.setattr(command, "open_corpus", lambda _: (setting.tokens, setting.tokenizer))
    monkeypatch.setattr("benchmarks.machine.describe_machine", lambda: "a machine")
    out = tmp_path / "found"
    monkeypatch.setattr(
        "sys.argv", ["experiments", "heads", "--seeds", "1", "--steps", "1", "--out", str(out)]
    )
    before = torch.get_num_threads()
    assert command.main() == 0
    torch.set_num_threads(before)
    printed = capsys.readouterr().out
    assert f"claim: {command.heads.EXPERIMENT.sentence}" in printed
    assert {path.name for path in tmp_path.iterdir()} == {"found.md", "found.json", "found.svg"}


def test_without_a_corpus_it_says_how_to_make_one(tmp_path):
    with pytest.raises(command.UserError, match=r"python -m data\.prepare makes it"):
        command.open_corpus(tmp_path)


def test_names_are_those_of_the_modules():
    assert {module.__name__.split(".")[-1] for module in command.MODULES} == set(
        command.EXPERIMENTS
    )
    assert common.SMALL.n_head == 4
