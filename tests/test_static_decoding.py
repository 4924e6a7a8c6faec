"""The step that a GPU can repeat by itself gives the logits of the one it stands for, and is
recorded and repeated in the right order: shown on the CPU, with a CUDA that only takes notes.
"""

import contextlib

import pytest
import torch
from helpers import MODERN
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

import model.generate
from model import static_decoding
from model.attention import explicit_attention
from model.cache import KVCache
from model.fast_attention import fast_attention
from model.fast_sampling import allow_capture, allows_capture, prepare_for_sampling
from model.generate import generate, next_token
from model.sampling import Sampling
from model.static_decoding import (
    CapturedStep,
    OneToken,
    StaticCache,
    decoding_cache,
    static_step,
)

CPU = torch.device("cpu")
ONE = [[1, 2, 3]]
THREE = [[1, 2, 3], [4, *[5, 6] * 11, 4], [7]]
MANY = [[1 + row % 9] * (1 + row % 7) for row in range(32)]
PROMPTS = pytest.mark.parametrize("prompts", [ONE, THREE, MANY], ids=["1 row", "3", "32"])


def drawn_with(monkeypatch, network, prompts, n, make, **options):
    """(logits, tokens) of `n` steps with the cache that `make(n_row, capacity)` gives."""
    seen = []

    def spy(logits_BV, *drawing):
        seen.append(logits_BV.clone())
        return next_token(logits_BV, *drawing)

    with monkeypatch.context() as patch:
        patch.setattr(model.generate, "next_token", spy)
        patch.setattr(model.generate, "decoding_cache", lambda _, *shape: make(*shape))
        each = [torch.Generator().manual_seed(row) for row in range(len(prompts))]
        tokens = list(generate(network, prompts, n, Sampling(**options), each))
    return torch.stack(seen), tokens


def static(n_row, capacity):
    return StaticCache(n_row, capacity, CPU)


@pytest.mark.slow
@PROMPTS
@pytest.mark.parametrize("positions", ["learned", "sinusoidal", "rotary", "none"])
@pytest.mark.parametrize(
    "options",
    [{}, {"window": 3}, {"bigrams": 7}, {"qk_norm": True, "window": 2, "bigrams": 5}],
    ids=str,
)
def test_the_same_logits(tiny, monkeypatch, prompts, positions, options):
    """In float64, at every step, of ragged rows, through several numbers of keys and past the edge
    of the context, where rows are read again at different times.
    """
    monkeypatch.setattr(static_decoding, "FEWEST_KEYS", 2)
    network = tiny(positions=positions, **options)
    logits, tokens = drawn_with(monkeypatch, network, prompts, 12, KVCache)
    again, others = drawn_with(monkeypatch, network, prompts, 12, static)
    assert others == tokens
    assert_close(again, logits, rtol=0, atol=1e-11)


@pytest.mark.slow
@pytest.mark.parametrize("context_length", [1, 2, 3, 12])
@pytest.mark.parametrize("attend", [explicit_attention, fast_attention])
def test_the_same_logits_in_float32(tiny, monkeypatch, context_length, attend):
    """Laid out for drawing, and in contexts that no kernel's width divides."""
    monkeypatch.setattr(static_decoding, "FEWEST_KEYS", 2)
    network = tiny(attend, context_length=context_length, bigrams=7, window=3, **MODERN).float()
    prepare_for_sampling(network, torch.float32)
    logits, tokens = drawn_with(monkeypatch, network, THREE, 30, KVCache)
    again, others = drawn_with(monkeypatch, network, THREE, 30, static)
    assert others == tokens
    assert_close(again, logits, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float16])
def test_the_same_logits_under_autocast(tiny, monkeypatch, precision):
    """8 or 11 bits of numbers up to 10, for one token: a rounding may change the next."""
    network = tiny(positions="rotary", qk_norm=True).float()
    prepare_for_sampling(network, precision)
    with torch.autocast("cpu", dtype=precision):
        logits, _ = drawn_with(monkeypatch, network, THREE, 1, KVCache, top_k=1)
        again, _ = drawn_with(monkeypatch, network, THREE, 1, static, top_k=1)
    assert again.dtype == precision
    assert_close(again, logits, rtol=0.05, atol=0.1)


