"""Head and loss in one function, in chunks, against plain cross-entropy in float64."""

import contextlib
import multiprocessing
import os
import socket

import pytest
import torch
import torch.nn.functional as F
from helpers import MODERN, PRELOADED, make_config, make_model

from ops.compiling import WithLoss, recompute_blocks
from ops.device import autocast
from ops.distributed import Processes, gather
from ops.messages import loss_text
from training import head_loss
from training.head_loss import chunk_rows, in_chunks, model_loss, pad_weight, padded_size
from training.loss import cross_entropy

EPSILON = {torch.float32: 2**-24, torch.bfloat16: 2**-9, torch.float16: 2**-12}
"""Half the distance of neighbours between 1 and 2: the rounding of one operation."""


def draw(n_row, vocab_size, dtype=torch.float64, width=16):
    """Features (1, n_row, width), a weight and targets, from a seed, rounded to `dtype`."""
    draw = torch.Generator().manual_seed(vocab_size + n_row)
    features, weight = (
        torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype).requires_grad_()
        for shape in ((1, n_row, width), (vocab_size, width))
    )
    return features, weight, torch.randint(vocab_size, (1, n_row), generator=draw)


def plain(features, weight, targets, reduction="mean"):
    """Loss and gradients of the plain way, in float64."""
    inputs = [x.detach().double().requires_grad_() for x in (features, weight)]
    loss = F.cross_entropy(F.linear(*inputs)[0], targets[0], reduction=reduction)
    return (loss, *torch.autograd.grad(loss, inputs))


