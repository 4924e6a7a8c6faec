"""A pretend GPU: tensors that say cuda:0 and compute on the CPU, on a PyTorch built without CUDA.

Run as a program it trains and samples over a covering set of configurations and prints, as JSON,
what each did that a GPU would have to wait for. It changes torch.cuda for its whole process, so a
test runs it in a process of its own.

What it can't show: numbers, speed, kernels, streams, and whatever a compiler makes.
"""

import collections
import contextlib
import io
import json
import os
import sys
import tempfile
import threading
import traceback
import types
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map_only

ROOT = Path(__file__).parents[1]
CUDA = torch.device("cuda:0")
NUMBERS_READ = ("_local_scalar_dense", "is_nonzero")
SIZES_READ = ("nonzero", "masked_select", "_unique")
"""Operations whose result's shape depends on the values, so that the host reads it."""
TOLD_BY_C = ("torch/nn/utils/clip_grad.py", "torch/optim/adam.py")
"""Files that ask C++ for a tensor's device, and are told the CPU."""

waits: collections.Counter = collections.Counter()
"""(what, function called by train.py's loop, file:function) -> how often the host waited there."""
pinned: list[torch.Tensor] = []
"""What `pin_memory` has made; kept, so that no other tensor gets its memory."""


def note(what):
    """Count a wait at the innermost function of the project."""
    frame, place, caller, before = sys._getframe(1), "", "", ""
    while frame is not None:
        path = frame.f_code.co_filename
        inside = path.startswith(str(ROOT)) and not path.startswith(
            (str(ROOT / "tests"), str(ROOT / ".venv"))
        )
        if inside:
            name = f"{Path(path).relative_to(ROOT)}:{frame.f_code.co_name}"
            place = place or name
            if name == "train.py:train":
                caller = before
            before = frame.f_code.co_name
        frame = frame.f_back
    waits[what, caller, place] += 1


class Pretend(torch.Tensor):
    """A tensor that says it is on cuda:0; `inner` holds its values."""

    @staticmethod
    def __new__(cls, inner):
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            layout=inner.layout,
            device="cpu",
        )
        made.inner = inner
        return made

    device = property(lambda self: CUDA)
    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)

    def __init__(self, inner):
        pass

    def __repr__(self):
        return f"Pretend({self.inner})"

    def cpu(self):
        return self.to("cpu")

    def cuda(self):
        return self

    def numpy(self, **_):
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    def tolist(self):
        note("number read")
        return self.inner.tolist()

    def to(self, *args, **kwargs):
        device = kwargs.pop("device", None)
        rest = []
        for argument in args:
            if isinstance(argument, str | torch.device):
                device = argument
            elif isinstance(argument, torch.Tensor):
                device, kwargs["dtype"] = argument.device, argument.dtype
            elif isinstance(argument, torch.dtype):
                rest.append(argument)
        to_cpu = device is not None and torch.device(device).type == "cpu"
        if to_cpu and not sys._getframe(1).f_code.co_filename.endswith(TOLD_BY_C):
            note("copy to the host")
            kwargs = {name: value for name, value in kwargs.items() if name == "dtype"}
            return self.detach().inner.clone().to(*rest, **kwargs)
        kwargs.pop("non_blocking", None)
        return super().to(*rest, **kwargs) if rest or kwargs else self

    @classmethod
    def __torch_dispatch__(cls, function, kinds, args=(), kwargs=None):
        return compute(function, args, kwargs or {})


class PretendMode(TorchDispatchMode):
    """Within it, what is made on or moved to cuda becomes a Pretend."""

    @classmethod
    def _should_skip_dynamo(cls):
        return False  # else every operation goes through the compiler's front, which loads for 2 s

    def __torch_dispatch__(self, function, kinds, args=(), kwargs=None):
        return compute(function, args, kwargs or {})


