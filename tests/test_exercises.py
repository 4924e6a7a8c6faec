"""The exercises: a right function passes, a wrong one is told why, and nothing that a learner's
file does ends the checker.

Each right function is written here as a learner would write it, apart from the product's. The
mistakes are made by changing a piece of it.
"""

import doctest
import math
import re
import subprocess
import sys

import pytest
import torch
from helpers import ROOT, environment

from errors import UserError
from exercises import check, part_2
from exercises.all import EXERCISES
from exercises.check import examine, find, in_time, judge
from exercises.kinds import FOLDER
from model.attention import CausalSelfAttention, Mask, explicit_attention
from model.config import ModelConfig
from model.gpt import Block

BY_NAME = {exercise.name: exercise for exercise in EXERCISES}
HEAD = """import math
import torch
import torch.nn.functional as F
from model.attention import Mask, attention_weights, explicit_attention
from model.positions import rotate
"""
RIGHT = {
    "softmax": """
def softmax(scores):
    top = scores.amax(dim=-1, keepdim=True)
    top = torch.where(top.isinf(), 0.0, top)
    e = torch.exp(scores - top)
    return e / e.sum(dim=-1, keepdim=True).clamp(min=1e-30)
""",
    "mask": """
def allowed(n_query, n_key, window):
    rows = []
    for t in range(n_query):
        p = t + n_key - n_query
        rows.append([s <= p and (window == 0 or p - s < window) for s in range(n_key)])
    return torch.tensor(rows)
""",
    "weights": """
def attention_weights(q, k, mask):
    scores = torch.einsum("bhtk,bhsk->bhts", q, k) / q.shape[-1] ** 0.5
    looks = mask.allowed(q.shape[2], k.shape[2])
    scores = scores + torch.where(looks, 0.0, -math.inf)
    return scores.softmax(dim=-1)
""",
    "heads": """
def multi_head(x, layer, mask):
    B, T, D = x.shape
    H, K = layer.config.n_head, layer.config.d_head
    q = layer.query(x).view(B, T, H, K).transpose(1, 2)
    k = layer.key(x).view(B, T, H, K).transpose(1, 2)
    v = layer.value(x).view(B, T, H, K).transpose(1, 2)
    out = explicit_attention(q, k, v, mask)
    return layer.project(out.transpose(1, 2).reshape(B, T, D))
""",
    "positions": """
def rotary(x, positions):
    half = x.shape[-1] // 2
    i = torch.arange(half, dtype=torch.float64)
    angle = positions[:, None, :, None] * 10000.0 ** (-2 * i / x.shape[-1])
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)
""",
    "block": """
def block(x, layers, mask):
    h = x + layers.attention(layers.attention_norm(x), mask)
    return h + layers.mlp(layers.mlp_norm(h))
""",
    "loss": """
def loss(model, text):
    logits = model(text[:, :-1])
    targets = text[:, 1:]
    logs = logits.log_softmax(dim=-1)
    return -logs.gather(-1, targets[:, :, None]).mean()
""",
    "sampler": """
def next_distribution(logits, temperature, top_k, top_p):
    rows = []
    for row in logits.double():
        p = (row / temperature).softmax(-1)
        order = p.argsort(descending=True)[: top_k or None]
        share = p[order] / p[order].sum()
        kept, total = [], 0.0
        for token, s in zip(order.tolist(), share.tolist()):
            kept.append(token)
            total += s
            if total >= top_p - 1e-9:
                break
        new = torch.zeros_like(p)
        new[kept] = p[kept]
        rows.append(new / new.sum())
    return torch.stack(rows)
""",
    "cache": """
def step(x, layer, rotation_of, past):
    q, k, v = layer.projections(x)
    n = past["k"].shape[2] if past else 0
    pair = rotation_of(torch.arange(n, n + x.shape[1])[None])
    q, k = rotate(q, *pair), rotate(k, *pair)
    if past:
        k = torch.cat([past["k"], k], dim=2)
        v = torch.cat([past["v"], v], dim=2)
    out = attention_weights(q, k, Mask()) @ v
    return layer.project(out.transpose(1, 2).reshape(x.shape)), {"k": k, "v": v}
""",
    "schedule": """
def learning_rate(step, lr, min_lr, warmup_steps, max_steps):
    if step < warmup_steps:
        return lr * (step + 1) / (warmup_steps + 1)
    done = (step - warmup_steps) / (max_steps - warmup_steps)
    if done > 1:
        return min_lr
    return min_lr + (lr - min_lr) * (1 + math.cos(math.pi * done)) / 2
""",
}
MISTAKES = [
    (
        "softmax",
        "torch.where(top.isinf(), 0.0, top)",
        "top * 0",
        "subtract the row's maximum first",
    ),
    ("softmax", "dim=-1, keepdim=True).clamp", ").clamp", "each row needs its own, sum(dim=-1"),
    ("softmax", "torch.where(top.isinf(), 0.0, top)", "top", "-inf less -inf is nan"),
    (
        "softmax",
        "top = scores.amax(dim=-1, keepdim=True)",
        "top = scores.max()",
        "own, amax(dim=-1",
    ),
    (
        "softmax",
        "e / e.sum(dim=-1, keepdim=True).clamp(min=1e-30)",
        "e",
        "not divided by their sum",
    ),
    ("mask", "s <= p", "s < p", "<= and not <"),
    ("mask", "t + n_key - n_query", "t", "the last query stands at the last key"),
    ("mask", "p - s < window", "p - s <= window", "one too wide"),
    ("mask", "(window == 0 or p - s < window)", "True", "the window is left out"),
    ("mask", "window == 0 or ", "", "a window of 0 hides everything"),
    ("mask", "torch.tensor(rows)", "~torch.tensor(rows)", "True is where a query may look"),
    ("weights", " / q.shape[-1] ** 0.5", "", "not divided by sqrt(d_head)"),
    ("weights", "** 0.5", "** 1", "it is its square root"),
    ("weights", "-math.inf", "0.0", "the mask is left out"),
    ("weights", "(looks, 0.0, -math.inf)", "(looks, -math.inf, 0.0)", "the mask is upside down"),
    (
        "weights",
        "scores + torch.where(looks, 0.0, -math.inf)\n    return scores.softmax(dim=-1)",
        "scores\n    return scores.softmax(dim=-1) * looks",
        "the mask comes after the softmax",
    ),
    ("weights", "softmax(dim=-1)", "softmax(dim=-2).nan_to_num()", "softmax goes over the queries"),
    ("weights", "scores + torch.where(looks, 0.0, -math.inf)", "scores * looks", "exp(0) is 1"),
    (
        "heads",
        "out.transpose(1, 2).reshape",
        "out.reshape",
        "without swapping back tokens and heads",
    ),
    ("heads", "view(B, T, H, K).transpose(1, 2)", "view(B, H, T, K)", "which mixes the tokens"),
    ("heads", "H, K = layer.config.n_head, layer.config.d_head", "H, K = 1, D", "one head of full"),
    ("heads", "layer.project(out", "(out", "layer.project, is left out"),
    ("heads", "v = layer.value", "v = layer.key", "it is over the values"),
    ("positions", "-2 * i", "-i", "i / K in place of 2 i / K"),
    ("positions", "positions[:,", "-positions[:,", "turns the wrong way"),
    ("positions", "positions[:,", "torch.arange(x.shape[2])[None][:,", "take `positions`"),
    ("positions", "positions[:,", "(positions + 1)[:,", "the first token is not turned"),
    ("block", "return h +", "return", "the second residual is left out"),
    ("block", "return h +", "return x +", "attention's update is lost"),
    ("block", "layers.mlp_norm(h)", "layers.mlp_norm(x)", "it is to read the sum"),
    ("block", "h = x +", "h =", "the first residual is left out"),
    ("block", "layers.mlp_norm", "layers.attention_norm", "the MLP has attention's norm"),
    ("loss", "text[:, :-1]", "text[:, 1:]", "there is no shift"),
    ("loss", ".mean()", ".sum()", "it is to be their mean"),
    ("loss", "return -", "return ", "the sign is wrong"),
    ("loss", "logits.log_softmax(dim=-1)", "logits.softmax(dim=-1).log()", "compute log_softmax"),
    ("loss", "logits.log_softmax", "logits.softmax(-1).log_softmax", "softmax is taken twice"),
    (
        "loss",
        "model(text[:, :-1])\n    targets = text[:, 1:]",
        "model(text[:, 1:])\n    targets = text[:, :-1]",
        "to the token before",
    ),
    ("sampler", "row / temperature", "row * temperature", "they are divided by it"),
    ("sampler", "[: top_k or None]", "", "top_k is left out"),
    ("sampler", "/ p[order].sum()", "", "it counts shares of what top_k has left"),
    ("sampler", "new / new.sum()", "new", "not divided by its sum"),
    ("sampler", "if total >= top_p - 1e-9", "if False", "top_p is left out"),
    ("sampler", "descending=True", "descending=False", "the least likely tokens are kept"),
    ("cache", "torch.arange(n, n + x.shape[1])", "torch.arange(x.shape[1])", "start at 0 again"),
    ("cache", "if past:", "if False:", "the past is not used"),
    ("cache", "Mask())", "Mask(causal=False))", "the mask is causal"),
    (
        "cache",
        "rotate(q, *pair), rotate(k, *pair)",
        "rotate(q, *pair), k",
        "the keys are not turned",
    ),
    ("cache", '{"k": k, "v": v}', 'past or {"k": k, "v": v}', "only the first piece is kept"),
    (
        "schedule",
        "(step + 1) / (warmup_steps + 1)",
        "step / warmup_steps",
        "the warm-up starts at 0",
    ),
    ("schedule", "/ (warmup_steps + 1)", "/ warmup_steps", "reaches lr one step early"),
    ("schedule", "min_lr + (lr - min_lr)", "lr", "it falls to min_lr"),
    ("schedule", "if done > 1", "if False", "the cosine rises again"),
    (
        "schedule",
        "done = (step - warmup_steps) / (max_steps - warmup_steps)",
        "done = step / max_steps",
        "the cosine runs over the whole run",
    ),
]