@pytest.mark.parametrize("vocab_size", [65, 128, 63, 2, 129])
@pytest.mark.parametrize(("n_row", "rows"), [(30, 30), (30, 10), (31, 10), (31, 30), (1, 10)])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_against_plain_cross_entropy_in_float64(vocab_size, n_row, rows, reduction):
    """Chunks of equal and unequal length; a mean is over all rows, not of the chunks' means."""
    features, weight, targets = draw(n_row, vocab_size)
    loss = head_loss.head_loss(features, weight, targets, reduction, rows)
    gradients = torch.autograd.grad(7 * loss, (features, weight))
    expected, *expected_gradients = plain(features, weight, targets, reduction)
    torch.testing.assert_close(loss, expected, rtol=1e-14, atol=0)
    for found, right in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(found, 7 * right, rtol=1e-12, atol=1e-14)
    with torch.no_grad():
        read = head_loss.head_loss(features, weight, targets, reduction, rows)
    torch.testing.assert_close(read, expected, rtol=1e-14, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab_size", [65, 128])
def test_under_autocast(dtype, vocab_size):
    """Weights and features are rounded to `dtype`, loss and sums over 50 chunks are float32: what
    is wrong comes of the products' own rounding. Gradients have the inputs' dtype.
    """
    features, weight, targets = draw(1000, vocab_size, torch.float32)
    with torch.no_grad():
        features.copy_(features.to(dtype))
        weight.copy_(weight.to(dtype) / 4)
    with torch.autocast("cpu", dtype=dtype):
        loss = head_loss.head_loss(features, weight, targets, n_row=20)
    gradients = torch.autograd.grad(loss * 1024, (features, weight))
    expected, *expected_gradients = plain(features, weight, targets)
    assert loss.dtype == torch.float32
    largest = F.linear(features, weight).abs().max().item()
    assert loss.item() == pytest.approx(expected.item(), abs=2 * EPSILON[dtype] * largest)
    for found, right in zip(gradients, expected_gradients, strict=True):
        assert found.dtype == torch.float32
        error = (found / 1024 - right).abs().max() / right.abs().max()
        assert error < 3 * EPSILON[dtype]


def test_float32_is_as_exact_as_the_plain_way():
    features, weight, targets = draw(500, 129, torch.float32)
    loss = head_loss.head_loss(features, weight, targets, n_row=128)
    gradients = torch.autograd.grad(loss, (features, weight))
    expected, *expected_gradients = plain(features, weight, targets)
    assert loss.item() == pytest.approx(expected.item(), rel=8 * EPSILON[torch.float32])
    for found, right in zip(gradients, expected_gradients, strict=True):
        assert (found - right).abs().max() < 16 * EPSILON[torch.float32] * right.abs().max()


def test_a_mean_gradient_too_small_for_float16_is_not_lost():
    """A loss over many rows divides by their number at the end, not in float16: without a scaler
    hardly any of these gradients, of 3e-8 at most, would be there.
    """
    features, weight, targets = draw(2000, 65, torch.float32)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = head_loss.head_loss(features, weight, targets, n_row=1000) * 1e-5
    (found,) = torch.autograd.grad(loss, features)
    right = plain(features, weight, targets)[1] * 1e-5
    assert right.abs().max() < 2**-24  # float16's least number
    assert (found - right).abs().max() < 8 * EPSILON[torch.float16] * right.abs().max()


def test_padding_takes_no_part():
    """The rows that pad are zero and would draw logits of 0. Where all real logits are -1,000, any
    share of the probability for them would be all of it.
    """
    weight = torch.full((65, 4), -250.0, requires_grad=True)
    features = torch.ones(1, 6, 4, requires_grad=True)
    targets = torch.arange(6)[None]
    assert pad_weight(weight, torch.bfloat16).shape == (128, 4)
    assert pad_weight(weight, torch.bfloat16)[65:].count_nonzero() == 0
    loss = head_loss.head_loss(features, weight, targets, n_row=4)
    assert loss.item() == pytest.approx(torch.log(torch.tensor(65.0)).item(), rel=1e-6)
    loss.backward()
    assert weight.grad.shape == weight.shape
    assert weight.grad.sum(0).abs().max() < 1e-6  # softmax less one_hot sums to 0 over real ids


def test_an_aligned_weight_is_not_copied():
    weight = torch.randn(128, 4)
    assert pad_weight(weight, torch.float32) is weight


@pytest.mark.parametrize(
    ("n_row", "vocab_size", "dtype", "rows"),
    [
        # GPT-2's ids in float32 take 201,216 bytes a row: 5,336 rows are 1 GiB, 5,248 by 128s.
        (16 * 1024, 50_257, torch.bfloat16, 4096),
        (64 * 1024, 50_257, torch.bfloat16, 5120),
        (5 * 1024, 50_257, torch.bfloat16, 5120),
        (16 * 1024, 50_257, torch.float16, 1024),
        (64 * 256, 65, torch.bfloat16, 64 * 256),
        (64 * 256, 65, torch.float16, 1024),
        (300, 10**8, torch.float32, 128),
        (1000, 65, torch.float16, 1000),
    ],
)
def test_rows_of_a_chunk(n_row, vocab_size, dtype, rows):
    assert chunk_rows(n_row, vocab_size, dtype) == rows


def test_where_it_is_taken():
    assert [in_chunks(device) for device in ("cpu", "cuda:1", "mps")] == [False, True, True]
    assert [padded_size(n) for n in (1, 64, 65, 50_257)] == [64, 64, 128, 50_304]


def test_it_is_said_on_an_accelerator_alone(tmp_path):
    config = make_config("d", tmp_path, context_length=1024, precision="bfloat16")
    assert loss_text(config, 16, 50_257) == ""
    said = ", loss by 4,096 tokens at a time over 50,304 ids"
    assert loss_text(config.replace(device="cuda"), 16, 50_257) == said


@pytest.fixture
def forced(monkeypatch):
    """A CPU that counts as an accelerator, with chunks of ten rows."""
    monkeypatch.setattr(head_loss, "in_chunks", lambda device: True)
    monkeypatch.setattr(head_loss, "chunk_rows", lambda *_: 10)


def gradients_of(model, compute, precision="float32", scaler=None):
    """The gradients that two micro-batches add up to, by the parameters' names."""
    tokens = torch.arange(48).reshape(2, 3, 8) % 11
    for part in tokens:
        with autocast("cpu", precision):
            loss = compute(part, part.flip(0))
        (scaler.scale(loss) if scaler else loss).backward()
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("options", [{}, MODERN, {"tie_embeddings": False, "bigrams": 7}])
@pytest.mark.parametrize("way", ["float32", "bfloat16", "recompute", "scaler"])
def test_a_model_learns_the_same(forced, options, way):
    """Tied and untied, accumulating, recomputing, scaled: the gradients of `model_loss` are those
    of plain cross-entropy.
    """
    precision = "bfloat16" if way == "bfloat16" else "float32"
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0) if way == "scaler" else None
    one, two = (make_model(seed=0, **options) for _ in range(2))
    if way == "recompute":
        recompute_blocks(one)
    found = gradients_of(one, WithLoss(one, cross_entropy), precision, scaler)
    right = gradients_of(two, lambda x, y: cross_entropy(two(x), y), precision, scaler)
    bound = (2.0**-6 if precision == "bfloat16" else 1e-5) * (1024 if scaler else 1)
    for name, gradient in right.items():
        assert found[name].dtype == torch.float32
        torch.testing.assert_close(found[name], gradient, rtol=bound, atol=bound / 10)