def check_devices(name, pretends, others, is_patient):
    """Raise for an operation on tensors of two devices; count what waits. `is_patient`: a copy was
    asked for that the host need not wait for.
    """
    if any(word in name for word in NUMBERS_READ) and pretends:
        note("number read")
    elif any(word in name for word in SIZES_READ) and pretends:
        note("size read")
    others = [tensor for tensor in others if tensor.dim() > 0]  # a GPU takes a number of the CPU's
    if not pretends or not others:
        return
    if "index" in name:
        note("index on the host")
    elif not is_move(name):
        raise RuntimeError(f"{name}: tensors on cuda and cpu")
    elif not (is_patient and is_pinned(others[0])):
        note("copy across devices")


def is_move(name):
    """Whether an operation of this name copies a tensor to where it may not have been."""
    return "copy" in name or name.startswith("aten.to.")


def is_pinned(tensor):
    """Whether a tensor lies in memory that `pin_memory` has made."""
    address = tensor.untyped_storage().data_ptr()
    return any(other.untyped_storage().data_ptr() == address for other in pinned)


def compute(function, args, kwargs):
    """One operation on the CPU; its results are Pretends where they would be on the GPU."""
    name = str(function)
    leaves = tree_leaves((args, kwargs))
    pretends = [leaf for leaf in leaves if isinstance(leaf, Pretend)]
    others = [
        leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and not isinstance(leaf, Pretend)
    ]
    device = kwargs.get("device")
    to_cuda = device is not None and torch.device(device).type == "cuda"
    is_patient = kwargs.get("non_blocking", False)
    if name.startswith("aten.copy_."):
        is_patient = args[2:] == (True,)
    check_devices(name, pretends, others, is_patient)
    if is_move(name) and others and to_cuda:
        if not kwargs.get("non_blocking"):
            note("copy to the device, waited for")
        elif not is_pinned(others[0]):
            note("copy to the device from pageable memory")
    plain_args, plain_kwargs = tree_map_only(Pretend, lambda x: x.inner, (args, kwargs))
    if to_cuda:
        plain_kwargs["device"] = torch.device("cpu")
    plain_kwargs = {k: v for k, v in plain_kwargs.items() if k != "non_blocking"}
    results = function(*plain_args, **plain_kwargs)
    if to_cuda and not pretends:
        if is_move(name) and results is plain_args[0]:
            results = results.clone()
        return tree_map_only(torch.Tensor, Pretend, results)
    if not pretends:
        return results
    known = {id(pretend.inner): pretend for pretend in pretends}
    results = tree_map_only(
        torch.Tensor, lambda x: known[id(x)] if id(x) in known else Pretend(x), results
    )
    try:
        return return_and_correct_aliasing(function, args, kwargs, results)
    except (AssertionError, RuntimeError):  # of an operation that makes a view only now and then
        return results


class Autocast(torch.autocast):
    """C++ takes a Pretend for a CPU's tensor, and so must autocast."""

    def __init__(self, device_type, *args, **kwargs):
        super().__init__("cpu", *args, **kwargs)


def pin_memory(tensor, *_):
    copied = tensor.clone()
    pinned.append(copied)
    return copied


def attention(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, **_):
    """The kernel's stand-in, as refusing as the real one."""
    tensors = [x for x in (q, k, v, attn_mask) if x is not None]
    if not all(isinstance(x, Pretend) for x in tensors):
        raise RuntimeError("attention: tensors on cuda and cpu")
    if not q.dtype == k.dtype == v.dtype:
        raise RuntimeError(f"attention: queries {q.dtype}, keys {k.dtype}, values {v.dtype}")
    scores = q @ k.mT / q.shape[-1] ** 0.5
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=CUDA).tril()
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, float("-inf"))
    return torch.nn.functional.dropout(scores.softmax(-1), dropout_p) @ v