@pytest.fixture
def answer(tmp_path):
    """Writes a learner's file and gives the verdict on it, as lines."""

    def write(name, text, head=HEAD, seconds=30.0):
        exercise = BY_NAME[name]
        (tmp_path / f"{exercise.stem}.py").write_text(head + text, encoding="utf-8")
        return examine(exercise, tmp_path, seconds)

    return write


@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda exercise: exercise.name)
def test_the_product_passes_and_each_known_mistake_is_named(exercise):
    path = FOLDER / f"{exercise.stem}.py"
    assert judge(exercise, exercise.solution, path).state == "done"
    assert len(exercise.mistakes) >= 3
    for mistake in exercise.mistakes:
        verdict = judge(exercise, mistake.function, path)
        assert verdict.state == "wrong"
        assert verdict.lines[-1] == f"cause     {mistake.words}"


@pytest.mark.parametrize("name", BY_NAME)
def test_a_right_answer_passes(answer, name):
    assert answer(name, RIGHT[name]).state == "done", answer(name, RIGHT[name])


@pytest.mark.parametrize(("name", "old", "new", "words"), MISTAKES)
def test_a_typical_mistake_is_named(answer, name, old, new, words):
    assert old in RIGHT[name]
    verdict = answer(name, RIGHT[name].replace(old, new))
    assert verdict.state == "wrong"
    first_words = [line.split()[0] for line in verdict.lines[1:]]
    assert first_words[:3] == ["case", "expected", "got"]
    assert first_words[3] in ("cause", "perhaps"), verdict
    assert words in verdict.lines[-1], verdict


