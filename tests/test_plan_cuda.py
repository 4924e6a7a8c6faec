"""The plan of a run on CUDA against calculations by hand: GPT-2 124M and 1.5B on a GPU that only
fake tensors believe in.
"""

import json
import shutil
import subprocess
import sys

import pytest
from helpers import ROOT, environment

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not shutil.which("g++"), reason="needs g++ for a device of its own"),
]
MIB = 2**20
LAYERS, WIDTH, HEADS, CONTEXT, IDS, PADDED = 12, 768, 12, 1024, 50_257, 50_304

PLANNING = """
import json, sys
import fake_cuda
fake_cuda.load_guard()
fake_cuda.pretend()
import torch
from configs.gpt2 import PRESETS
from ops.distributed import Processes
from ops.device import resolve
from ops.plan import agree_on_micro_batch, limits, make_plan, out_of_memory_advice, training_bytes
from ops.plan.counting import micro_batch_sizes
from ops.plan.report import _host_lines

def gpt2(size="124m", **fields):
    return PRESETS[f"gpt2-{size}"][1].replace(device="cuda", **fields)

def bytes_of(config, processes=1):
    plan = make_plan(config, 50_257, None, processes)
    return plan, {"memory": plan.memory, "checkpoint": plan.checkpoint, "limit": plan.limit}

found = {"steps": {}}
for micro in (16, 64):
    for recompute in (False, True):
        plan, told = bytes_of(gpt2(micro_batch_size=micro, recompute=recompute))
        stages, kept = training_bytes(plan.config, 50_257)
        told["stages"] = stages
        found["steps"][f"{micro} {recompute}"] = told
found["host"] = _host_lines(plan)
found["sharded"] = bytes_of(gpt2(strategy="fsdp", micro_batch_size=16), 8)[1]
found["one row"] = bytes_of(gpt2(strategy="fsdp", micro_batch_size=1, context_length=64), 8)[1]
found["largest"] = bytes_of(gpt2("1.5b", strategy="fsdp", recompute=True), 8)[1]

# Left open: one block, so that planning is quick, on a card that has room for 16 of 64 rows.
shape = {"n_layer": 1, "n_head": 1, "d_model": 8, "bias": False, "batch_size": 64}
open_ = resolve(gpt2(micro_batch_size=0, **shape))
peak = {size: make_plan(open_.replace(micro_batch_size=size), 50_257).peak for size in (16, 32)}

def card(n_byte):
    torch.cuda.mem_get_info = lambda *_: (n_byte, n_byte)

class Two(Processes):
    # The other process has found room for no more than 4.
    def sum(self, *numbers, device):
        assert device == "cuda:0"
        sizes = micro_batch_sizes(64, 2)
        return [number + (size <= 4) for number, size in zip(numbers, sizes)]

def agreed(config, processes=Processes()):
    settled, note = agree_on_micro_batch(config, 50_257, processes)
    return settled.optim.micro_batch_size, note

card(int((peak[16] + peak[32]) / 2 / limits.FITS))
found["open"] = agreed(open_)
found["planned"] = make_plan(open_, 50_257).share.micro_batch_size
found["advice"] = out_of_memory_advice(MemoryError(), open_, 50_257)
found["given"] = agreed(open_.replace(micro_batch_size=2))
found["of two"] = agreed(open_, Two(count=2))
card(1 << 40)
found["roomy"] = agreed(open_)
card(1 << 20)
found["tight"] = agreed(open_)
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found():
    """What the plan says of each case, in a process that has a CUDA device of fake tensors."""
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, 'tests')\n{PLANNING}"],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def parameters(layers=LAYERS, width=WIDTH, context=CONTEXT):
    """(numbers of one block, numbers outside the blocks) of GPT-2."""
    block = 4 * (width * width + width)  # queries, keys, values and projection, with biases
    block += 2 * 4 * width * width + 4 * width + width  # up and down, with biases
    block += 2 * 2 * width  # two norms
    outside = IDS * width + context * width + 2 * width  # embeddings (tied), positions, last norm
    return block, outside


def activation_bytes(rows, recompute):
    """What the blocks and the last norm keep for the backward pass under bfloat16 autocast."""
    token = 4 * WIDTH  # a block's input, the stream in float32, which its first norm keeps
    if not recompute:
        token += 2 * 4  # mean and 1 / deviation of that norm, float32
        token += 3 * 2 * WIDTH  # the normed stream in bfloat16, cast once for each of Q, K and V
        token += 3 * 2 * WIDTH  # Q, K and V, which flash attention keeps
        token += 2 * WIDTH  # its output, which the projection keeps too: the same memory
        token += 4 * HEADS  # its log-sum-exp, float32; and no n^2 weights
        token += 4 * WIDTH  # the stream between the halves, which the second norm keeps
        token += 2 * 4  # that norm's mean and 1 / deviation
        token += 2 * WIDTH  # its output in bfloat16, for the product up
        token += 2 * 4 * WIDTH  # what goes into GELU
        token += 2 * 4 * WIDTH  # what comes out, for the product down
    last = 4 * WIDTH + 2 * 4  # the last norm's input and its two numbers
    last += 4 * WIDTH  # its output in float32, which the loss reads
    last += 8  # the tokens themselves, int64
    return rows * CONTEXT * (LAYERS * token + last)


def loss_bytes(rows, chunk):
    """What head and loss hold at most: in the middle of the last whole chunk."""
    held = 2 * PADDED * WIDTH  # the padded weight in bfloat16
    held += 4 * PADDED * WIDTH  # its gradient in float32
    held += 2 * chunk * WIDTH  # the chunk's features in bfloat16
    held += 2 * chunk * PADDED  # its logits in bfloat16
    held += 2 * 4 * chunk * IDS  # the same in float32, and log softmax of them
    n_before = rows * CONTEXT // chunk - 1
    return held + n_before * 2 * chunk * WIDTH  # the gradients of features before it


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(("rows", "chunk"), [(16, 4096), (64, 5120)])
def test_memory_of_gpt2_124m(found, rows, chunk, recompute):
    """At the worst moment, the loss of the last micro-batch, gradients of those before being there;
    to a MiB in each part (of positions, counters and random states).
    """
    block, outside = parameters()
    weights = LAYERS * block + outside
    expected = {
        "weights": 4 * weights,
        "gradients": 4 * weights,
        "optimizer": 2 * 4 * weights,
        # Matrices of the blocks, and their biases: what autocast casts once and keeps.
        "weights as autocast copies them": 2 * LAYERS * (block - 2 * 2 * WIDTH),
        "activations": activation_bytes(rows, recompute),
        "logits and loss": loss_bytes(rows, chunk),
    }
    memory = found["steps"][f"{rows} {recompute}"]["memory"]
    assert {part for part, size in memory.items() if size} == expected.keys()
    for part, size in expected.items():
        assert memory[part] / MIB == pytest.approx(size / MIB, abs=1), part


@pytest.mark.parametrize("recompute", [False, True])
def test_logits_are_no_longer_what_fills_a_card(found, recompute):
    """In the backward pass nothing of them is left, and four times the rows take hardly more. Held
    whole they were 31 GiB at 64 rows: in bfloat16, in float32 and as log softmax of that.
    """
    stages = {rows: found["steps"][f"{rows} {recompute}"]["stages"] for rows in (16, 64)}
    for forward, backward, *_ in stages.values():
        assert backward.get("logits and loss", 0) < forward["logits and loss"] / 10
    large, small = (stages[rows][0]["logits and loss"] for rows in (64, 16))
    assert large < 1.3 * small
    assert large < (2 + 4 + 4) * 64 * CONTEXT * IDS / 10


def test_a_share_of_fsdp2(found):
    """An eighth of weights, gradients and moments; whole are what lies outside the blocks and two
    blocks. Activations are a process's own. Of one short row the peak comes in the backward
    pass, where what was gathered has its gradients beside it.
    """
    block, outside = parameters()
    weights = LAYERS * block + outside
    memory = found["sharded"]["memory"]
    for part, size in (("weights", 4), ("gradients", 4), ("optimizer", 8)):
        assert memory[part] == pytest.approx(size * weights / 8, rel=1e-4)
    assert memory["gathered by FSDP2"] == 4 * (outside + 2 * block)
    _, outside = parameters(context=64)
    assert found["one row"]["memory"]["gathered by FSDP2"] == 2 * 4 * (outside + 2 * block)
    alone = found["steps"]["16 False"]["memory"]
    for part in ("activations", "logits and loss"):
        assert memory[part] == alone[part]


def test_host_memory_of_a_checkpoint_of_the_largest(found):
    """Weights and two moments in float32, once, in the first process of eight: 17.4 GiB. AdamW
    counts its steps in 4 bytes a tensor.
    """
    block, outside = parameters(48, 1600)
    weights = 48 * block + outside
    assert weights == 1_557_611_200
    n_tensor = 48 * 16 + 4
    assert found["largest"]["checkpoint"] == 3 * 4 * weights + 4 * n_tensor
    (line,) = found["host"]
    of_124m = found["steps"]["16 False"]["checkpoint"]
    assert line == (
        f"host        {of_124m / MIB:,.0f} MiB of its memory in the first process while a "
        "checkpoint is copied and written"
    )


def test_a_micro_batch_left_open_is_the_largest_that_fits(found):
    """In the run as in its plan; where memory fails all the same, the advice starts from it."""
    note = "note     micro-batch 16 is the largest that fits; --micro-batch-size sets another"
    assert found["open"] == [16, [note]]
    assert found["planned"] == 16
    assert found["advice"].startswith("out of memory at micro_batch_size 16; --micro-batch-size 8 ")


def test_what_is_not_left_open(found):
    """A size that is given; and a whole batch with room to spare, without a word."""
    assert found["given"] == [2, []]
    assert found["roomy"] == [64, []]


def test_processes_take_what_fits_in_all(found):
    assert found["of two"][0] == 4


def test_where_nothing_fits(found):
    note = "micro-batch 1, for which the plan finds no room either: --recompute takes less"
    assert found["tight"] == [1, [f"note     {note}"]]