def install():
    """Make this process believe in its GPU."""
    about = {"major": 9, "minor": 0, "total_memory": 80 << 30, "multi_processor_count": 132}
    told = {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_bf16_supported": lambda *_: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "synchronize": lambda *_: note("synchronize"),
        "get_device_capability": lambda *_: (9, 0),
        "get_device_name": lambda *_: "pretend GPU",
        "get_device_properties": lambda *_: types.SimpleNamespace(name="pretend GPU", **about),
        "max_memory_allocated": lambda *_: 0,
        "memory_reserved": lambda *_: 0,
        "mem_get_info": lambda *_: (79 << 30, 80 << 30),
        "manual_seed_all": lambda seed: None,
    }
    for name, function in told.items():
        setattr(torch.cuda, name, function)
    torch.cuda.amp.common.amp_definitely_not_available = lambda: False
    torch.autocast = Autocast
    torch.Tensor.pin_memory = pin_memory
    torch.nn.functional.scaled_dot_product_attention = attention
    torch.__future__.set_swap_module_params_on_conversion(True)
    torch._C._set_only_lift_cpu_tensors(True)
    torch.set_num_threads(1)


def found(code, folder, error=""):
    """What one training or sampling did, as JSON holds it."""
    listed = [[*key, count] for key, count in sorted(waits.items())]
    threads = [thread.name for thread in threading.enumerate() if "feeder" in thread.name]
    folder = str(folder)
    return {"code": code, "folder": folder, "waits": listed, "error": error, "threads": threads}


def try_it(folder, function):
    """Call `function` on the pretend GPU: what it did, and what it printed."""
    waits.clear()
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed), PretendMode():
        try:
            result = found(function(), folder)
        except Exception as error:
            result = found(None, folder, "".join(traceback.format_exception(error)[-6:]))
    return result | {"printed": printed.getvalue()}


QUIET = {"eval_every": 0, "save_every": 0, "sample_tokens": 0, "eval_batches": 1, "log_every": 3}
FULL = {"eval_every": 3, "save_every": 3, "sample_tokens": 20, "eval_batches": 2}
FULL |= {"probe_tokens": 16, "log_every": 3}
MODERN = {"norm": "rmsnorm", "qk_norm": True, "tie_embeddings": False, "bias": False}
TRAININGS = {
    "adamw": {"precision": "bfloat16", "micro_batch_size": 2, **QUIET},
    "muon": {
        **{"precision": "float16", "optimizer": "muon", "positions": "rotary", "mlp": "swiglu"},
        **{"bigrams": 31, "dropout": 0.1, **MODERN, **QUIET},
    },
    "window": {
        **{"precision": "float32", "window": 4, "positions": "sinusoidal", "mlp": "relu2"},
        **{"optimizer": "muon", "deterministic": True, **QUIET},
    },
    "explicit": {
        **{"precision": "bfloat16", "window": 9, "attention": "explicit", "recompute": True},
        **QUIET,
    },
    "begun": {
        **{"out": "full", "precision": "float16", "optimizer": "muon", "bigrams": 31},
        **{"stop_at": 3, **FULL},
    },
    "resumed": {
        **{"out": "full", "precision": "float16", "optimizer": "muon", "bigrams": 31},
        **{"resume": True, **FULL},
    },
}
"""Name -> fields of a configuration, without their sections."""
N_STEP = 6


def train(data, folder, **fields):
    """One training: what it did."""
    import helpers

    out = folder / fields.pop("out")
    config = helpers.make_config(data, out, device="cuda:0", **fields)
    return try_it(out, lambda: helpers.train_here(config))


def trainings(data, folder):
    """Each of TRAININGS: name -> what it did."""
    import ops.session

    ops.session.matrix_rate = lambda *_: 1e12
    ops.session.plot_losses = lambda folder: None
    return {
        name: train(data, folder, max_steps=N_STEP, **{"out": name, **fields})
        for name, fields in TRAININGS.items()
    }