def test_evaluation_takes_it_too(forced):
    model = make_model(seed=0, vocab_size=70)
    tokens = torch.arange(24).reshape(3, 8)
    with torch.no_grad():
        total = model_loss(model, tokens, tokens, reduction="sum")
        plain_total = cross_entropy(model(tokens), tokens, reduction="sum")
    assert total.item() == pytest.approx(plain_total.item(), rel=1e-6)


def test_a_cpu_keeps_the_plain_way():
    """Bit for bit, and by `forward`."""
    model = make_model(seed=0)
    tokens = torch.arange(24).reshape(3, 8) % 11
    called = []
    model.register_forward_hook(lambda *_: called.append(1))
    assert torch.equal(model_loss(model, tokens, tokens), cross_entropy(model(tokens), tokens))
    assert len(called) == 2


def _member(rank, count, strategy, port, results):
    """One process of a group: three steps and the sums of the weights they lead to."""
    torch.set_num_threads(1)
    head_loss.in_chunks = lambda device: True
    head_loss.chunk_rows = lambda *_: 5
    if count > 1:
        address = {"init_method": f"tcp://127.0.0.1:{port}"}
        torch.distributed.init_process_group("gloo", **address, rank=rank, world_size=count)
    processes = Processes(rank, count, rank, strategy)
    model = make_model(vocab_size=70, seed=0)
    processes.shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of = processes.wrap(WithLoss(model, cross_entropy), "cpu")
    draw, rows = torch.Generator().manual_seed(1), 4 // count
    for _ in range(3):
        for is_last in (False, True):
            mine = torch.randint(70, (4, 8), generator=draw)[rows * rank : rows * (rank + 1)]
            with processes.accumulating(loss_of, is_last):
                loss_of(mine, mine.flip(1)).backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = gather(model.state_dict(), True)
    if rank == 0:
        results.put({name: value.tolist() for name, value in weights.items()})
        results.close()
        results.join_thread()
    if count > 1:
        torch.distributed.barrier()
        os._exit(0)  # gloo's threads now and then abort Python's own exit


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="no torch.distributed")
def test_processes_learn_the_same():
    """DDP's hooks see the head's gradient, and FSDP2's gathered weight is the one that is read."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["helpers", "train", *PRELOADED])
    found = {}
    for count, strategy in ((1, "ddp"), (2, "ddp"), (2, "fsdp")):
        with contextlib.closing(socket.socket()) as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        results = context.Queue()
        group = [
            context.Process(target=_member, args=(rank, count, strategy, port, results))
            for rank in range(count)
        ]
        for process in group:
            process.start()
        found[count, strategy] = results.get(timeout=60)
        for process in group:
            process.join(60)
    for together in ((2, "ddp"), (2, "fsdp")):
        for name, weights in found[1, "ddp"].items():
            mine, alone = torch.tensor(found[together][name]), torch.tensor(weights)
            torch.testing.assert_close(mine, alone, rtol=1e-4, atol=1e-6)
