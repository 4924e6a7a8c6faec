"""A step of one token a row that a GPU can repeat by itself.

A GPU works off the step's few hundred small kernels faster than a program launches them. As a CUDA
graph they are launched at once; but a graph repeats what was recorded: the same kernels, shapes and
addresses. So here the place of the new tokens is a tensor like the tokens themselves, keys and
values are written where it says, and queries meet all of the first `n_key` places, what lies behind
a row's end masked.
"""

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from model.attention import Mask
from model.cache import KVCache
from model.fast_sampling import allow_capture, allows_capture, attention_kernels
from model.gpt import GPT
from model.transfer import on_device, pinned

FEWEST_KEYS = 256
"""Keys that a step meets at least; then twice as many, and so on, a graph for each number."""
EAGER_STEPS = 16
"""Steps with a number of keys before they are recorded: that costs as much as some tens of them."""


@dataclass(frozen=True)
class StaticMask(Mask):
    """A mask whose Boolean, (B, 1, 1, S), was made beforehand."""

    table: Tensor | None = None

    def allowed(self, n_query: int, n_key: int, device: torch.device | None = None) -> Tensor:
        assert self.table is not None
        return self.table


class OneToken(KVCache):
    """What `GPT.features` asks of a cache, for one token a row behind what `cache` holds, over its
    first `n_key` places. Reads nothing from the device, and no shape depends on how much is held.

    `inputs` are integers on the device, (3, B): the tokens, those before them, and their positions.
    """

    def __init__(self, cache: KVCache, inputs: Tensor, n_key: int):
        super().__init__(len(cache.lengths), n_key)
        self.cache = cache
        self.inputs = inputs
        self.row = torch.arange(len(cache.lengths), device=inputs.device)[:, None]

    def place(self, tokens_BT: Tensor, mask: Mask) -> tuple[Tensor, Mask]:
        positions_BT = self.inputs[2][:, None]
        key_position = torch.arange(self.capacity, device=tokens_BT.device)
        table = mask.may_look(positions_BT[:, :, None, None], key_position)
        return positions_BT, StaticMask(mask.causal, mask.window, lengths=(), table=table)

    def tokens_before(self, tokens_BT: Tensor) -> Tensor:
        return self.inputs[1][:, None]

    def write(self, layer: int, k_BGTK: Tensor, v_BGTK: Tensor) -> tuple[Tensor, Tensor]:
        self.cache.make_layers(layer + 1, k_BGTK)
        keys, values = self.cache.layers[layer]
        for store, new in ((keys, k_BGTK), (values, v_BGTK)):
            store[self.row, :, self.inputs[2][:, None]] = new.transpose(1, 2)
        return keys.narrow(2, 0, self.capacity), values.narrow(2, 0, self.capacity)

    def advance(self) -> None:
        """Nothing: whoever fills `inputs` counts."""


def static_step(model: GPT, token: OneToken) -> Tensor:
    """logits_BV behind the tokens of `token.inputs`, whose keys and values are written. Once more
    with the same inputs it does the same.
    """
    return model.unembed(model.features(token.inputs[0][:, None], cache=token)[:, -1])


@contextlib.contextmanager
def uncached_autocast() -> Iterator[None]:
    """Within it autocast rounds a weight each time: one that it has rounded and kept is freed when
    its context ends, and a graph would go on reading there.
    """
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


class CapturedStep:
    """A function without arguments as a CUDA graph on `device`. It reads what stands, whenever it
    is called, in the tensors that it was recorded with, and returns one tensor, which the next call
    overwrites.
    """

    def __init__(self, function: Callable[[], Tensor], device: torch.device):
        self.device = device
        with torch.cuda.device(device), uncached_autocast():
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                function()  # what libraries set up at first is not to be recorded
                self.graph = torch.cuda.CUDAGraph()
                # Other threads (a loader's, NCCL's watchdog) may go on meanwhile.
                mode = "thread_local"
                with torch.cuda.graph(self.graph, stream=stream, capture_error_mode=mode):
                    self.result = function()
            torch.cuda.current_stream().wait_stream(stream)

    def __call__(self) -> Tensor:
        with torch.cuda.device(self.device):
            self.graph.replay()
        return self.result