@contextlib.contextmanager
def poisoned(steps, factor, summand):
    """Let the loss of these steps be `factor` times itself plus `summand`; each has but one
    micro-batch.
    """
    import training.trainer

    plain = training.trainer.cross_entropy
    count = iter(range(10**6))

    def wrong(logits, targets, reduction="mean"):
        loss = plain(logits, targets, reduction)
        is_wrong = reduction == "mean" and next(count) in steps
        return loss * factor + summand if is_wrong else loss

    training.trainer.cross_entropy = wrong
    try:
        yield
    finally:
        training.trainer.cross_entropy = plain


def skipped(data, folder, name, poison, **fields):
    """A training whose third update is skipped: what it did, and which parts of the checkpoint that
    update has changed.
    """
    import helpers

    from ops.checkpoint import load

    fields = QUIET | {"out": name, "log_every": 10, "max_steps": 12, "sample_tokens": 0} | fields
    train(data, folder, stop_at=2, **fields)
    before = load(folder / name / "checkpoint.pt")
    with poisoned({0}, *poison):
        train(data, folder, stop_at=3, resume=True, **fields)
    after = load(folder / name / "checkpoint.pt")
    moments = [[one["state"] for one in state.optimizer] for state in (before, after)]
    parts = {"model": (before.model, after.model), "moments": moments}
    changed = [part for part, both in parts.items() if not helpers.same_value(*both)]
    with poisoned({2}, *poison):  # and once more in one run, read late
        result = train(data, folder, overwrite=True, **fields)
    losses = {step: loss is not None for step, loss in helpers.losses(folder / name).items()}
    return result | {"changed": changed, "losses": losses}


def failures(data, folder):
    """What losses that are no numbers do: name -> what happened."""
    nan = (float("nan"), 0.0)
    half = {"precision": "float16", "optimizer": "muon"}
    results = {
        "inf": skipped(data, folder, "inf", (1.0, float("inf")), precision="float32"),
        "nan in float16": skipped(data, folder, "half", nan, **half),
    }
    lost = QUIET | {"out": "lost", "log_every": 100, "max_steps": 12, "precision": "float32"}
    with poisoned(range(100), *nan):
        results["nan for ever"] = train(data, folder, **lost)
    results["resumed"] = train(data, folder, resume=True, **lost)
    return results


def samplings():
    """Texts from small models, some rows past the context's end: name -> what it did."""
    from model.config import ModelConfig
    from model.generate import generate
    from model.gpt import GPT
    from model.sampling import Sampling

    ragged = [[1], [1, 2, 3], [1, 2]]
    wanted = {
        "one row": ([[1]], 12, torch.bfloat16, {}),
        "ragged rows": (ragged, 30, torch.float16, {"bigrams": 31, "positions": "rotary"}),
        "ragged window": (ragged, 30, None, {"window": 3}),
    }
    results = {}
    for name, (prompts, n_token, dtype, options) in wanted.items():
        shape = ModelConfig(n_layer=2, n_head=2, d_model=16, context_length=16, **options)
        model = GPT(shape, 50).eval()

        def draw(model=model, prompts=prompts, n_token=n_token, dtype=dtype):
            model.to(CUDA)
            waits.clear()
            draws = [torch.Generator().manual_seed(row) for row in range(len(prompts))]
            with torch.autocast("cuda", dtype=dtype or torch.bfloat16, enabled=bool(dtype)):
                rows = list(generate(model, prompts, n_token, Sampling(), draws))
            return len(rows)

        results[name] = try_it("", draw)
    return results


def main():
    os.environ["MPLBACKEND"] = "Agg"
    sys.path.append(str(ROOT))
    install()
    import helpers

    with tempfile.TemporaryDirectory() as folder:
        data = helpers.write_corpus(Path(folder) / "data", helpers.nonsense())
        results = {
            "trainings": trainings(data, Path(folder)),
            "failures": failures(data, Path(folder)),
            "samplings": samplings(),
        }
    print(json.dumps(results))


if __name__ == "__main__":
    main()
