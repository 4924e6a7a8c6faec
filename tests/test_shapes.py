"""The names of tensors cannot lie: a local variable of model/ that ends in _ and letters of
BTSHGKDFV has that shape.

B rows, T queries, S keys (T of them without a cache), H heads, G heads of keys and values, K head
width, D model width, F feed-forward width, V vocabulary.
"""

import ast
import re
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from model.attention import Mask, explicit_attention
from model.cache import KVCache
from model.config import ModelConfig
from model.fast_attention import fast_attention
from model.fast_sampling import prepare_for_sampling
from model.generate import _logits_with_cache, generate
from model.gpt import GPT
from model.sampling import Sampling
from model.static_decoding import StaticCache
from viz.record import record_attention

FOLDER = Path(__file__).parents[1] / "model"
SUFFIX = re.compile(r"_([BTSHGKDFV]+)$")
N_ROW, N_HEAD, D_HEAD, N_VOCABULARY = 2, 3, 4, 53


class Checker:
    """Looks at the locals of every function defined in `folder`, before each line that runs and on
    return.

    `sizes` says what each letter stands for: a number, or several where one call reads rows of
    different lengths. A size of 1 in B or H broadcasts.
    """

    def __init__(self, folder):
        self.folder, self.sizes, self.seen, self.wrong = str(folder), {}, set(), set()

    def look(self, frame, event, argument):
        for name, value in frame.f_locals.items():
            if letters := SUFFIX.search(name):
                place = (Path(frame.f_code.co_filename).name, frame.f_code.co_name, name)
                self.seen.add(place)
                shape = tuple(value.shape) if isinstance(value, torch.Tensor) else None
                if (
                    shape is None
                    or len(shape) != len(letters[1])
                    or not all(map(self.fits, letters[1], shape))
                ):
                    self.wrong.add((*place, shape or type(value).__name__))
        return self.look

    def fits(self, letter, size):
        expected = self.sizes[letter]
        return size in (expected if isinstance(expected, tuple) else (expected,)) or (
            size == 1 and letter in "BH"
        )

    @contextmanager
    def watching(self, **sizes):
        self.sizes |= sizes
        before = sys.gettrace()
        sys.settrace(
            lambda frame, *_: (
                self.look if frame.f_code.co_filename.startswith(self.folder) else None
            )
        )
        try:
            yield
        finally:
            sys.settrace(before)


def model_of(attend, **options):
    n_head = options.pop("n_head", N_HEAD)
    config = ModelConfig(
        n_layer=2, n_head=n_head, d_model=n_head * D_HEAD, context_length=9, **options
    )
    checker = Checker(FOLDER)
    checker.sizes = {
        "B": N_ROW,
        "H": n_head,
        "K": D_HEAD,
        "D": config.d_model,
        "F": config.d_mlp,
        "V": N_VOCABULARY,
    }
    assert len({*checker.sizes.values(), 5, 7}) == len(checker.sizes) + 2
    checker.sizes["G"] = config.n_key_head
    return GPT(config, N_VOCABULARY, attend), checker


OPTIONS = [
    {"positions": "learned", "mlp": "gelu"},
    {
        "positions": "sinusoidal",
        "mlp": "relu2",
        "norm": "rmsnorm",
        "tie_embeddings": False,
        "bias": False,
    },
    {"positions": "rotary", "mlp": "swiglu", "qk_norm": True, "window": 3, "dropout": 0.1},
    {"positions": "none", "window": 1, "bigrams": 5},
    {"positions": "rotary", "n_head": 6, "n_kv_head": 3, "mlp": "swiglu", "d_ff": 11},
]