class Operations(TorchDispatchMode):
    """Notes each operation with the shapes it is given."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        shapes = tree_map_only(torch.Tensor, lambda x: tuple(x.shape), args)
        self.seen.append((str(func), str(shapes)))
        return func(*args, **(kwargs or {}))


HOST = ("_local_scalar_dense", "lift_fresh", "nonzero", "masked_select", "is_nonzero", "equal")
"""Operations that read a value, or make a tensor of numbers that the host holds."""


@torch.no_grad()
@pytest.mark.parametrize("attend", [explicit_attention, fast_attention])
@pytest.mark.parametrize(
    "options",
    [{}, MODERN, {"window": 3, "bigrams": 7}, {"positions": "sinusoidal"}, {"positions": "none"}],
    ids=str,
)
def test_nothing_depends_on_the_host(tiny, attend, options):
    """The very same operations on the very same shapes, wherever the rows end."""
    network = tiny(attend, **options)
    cache = KVCache(3, 8)
    inputs = torch.zeros(3, 3, dtype=torch.int64)
    token = OneToken(cache, inputs, 8)
    static_step(network, token)  # makes the layers
    runs = []
    for positions in ([0, 0, 0], [5, 0, 7]):
        inputs.copy_(torch.tensor([[1, 2, 3], [4, 5, 6], positions]))
        with Operations() as operations:
            static_step(network, token)
        runs.append(operations.seen)
    assert runs[0] == runs[1]
    names = {name for name, _ in runs[0]}
    assert len(names) > 10
    assert not [name for name in names if any(host in name for host in HOST)]


@torch.no_grad()
def test_once_more_is_the_same(tiny):
    """Recording runs the step two times more."""
    network = tiny(bigrams=7)
    cache = KVCache(2, 8)
    inputs = torch.tensor([[1, 2], [0, 3], [0, 0]])
    token = OneToken(cache, inputs, 8)
    first = static_step(network, token).clone()
    held = cache.layers[1][0].clone()
    assert torch.equal(static_step(network, token), first)
    assert torch.equal(cache.layers[1][0], held)


# --- recording ---


class PretendCuda:
    """torch.cuda that notes what is asked of it."""

    def __init__(self, monkeypatch, fails=None):
        self.said = []
        self.stream_now = "main"
        self.fails = fails
        for name in ("device", "Stream", "current_stream", "stream", "CUDAGraph", "graph"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))

    def device(self, device):
        return contextlib.nullcontext()

    class _Stream:
        def __init__(self, cuda, name):
            self.cuda = cuda
            self.name = name

        def wait_stream(self, other):
            self.cuda.said.append(f"{self.name} waits for {other.name}")

    def Stream(self):
        return self._Stream(self, "side")

    def current_stream(self):
        return self._Stream(self, self.stream_now)

    @contextlib.contextmanager
    def stream(self, stream):
        before = self.stream_now
        self.stream_now = stream.name
        try:
            yield
        finally:
            self.stream_now = before

    def CUDAGraph(self):
        cuda = self

        class Graph:
            def replay(self):
                cuda.said.append(f"replay on {cuda.stream_now}")

        return Graph()

    @contextlib.contextmanager
    def graph(self, graph, stream, capture_error_mode):
        self.said.append(f"begin on {stream.name}, errors {capture_error_mode}")
        yield
        if self.fails is not None:
            raise self.fails
        self.said.append("end")


def test_the_order_of_recording(monkeypatch):
    cuda = PretendCuda(monkeypatch)
    result = torch.zeros(1)

    def function():
        kept = ", roundings kept" if torch.is_autocast_cache_enabled() else ""
        cuda.said.append(f"run on {cuda.stream_now}{kept}")
        return result

    step = CapturedStep(function, torch.device("cuda:1"))
    assert cuda.said == [
        "side waits for main",
        "run on side",
        "begin on side, errors thread_local",
        "run on side",
        "end",
        "main waits for side",
    ]
    cuda.said.clear()
    assert step() is result
    assert step() is result
    assert cuda.said == ["replay on main"] * 2


def test_a_recording_that_fails_leaves_the_stream(monkeypatch):
    cuda = PretendCuda(monkeypatch, RuntimeError("no"))
    with pytest.raises(RuntimeError, match="no"):
        CapturedStep(lambda: torch.zeros(1), torch.device("cuda"))
    assert cuda.stream_now == "main"
    assert torch.is_autocast_cache_enabled()


def test_a_graph_for_each_number_of_keys(tiny, monkeypatch):
    """Recorded after a few steps with that many, and never twice; past the edge no more are
    needed. Replays give the logits that the plain step does.
    """
    monkeypatch.setattr(static_decoding, "FEWEST_KEYS", 4)
    monkeypatch.setattr(static_decoding, "EAGER_STEPS", 2)
    recorded = []

    class Replays:
        def __init__(self, function, device):
            recorded.append(function.args[-1])
            self.function = function
            self.n_call = 0

        def __call__(self):
            self.n_call += 1
            return self.function()

    monkeypatch.setattr(static_decoding, "CapturedStep", Replays)
    network = tiny(context_length=16, positions="rotary", window=5)
    caches = []

    def make(n_row, capacity):
        caches.append(StaticCache(n_row, capacity, CPU, captures=True))
        return caches[0]

    prompts = [[1], [2, 3]]
    logits, tokens = drawn_with(monkeypatch, network, prompts, 40, KVCache)
    again, others = drawn_with(monkeypatch, network, prompts, 40, make)
    assert others == tokens
    assert_close(again, logits, rtol=0, atol=1e-11)
    assert recorded == [4, 8, 16]
    n_call = {n_key: step.n_call for n_key, step in caches[0].captured.items()}
    assert n_call == {n: caches[0].n_step[n] - 2 for n in (4, 8, 16)}
    assert sum(caches[0].n_step.values()) == 40


def test_where_recording_fails(tiny, monkeypatch, capsys):
    """One line, the same text, and no second try, by this cache or for this model."""
    monkeypatch.setattr(static_decoding, "EAGER_STEPS", 2)
    cuda = PretendCuda(monkeypatch, RuntimeError("operation not permitted\nCUDA kernel errors"))
    network = tiny()
    allow_capture(network, True)
    _, tokens = drawn_with(monkeypatch, network, THREE, 20, KVCache)

    def make(n_row, capacity):
        return StaticCache(n_row, capacity, CPU, captures=allows_capture(network))

    for _ in range(2):
        assert drawn_with(monkeypatch, network, THREE, 20, make)[1] == tokens
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert said.startswith("note: a step can't be recorded as a CUDA graph (operation not permitt")
    assert len([word for word in cuda.said if word.startswith("begin")]) == 1


def test_memory_that_runs_out_is_said_elsewhere(tiny, monkeypatch):
    """Fewer texts at a time is the answer to it, not slower ones."""
    monkeypatch.setattr(static_decoding, "EAGER_STEPS", 2)
    PretendCuda(monkeypatch, torch.OutOfMemoryError("CUDA out of memory"))

    def make(n_row, capacity):
        return StaticCache(n_row, capacity, CPU, captures=True)

    with pytest.raises(torch.OutOfMemoryError):
        drawn_with(monkeypatch, tiny(), ONE, 8, make)


def test_which_cache_is_taken(tiny):
    network = tiny()
    assert type(decoding_cache(network, 2, 5)) is KVCache
    assert not allows_capture(network)
    prepare_for_sampling(network.float(), torch.float32)
    assert not allows_capture(network)  # on a CPU there is nothing to record
    cache = StaticCache(2, 13, CPU)
    assert cache.capacity == 16
    assert cache.inputs.shape == (3, 2)
