"""What the tests of training share: a small prepared corpus, a small configuration, runs made here
or in a process of their own, and the comparison of two run folders.
"""

import contextlib
import dataclasses
import hashlib
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from configs import Config, DataConfig, ModelConfig, OptimConfig, RunConfig
from data.tokenizer import ByteTokenizer, CharTokenizer
from errors import run_command
from model.fast_attention import fast_attention
from model.gpt import GPT
from ops import checkpoint as checkpoints
from ops.stopping import Stop

ROOT = Path(__file__).parents[1]
SHARED = ROOT.parent / "shared"
"""Texts and vocabularies that not every machine has: a test that reads them skips without."""
PRELOADED = [
    "torch.distributed.fsdp",
    "matplotlib.figure",
    "ops.session",
    "ops.log",
    "training.trainer",
    "viz.probe",
]
WORDS = [
    "the",
    "cat",
    "sat",
    "on",
    "a",
    "mat",
    "and",
    "saw",
    "two",
    "old",
    "dogs",
    "run",
    "by",
    "in",
    "rain",
]


def nonsense(n_character=4000, seed=0):
    """A text with something to learn: sentences of short words, two lines of them alike rarely."""
    draw = random.Random(seed)
    text = ""
    while len(text) < n_character:
        text += " ".join(draw.choices(WORDS, k=draw.randint(3, 8))) + ".\n"
    return text[:n_character]


def write_corpus(folder, train, val=None, tokenizer=None, dtype="uint16"):
    """Prepare two texts as `data.prepare` would; without `val`, the last tenth of the first.
    Returns the folder.
    """
    if val is None:
        cut = int(0.9 * len(train))
        train, val = train[:cut], train[cut:]
    tokenizer = tokenizer or CharTokenizer("".join(sorted(set(train + val))))
    folder.mkdir(parents=True, exist_ok=True)
    splits = {}
    for name, text in (("train", train), ("val", val)):
        raw = tokenizer.encode(text).astype(np.dtype(dtype).newbyteorder("<")).tobytes()
        (folder / f"{name}.bin").write_bytes(raw)
        size = {"tokens": len(tokenizer.encode(text)), "bytes": len(text.encode())}
        splits[name] = {**size, "documents": 1, "sha256": hashlib.sha256(raw).hexdigest()}
    about = {"format": 1, "tokenizer": tokenizer.spec(), "dtype": dtype, "splits": splits}
    (folder / "dataset.json").write_text(json.dumps(about))
    return folder


def write_byte_corpus(folder, text):
    return write_corpus(folder, text, tokenizer=ByteTokenizer())


TINY = {
    **{
        "n_layer": 1,
        "n_head": 2,
        "d_model": 16,
        "context_length": 16,
        "max_steps": 8,
        "batch_size": 4,
        "warmup_steps": 2,
    },
    **{"device": "cpu", "precision": "float32", "compile": "off", "threads": 1},
    **{
        "eval_every": 4,
        "eval_batches": 2,
        "save_every": 4,
        "log_every": 1,
        "sample_tokens": 4,
        "probe_tokens": 0,
    },
}


def make_config(data, out, **fields):
    """A small configuration; a field is named without its section, as on the command line."""
    fields = TINY | {"data": str(data), "out": str(out)} | fields
    sections = {}
    for section, kind in (
        ("model", ModelConfig),
        ("data", DataConfig),
        ("optim", OptimConfig),
        ("run", RunConfig),
    ):
        sections[section] = kind(
            **{f.name: fields.pop(f.name) for f in dataclasses.fields(kind) if f.name in fields}
        )
    assert not fields, f"no such field: {list(fields)}"
    return Config(**sections)


MODERN = {
    "positions": "rotary",
    "norm": "rmsnorm",
    "mlp": "swiglu",
    "qk_norm": True,
    "tie_embeddings": False,
    "bias": False,
}
"""Options of ModelConfig: an architecture with nothing of GPT-2's."""


def make_model(vocab_size=11, attend=fast_attention, seed=None, **options):
    """A GPT of very small size as it is initialised, from `seed` where one is given. Options are
    those of ModelConfig.
    """
    if seed is not None:
        torch.manual_seed(seed)
    shape = {"n_layer": 2, "n_head": 2, "d_model": 16, "context_length": 8} | options
    return GPT(ModelConfig(**shape), vocab_size, attend)


def flags(**fields):
    """The same fields as options of the command line."""
    words = []
    for name, value in fields.items():
        flag = name.replace("_", "-")
        words += (
            [f"--{flag}" if value else f"--no-{flag}"]
            if isinstance(value, bool)
            else [f"--{flag}", str(value)]
        )
    return words


