"""What `--plan` foretells against what a run then takes: peak memory and seconds a step.

    python -m benchmarks.plan [--out plan.json] [--steps 6]

Each case runs the real train.py in a process of its own, saving midway as every longer run does, so
that a checkpoint is being written while training goes on. Its peak is the largest resident size the
process ever had (`ru_maxrss`, interpreter and libraries included); its time a step is the median of
the log's, the first two left out. Linux or macOS; five minutes on two cores, 6 GiB.
"""

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
SMALL = "nanogpt-cpu --n-layer 6 --n-head 6 --d-model 384 --context-length 256 --batch-size 8"
CASES = {
    "nanogpt-cpu": ("char", "nanogpt-cpu"),
    "10.7M, float32": ("char", f"{SMALL} --precision float32"),
    "10.7M, bfloat16": ("char", f"{SMALL} --precision bfloat16"),
    "10.7M, explicit, dropout, muon": (
        "char",
        f"{SMALL} --attention explicit --dropout 0.1 --optimizer muon",
    ),
    "gpt2-124m, batch 1": (
        "gpt2",
        "gpt2-124m --precision bfloat16 --batch-size 1 --micro-batch-size 1",
    ),
    "gpt2-124m, batch 2 x 2": (
        "gpt2",
        "gpt2-124m --precision bfloat16 --batch-size 4 --micro-batch-size 2",
    ),
}
"""Name -> (data, arguments of train.py)."""


def prepare_characters(folder: Path) -> Path:
    """Data of 65 different characters: tinyshakespeare where it is prepared, else a text made up
    here.
    """
    real = ROOT / "data" / "prepared" / "tinyshakespeare-char"
    if (real / "dataset.json").exists():
        return real
    text, state = [], 1
    for _ in range(300_000):
        state = state * 48271 % (2**31 - 1)  # Park and Miller's generator
        text.append(chr(63 + state % 65))
    (folder / "text.txt").write_text("".join(text), encoding="utf-8")
    command = [
        sys.executable,
        "-m",
        "data.prepare",
        folder / "text.txt",
        "--tokenizer",
        "char",
        "--out",
        folder / "char",
    ]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return folder / "char"


def write_random_ids(folder: Path, vocab_size: int = 50_257) -> Path:
    """Token files of random ids, with as many characters for a vocabulary: what a model costs
    doesn't depend on the words.
    """
    import numpy as np

    from data.tokenizer import CharTokenizer

    splits, out = {}, folder / "random-gpt2"
    out.mkdir()
    for split, n_token in (("train", 1 << 18), ("val", 1 << 14)):
        raw = np.random.default_rng(0).integers(vocab_size, size=n_token).astype("<u2").tobytes()
        (out / f"{split}.bin").write_bytes(raw)
        splits[split] = {
            "tokens": n_token,
            "bytes": len(raw),
            "documents": 1,
            "sha256": hashlib.sha256(raw).hexdigest(),
        }
    tokenizer = CharTokenizer("".join(map(chr, range(0x100, 0x100 + vocab_size)))).spec()
    info = {"format": 1, "tokenizer": tokenizer, "dtype": "uint16", "splits": splits}
    (out / "dataset.json").write_text(json.dumps(info), encoding="utf-8")
    return out


PLANNING = """
import dataclasses, json, sys
from data.dataset import Dataset
from data.tokenizer import load_tokenizer
from ops.command_line import parse
from ops.plan import make_plan, time_steps
config = parse(sys.argv[1:])
dataset = Dataset(config.data.data)
vocab_size = load_tokenizer(dataset.tokenizer_spec).vocab_size
plan = make_plan(config, vocab_size, len(dataset.tokens["train"]))
record = {"memory": plan.memory, "limit": plan.limit, "run": dataclasses.asdict(plan.config.run)}
print(json.dumps(record | time_steps(plan)))
"""


def planned(arguments: list[str]) -> dict:
    """The plan of these arguments, made in a process of its own, as `--plan` does."""
    done = subprocess.run(
        [sys.executable, "-c", PLANNING, *arguments],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def measured(arguments: list[str], out: Path) -> tuple[float, float]:
    """Peak resident memory in MiB and seconds a step of a real run."""
    process = subprocess.Popen(
        [sys.executable, "train.py", *arguments],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    errors = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        sys.exit(f"train.py failed:\n{errors[-2000:]}")
    records = [
        json.loads(line) for line in (out / "log.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    parts = ("data", "forward", "backward", "optimizer")
    steps = [
        sum(record["seconds"][part] for part in parts)
        for record in records
        if record["kind"] == "train"
    ]
    return usage.ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10), statistics.median(
        steps[2:]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="write the figures here as JSON")
    parser.add_argument("--steps", type=int, default=6, help="steps of each run")
    options = parser.parse_args()
    from benchmarks.machine import describe_machine, markdown_table

    rows, record = [], []
    print(machine := describe_machine(), flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = {"char": prepare_characters(folder), "gpt2": write_random_ids(folder)}
        for number, (case, (kind, arguments)) in enumerate(CASES.items()):
            out = folder / f"run-{number}"
            line = [
                *arguments.split(),
                "--data",
                str(data[kind]),
                "--out",
                str(out),
                "--device",
                "cpu",
                "--eval-batches",
                "1",
            ]
            line += [
                "--stop-at",
                str(options.steps),
                "--save-every",
                str(options.steps // 2),
                "--log-every",
                "1",
            ]
            line += ["--sample-tokens", "8"]
            plan, (peak, seconds) = planned(line), measured(line, out)
            memory = sum(plan["memory"].values()) / 2**20
            record.append(
                {
                    "case": case,
                    "arguments": arguments,
                    "plan": plan,
                    "peak": peak,
                    "seconds_per_step": seconds,
                }
            )
            rows.append(
                {
                    "case": case,
                    "plan, MiB": f"{memory:,.0f}",
                    "measured, MiB": f"{peak:,.0f}",
                    "off by": f"{memory / peak - 1:+.1%}",
                    "plan, s a step": f"{plan['step']:.3g}",
                    "measured, s a step": f"{seconds:.3g}",
                    "off by ": f"{plan['step'] / seconds - 1:+.0%}",
                }
            )
            print(f"measured {case}", file=sys.stderr, flush=True)
    print(f"\n{markdown_table(rows)}")
    if options.out:
        options.out.write_text(
            json.dumps({"machine": machine.splitlines(), "cases": record}, indent=2) + "\n",
            encoding="utf-8",
        )


if __name__ == "__main__":
    main()