def run_everything(attend, options):
    """All ways through the model; the checker that watched."""
    model, checker = model_of(attend, **options)
    tokens, lengths = torch.randint(N_VOCABULARY, (N_ROW, 7)), torch.tensor([7, 4])
    with checker.watching(T=7, S=7):
        model(tokens).sum().backward()
        model(tokens, Mask(causal=False, window=model.config.window))
        model(tokens, model.mask(lengths))
        with record_attention(model) as record:
            model(tokens)
        record[0].weights()
    with checker.watching(T=5, S=5), torch.no_grad():
        cache = KVCache(N_ROW, 9)
        model(tokens[:, :5], cache=cache)
    with checker.watching(T=2, S=7), torch.no_grad(), record_attention(model) as record:
        model(tokens[:, 5:], cache=cache)
        record[1].weights()
    model.eval()
    for use_cache in (True, False):
        for sampling in (
            {"temperature": 0},
            {"temperature": 0.5},
            {"top_k": 6},
            {"top_k": 6, "top_p": 0.8},
            {"top_p": 0.8},
        ):
            stream = generate(
                model, [[1] * 7, [2] * 7], 4, Sampling(**sampling), use_cache=use_cache
            )
            # The last step has outgrown the context and reads half of it again. With a cache all
            # but the last token are read first, then that one.
            for length in (7, 8, 9, 4):
                n_query = length
                n_key = length
                if use_cache:
                    n_query = (1, length - 1) if length in (7, 4) else 1
                    n_key = (length - 1, length)
                with checker.watching(T=n_query, S=n_key):
                    next(stream)
    with checker.watching(
        T=(1, 3, 6), S=(3, 6, 7, 8, 9)
    ):  # one row reaches the edge and is read again while the other goes on
        list(generate(model, [[1] * 7, [2] * 4], 7, Sampling(top_k=3)))
    with checker.watching(T=(1, 6), S=(6, 16)), torch.inference_mode():
        static = StaticCache(N_ROW, 9, torch.device("cpu"))
        _logits_with_cache(model, [[1] * 7, [2] * 7], static)
    prepare_for_sampling(model, torch.float32)
    cache = KVCache(N_ROW, 9)
    with checker.watching(T=7, S=7), torch.no_grad():
        model(tokens, cache=cache)
    with checker.watching(T=1, S=8), torch.no_grad():
        model(tokens[:, :1], cache=cache)
    return checker


@pytest.fixture(scope="module")
def checkers():
    return [
        run_everything(attend, options)
        for attend in (explicit_attention, fast_attention)
        for options in OPTIONS
    ]


@pytest.mark.slow
def test_shapes_are_as_named(checkers):
    assert sorted(set().union(*(checker.wrong for checker in checkers)), key=str) == []


def test_every_name_was_looked_at(checkers):
    """A name that no run above meets would be believed unchecked."""
    written = set()
    for path in FOLDER.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            name = (
                node.arg
                if isinstance(node, ast.arg)
                else node.id
                if isinstance(node, ast.Name)
                else ""
            )
            if SUFFIX.search(name):
                written.add((path.name, name))
    met = {(file, name) for checker in checkers for file, _, name in checker.seen}
    assert len(written) > 20
    assert written - met == set()


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("x_BTD = x_BTD", None),
        ("y_BT = x_BTD[..., 0]", None),
        ("y_BTD = x_BTD[:1]", None),  # broadcasts
        ("y_BDT = x_BTD", "y_BDT"),
        ("y_BD = x_BTD", "y_BD"),
        ("y_BTD = x_BTD[:, :1]", "y_BTD"),
        ("y_BTD = 3", "y_BTD"),
        (
            "x_BTD = x_BTD.mT; x_BTD = x_BTD.mT",
            None,
        ),  # between two statements of one line no one looks
        ("x_BTD = x_BTD.mT\n    x_BTD = x_BTD.mT", "x_BTD"),
        ("inner = lambda z_TB: z_TB\n    inner(x_BTD[..., 0])", "z_TB"),
    ],
)
def test_a_lie_is_found(line, wrong, tmp_path):
    path = tmp_path / "lies.py"
    source = f"def lie(x_BTD):\n    {line}\n    return None\n"
    namespace = {}
    exec(compile(source, path, "exec"), namespace)
    checker = Checker(tmp_path)
    with checker.watching(B=2, T=5, D=12):
        namespace["lie"](torch.zeros(2, 5, 12))
    assert {name for _, _, name, _ in checker.wrong} == ({wrong} if wrong else set())
    with checker.watching(B=2, T=5, D=12):
        torch.nn.functional.gelu(torch.zeros(1))  # of other folders nothing is looked at
    assert {file for file, _, _ in checker.seen} == {"lies.py"}