@contextlib.contextmanager
def restored():
    """Put back what a run changes in its process: signal handlers, threads, determinism, the state
    of the random numbers.
    """
    handlers = {
        number: signal.getsignal(number)
        for number in (getattr(signal, name) for name in Stop.SIGNALS)
    }
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    deterministic, fill = (
        torch.are_deterministic_algorithms_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,
    )
    products = torch.get_float32_matmul_precision()
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(products)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        torch.set_num_threads(threads)
        torch.set_rng_state(state)
        torch.use_deterministic_algorithms(deterministic)
        torch.utils.deterministic.fill_uninitialized_memory = fill
        for bar in list(tqdm._instances):  # one that a failing run left open would go on printing
            bar.close()


def train_here(config):
    """Run `config` in this process, from random numbers in a state that must not matter; the exit
    code.
    """
    import train

    with restored():
        torch.manual_seed(random.randrange(2**32))
        return train.train(config)


def environment(**changes):
    """The variables of a process started by a test; a change to None takes one away."""
    fixed = {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "PYTHONDONTWRITEBYTECODE": "1",
        "MPLBACKEND": "Agg",
    }
    variables = {**os.environ, **fixed, **changes}
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
        variables.setdefault(name, None)
    return {name: value for name, value in variables.items() if value is not None}


def command(script, *arguments, cwd=ROOT, stdin=None, code=0, timeout=120, env=None, limit=None):
    """Run a script of this repository: (stdout, stderr), once its exit code is as expected.
    `limit`: bytes a file may grow to.
    """

    def preexec():
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    result = subprocess.run(
        [sys.executable, str(ROOT / script), *map(str, arguments)],
        cwd=cwd,
        env=environment(**(env or {})),
        input=stdin,
        stdin=subprocess.DEVNULL if stdin is None else None,
        capture_output=True,
        timeout=timeout,
        check=False,
        preexec_fn=preexec if limit else None,
    )
    out, error = result.stdout.decode(), result.stderr.decode()
    assert result.returncode == code, f"exit code {result.returncode}\n{out}\n{error}"
    assert "Traceback" not in error, error
    return out, error


def start(script, *arguments, **settings):
    """Start a script of this repository: the process, its output in pipes unless `settings`, which
    go to Popen, say otherwise.
    """
    pipes = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
    line = [sys.executable, str(ROOT / script), *map(str, arguments)]
    settings = {"stdin": subprocess.DEVNULL, "text": True, **pipes, **settings}
    return subprocess.Popen(line, env=environment(), **settings)


def _child(plain, variables, output):
    """The main function of a forked process: what train.py does with a configuration."""
    import train

    os.environ.update(variables)
    with (
        open(output, "w", encoding="utf-8") as file,
        contextlib.redirect_stdout(file),
        contextlib.redirect_stderr(file),
    ):
        run_command(lambda: train.train(Config.from_dict(plain)))


def fork_training(config, output, **variables):
    """Start `config` in a process of its own, forked from one that has torch loaded already: half a
    second, not four.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["helpers", "train", *PRELOADED])
    before = {name: os.environ.get(name) for name in ("OMP_NUM_THREADS", "PYTHONPATH")}
    os.environ.update(
        {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    )  # for the first, the server
    try:
        process = context.Process(target=_child, args=(config.to_dict(), variables, str(output)))
        process.start()
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
    return process


def read_records(folder, drop=("tokens_per_second", "mfu", "mfu_maker", "memory", "seconds")):
    """The records of a run's log, times and memory left out."""
    lines = (folder / "log.jsonl").read_text(encoding="utf-8").split("\n")
    assert lines.pop() == ""
    return [{k: v for k, v in json.loads(line).items() if k not in drop} for line in lines]


def losses(folder):
    return {r["step"]: r["loss"] for r in read_records(folder) if r["kind"] == "train"}


def same_value(a, b):
    """Whether two states are the same to the last bit."""
    if isinstance(a, torch.Tensor):
        return (
            a.dtype == b.dtype and a.shape == b.shape and a.numpy().tobytes() == b.numpy().tobytes()
        )
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same_value(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same_value, a, b))
    return a == b


def assert_same_state(a, b, name=checkpoints.LATEST):
    """Two runs' checkpoints hold the same state, to the last bit; only how they came there may
    differ (their config).
    """
    one, two = checkpoints.load(a / name), checkpoints.load(b / name)
    for field in dataclasses.fields(checkpoints.Checkpoint):
        if field.name != "config":
            assert same_value(getattr(one, field.name), getattr(two, field.name)), (
                f"{field.name} of {name} differs"
            )
    return one


def assert_same_run(a, b):
    """Two run folders tell the same: latest and best checkpoint, log (times and memory aside),
    samples.
    """
    assert_same_state(a, b)
    assert_same_state(a, b, checkpoints.BEST)
    assert read_records(a) == read_records(b)
    assert (a / "samples.txt").read_bytes() == (b / "samples.txt").read_bytes()