def test_each_exercise_has_three_mistakes_or_more():
    assert all(sum(name == one for one, *_ in MISTAKES) >= 3 for name in BY_NAME)


def test_two_mistakes_at_once_are_told_by_the_first_case(answer):
    text = RIGHT["mask"].replace("s <= p", "s < p").replace("p - s < window", "p - s < 3")
    verdict = answer("mask", text)
    assert verdict.lines[-1].startswith("perhaps   a query does not see its own token")
    strange = answer("mask", RIGHT["mask"].replace("s <= p and", "s == 1 and"))
    assert strange.lines[-1] == "usually   query t may look at keys 0 to t, itself included"


def test_the_first_row_that_differs_is_shown(answer):
    verdict = answer("mask", RIGHT["mask"].replace("t + n_key - n_query", "t"))
    assert "allowed(1, 5, 0)" in verdict.lines[1]
    assert verdict.lines[2] == "expected  True True True True True   (row 0)"
    assert verdict.lines[3] == "got       True False False False False"
    later = answer("mask", RIGHT["mask"].replace("p - s < window", "p - s <= window"))
    assert later.lines[2] == "expected  False True True False False   (row 2)"


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("None", "nothing: there is no `return`"),
        ("[0.25, 0.75]", "list, not a tensor"),
        ("scores.sum()", "a tensor of shape ()"),
        ("scores.to('meta')", "a tensor that holds no numbers, or not in the usual way"),
        ("scores > 0", "a tensor of dtype torch.bool"),
        ("scores.to(torch.complex64)", "a tensor of dtype torch.complex64"),
    ],
)
def test_what_is_no_answer_is_said(answer, value, said):
    verdict = answer("softmax", f"def softmax(scores):\n    return {value}\n")
    assert verdict.lines[2] == "expected  a tensor of real numbers, shape (2,)"
    assert verdict.lines[3] == f"got       {said}"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("def softmax(scores):\n    return scores.smax()", "(01_softmax.py, line 2: return scores"),
        (
            "def softmax(scores)\n    pass",
            "SyntaxError: expected ':'   (01_softmax.py, line 1: def",
        ),
        (
            "def softmax(x):\n    return half(x)\ndef half(x):\n    return x.half_of()",
            "(01_softmax.py, line 4: return x.half_of())",
        ),
        ("import nowhere", "No module named 'nowhere'   (01_softmax.py, line 1: import nowhere)"),
        ("import sys\nsys.exit(0)", "SystemExit: 0   (01_softmax.py, line 2: sys.exit(0))"),
        ("def smax(scores): return scores", "there is no function softmax() in 01_softmax.py"),
        ("def softmax(x):\n    return softmax(x)", "RecursionError"),
        ("def softmax():\n    pass", "TypeError: softmax() takes 0 positional arguments"),
        (
            "def softmax(x):\n    raise KeyboardInterrupt",
            "KeyboardInterrupt   (01_softmax.py, line",
        ),
        (
            "import torch\ndef softmax(x):\n    return torch.zeros(3)[9]",
            "softmax.py, line 3: return",
        ),
    ],
)
def test_an_error_is_one_line_with_the_line_of_the_file(answer, text, said):
    verdict = answer("softmax", text, head="")
    assert verdict.state == "broken"
    assert said in verdict.lines[-1]
    assert verdict.lines[-1].startswith("error     ")
    assert "\n" not in verdict.lines[-1]