class StaticCache(KVCache):
    """A KVCache whose `step` is a `static_step`, recorded where `captures`. Prompts are read into
    it as into any other.

    `lengths`, on the host, say how much each row holds; the device is told with the tokens, in one
    copy that nobody waits for.
    """

    def __init__(self, n_row: int, capacity: int, device: torch.device, captures: bool = False):
        super().__init__(n_row, 16 * -(-capacity // 16))  # of which the kernel wants masks
        self.captures = captures
        self.inputs = torch.zeros(3, n_row, dtype=torch.int64, device=device)
        self.n_step: Counter[int] = Counter()
        self.captured: dict[int, CapturedStep] = {}

    def step(self, model: GPT, rows: Sequence[Sequence[int]]) -> Tensor:
        """As `KVCache.step`; the next one overwrites the logits."""
        newest = [row[-1] for row in rows]
        before = [row[-2] if len(row) > 1 else 0 for row in rows]
        numbers = torch.tensor([newest, before, self.lengths])
        self.inputs.copy_(pinned(numbers, self.inputs.device), non_blocking=True)
        n_key = n_key_of(max(self.lengths) + 1, self.capacity)
        self.n_step[n_key] += 1
        if self.captures and n_key not in self.captured and self.n_step[n_key] > EAGER_STEPS:
            self._capture(model, n_key)
        if n_key in self.captured:
            logits_BV = self.captured[n_key]()
        else:
            logits_BV = self._run(model, n_key)
        self.lengths = [length + 1 for length in self.lengths]
        return logits_BV

    def _run(self, model: GPT, n_key: int) -> Tensor:
        """The step over `n_key` keys."""
        with attention_kernels(self.inputs.device):
            return static_step(model, OneToken(self, self.inputs, n_key))

    def _capture(self, model: GPT, n_key: int) -> None:
        """Record the step; where that fails, say so in one line, and neither this model nor this
        cache tries again.
        """
        run = partial(self._run, model, n_key)
        try:
            self.captured[n_key] = CapturedStep(run, self.inputs.device)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self.captures = False
            allow_capture(model, False)
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
            print(
                f"note: a step can't be recorded as a CUDA graph ({reason}): "
                "each is launched by itself, slower for small models",
                file=sys.stderr,
            )

    def replace(self, rows: list[int], other: KVCache) -> None:
        """As `KVCache.replace`, with nothing that waits for the device."""
        self.make_layers(len(other.layers), other.layers[0][0])
        index = on_device(rows, self.inputs.device)
        for mine, theirs in zip(self.layers, other.layers, strict=True):
            for store, new in zip(mine, theirs, strict=True):
                store.narrow(2, 0, other.capacity).index_copy_(0, index, new)
        for row, length in zip(rows, other.lengths, strict=True):
            self.lengths[row] = length


def n_key_of(n_held: int, capacity: int) -> int:
    """The keys that a step meets which must meet `n_held`: few different numbers, so that there are
    few graphs, and not many more than are needed.

    >>> [n_key_of(n, 1024) for n in (1, 256, 257, 600)], n_key_of(600, 1000)
    ([256, 256, 512, 1024], 1000)
    """
    n_key = FEWEST_KEYS
    while n_key < n_held:
        n_key *= 2
    return min(n_key, capacity)


def decoding_cache(model: GPT, n_row: int, capacity: int) -> KVCache:
    """The cache with which `n_row` texts are drawn: on CUDA a `StaticCache`, whose steps become
    graphs where the model's weights stay where they are (`prepare_for_sampling`); else a KVCache.
    """
    device = model.embed.weight.device
    if device.type != "cuda":
        return KVCache(n_row, capacity)
    return StaticCache(n_row, capacity, device, allows_capture(model))