def test_a_number_may_be_a_float_or_a_tensor(answer):
    text = RIGHT["loss"]
    assert answer("loss", text.replace(".mean()", ".mean().item()")).state == "done"
    assert answer("loss", text.replace(".mean()", ".mean()[None]")).state == "done"
    several = answer("loss", text.replace(".mean()", ""))
    assert several.lines[2:4] == ["expected  a number", "got       a tensor of shape (1, 3, 1)"]
    assert answer("loss", "def loss(*_): return '1'").lines[3] == "got       str, not a number"


def test_a_fault_of_the_checker_is_not_the_learners(tmp_path):
    with pytest.raises(ZeroDivisionError):
        in_time(lambda: 1 // 0, tmp_path / "x.py", 5.0)


def test_an_empty_stub_is_no_error(answer):
    verdict = answer("softmax", "def softmax(scores):\n    raise NotImplementedError\n")
    assert verdict.state == "unfilled"
    assert verdict.lines[0].startswith("write softmax() in ")
    assert verdict.lines[1] == "what it is to do: docs/exercises/01_softmax.md"


def test_a_loop_is_left_with_its_line(tmp_path):
    """In this process, with a loop that can be ended."""
    path = tmp_path / "x.py"
    path.write_text("def f(stop):\n    while not stop:\n        pass\n", encoding="utf-8")
    stop = []
    function = check.load(path, "f")
    verdict = in_time(lambda: function(stop), path, 0.2)
    stop.append(True)
    assert verdict.state == "endless"
    assert re.match(r"after 0\.2 s it was still at x\.py, line [23]: \S", verdict.lines[0])


@pytest.mark.slow
def test_a_loop_that_swallows_everything_ends_the_process(tmp_path):
    """The one test with a process of its own."""
    body = "    while True:\n        try:\n            x = x + 1\n        except:\n            x\n"
    (tmp_path / "01_softmax.py").write_text(f"def softmax(x):\n{body}", encoding="utf-8")
    line = [sys.executable, "-m", "exercises.check", "1", "--folder", tmp_path, "--seconds", "0.3"]
    done = subprocess.run(
        line, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 1, done.stderr
    assert done.stdout.splitlines()[0] == "exercise 1, softmax: does not come to an end"
    said = r"^  after 0\.3 s it was still at 01_softmax\.py, line [2-6]: \S"
    assert re.search(said, done.stdout, re.MULTILINE), done.stdout


def run_main(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["exercises.check", *arguments])
    code = check.main()
    return code, capsys.readouterr().out


def test_the_list_says_how_far_each_is(monkeypatch, capsys, tmp_path):
    for exercise in EXERCISES[:9]:
        text = HEAD + RIGHT[exercise.name]
        (tmp_path / f"{exercise.stem}.py").write_text(text, encoding="utf-8")
    (tmp_path / "01_softmax.py").write_text("def softmax(x)", encoding="utf-8")
    wrong = HEAD + RIGHT["mask"].replace("s <= p", "s < p")
    (tmp_path / "02_mask.py").write_text(wrong, encoding="utf-8")
    code, said = run_main(monkeypatch, capsys, "--folder", str(tmp_path))
    assert code == 0
    states = [line.split(maxsplit=2)[2] for line in said.splitlines()]
    wanted = ["stops with an error", "not yet right", *["done"] * 7, "stops with an error"]
    assert states == wanted


def test_one_exercise_by_number_or_name(monkeypatch, capsys, tmp_path):
    (tmp_path / "02_mask.py").write_text(HEAD + RIGHT["mask"], encoding="utf-8")
    code, said = run_main(monkeypatch, capsys, "2", "--folder", str(tmp_path))
    assert (code, said.splitlines()[0]) == (0, "exercise 2, mask: done")
    stub = "def allowed(n_query, n_key, window):\n    raise NotImplementedError\n"
    (tmp_path / "02_mask.py").write_text(stub, encoding="utf-8")
    code, said = run_main(monkeypatch, capsys, "mask", "--folder", str(tmp_path))
    assert (code, said.splitlines()[0]) == (1, "exercise 2, mask: not begun")


@pytest.mark.parametrize("word", ["11", "0", "-1", "maks", "1.5"])
def test_an_unknown_exercise_is_told_which_there_are(word):
    with pytest.raises(UserError, match="there are 1 softmax, 2 mask"):
        find(word, EXERCISES)
    assert find("03_weights", EXERCISES) is find(" 3 ", EXERCISES) is find("Weights", EXERCISES)


def test_pages_and_stubs_belong_together():
    first = ["softmax", "mask", "weights", "heads", "positions"]
    then = ["block", "loss", "sampler", "cache", "schedule"]
    assert [exercise.name for exercise in EXERCISES] == first + then
    assert [exercise.number for exercise in EXERCISES] == list(range(1, 11))
    overview = (FOLDER / "README.md").read_text(encoding="utf-8")
    for exercise in EXERCISES:
        page = (FOLDER / f"{exercise.stem}.md").read_text(encoding="utf-8")
        stub = (FOLDER / f"{exercise.stem}.py").read_text(encoding="utf-8")
        assert f"{exercise.number}. [{exercise.name}]({exercise.stem}.md)" in overview
        assert f"make exercise N={exercise.number}`" in page
        assert f"`{exercise.function}(" in page
        assert f"def {exercise.function}(" in stub
        assert max(map(len, page.split("\n"))) <= 100


@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda exercise: exercise.name)
def test_the_number_on_the_page_is_true(exercise):
    known = {
        **{"torch": torch, "math": math, "Mask": Mask, "ModelConfig": ModelConfig, "Block": Block},
        "CausalSelfAttention": CausalSelfAttention,
        "explicit_attention": explicit_attention,
        "read_in_pieces": part_2.read_in_pieces,
        exercise.function: exercise.solution,
    }
    with torch.no_grad():
        page = str(FOLDER / f"{exercise.stem}.md")
        result = doctest.testfile(page, module_relative=False, globs=known)
    assert result.attempted > 0
    assert result.failed == 0
