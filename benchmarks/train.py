"""Training: the speed-runs against nanoGPT's CPU recipe, throughput, where a step's milliseconds
go, start-up. What a GPU does is measured by `benchmarks.gpu`.

    python -m benchmarks.train                      # all but best: 11 to 25 minutes on two cores
    python -m benchmarks.train speedrun --rounds 3  # goals of time and of loss, whole processes
    python -m benchmarks.train best                 # speedrun-best once: 4 to 15 minutes

Every loss is the whole-split loss. Needs tinyshakespeare: python -m data.prepare tinyshakespeare
"""

import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.machine import (
    RESULTS,
    ROOT,
    TINYSHAKESPEARE,
    cpu_precisions,
    finish,
    launch,
    parser,
    publish,
    run_training,
    spread,
)
from benchmarks.steps import make_step
from configs import PRESETS, OptimConfig
from model.config import ModelConfig
from model.gpt import GPT
from ops.device import resolve, set_up
from ops.speed import flops_per_token, matrix_rate
from training.loss import cross_entropy
from viz.figures import make_figure

SECTIONS = ("speedrun", "throughput", "profile", "startup")
NANOGPT_SECONDS, NANOGPT_RATE, NANOGPT_LOSS = 93.0, 180e9, 1.898
"""nanoGPT's own CPU recipe took 93 s where a float32 product ran at 180 GFLOP/s; its checkpoint's
whole-split loss.
"""
ONCE = ("--eval-every", 0, "--eval-batches", 0, "--save-every", 0)
RUNS = {
    "nanogpt-cpu": ("nanogpt-cpu", *ONCE),
    "speedrun-cpu": ("speedrun-cpu",),
    "larger": ("speedrun-cpu", "--n-head", 3, "--d-model", 96, "--lr", 7e-3),
}
SMALL_GPT2 = ModelConfig(n_layer=6, n_head=6, d_model=384, context_length=256, mlp="gelu_exact")
"""As nanoGPT builds it, whose GELU is the exact one."""


def steps_within(seconds: float, arguments: tuple, data: Path, n_step: int = 100) -> int:
    """How many steps a run may make to end within so many seconds, from the time that a short run
    takes, and a step in it.
    """
    short = run_training(*arguments, "--max-steps", n_step, "--data", data)
    late = [
        record
        for record in short["log"]
        if record["kind"] == "train" and record["step"] > n_step // 2
    ]
    step = statistics.median(sum(record["seconds"].values()) for record in late) / (
        late[1]["step"] - late[0]["step"]
    )
    return int((seconds - short["seconds"]) / step) + n_step


def speedrun(rounds: int, data: Path) -> tuple[list[dict], object, str]:
    """Whole processes of train.py, from start to exit, one after the other in each round; the
    larger fills nanoGPT's.
    """
    found: dict[str, list[dict]] = {name: [] for name in RUNS}
    runs, rates = dict(RUNS), []
    for _ in range(rounds):
        for name in RUNS:
            rates.append(matrix_rate("cpu", "float32", 2048))
            if name == "larger" and runs[name] == RUNS[name]:
                limit = min(
                    found["nanogpt-cpu"][0]["seconds"],
                    NANOGPT_SECONDS * NANOGPT_RATE / statistics.median(rates),
                )
                runs[name] += ("--max-steps", steps_within(0.9 * limit, RUNS[name], data))
            run = run_training(*runs[name], "--seed", 1337 + len(found[name]), "--data", data)
            found[name].append(run)
            print(
                f"{name}: {run['seconds']:.1f} s, loss {run['val_loss']:.4f}",
                file=sys.stderr,
            )
    seconds = {name: [run["seconds"] for run in made] for name, made in found.items()}
    losses = {name: [run["val_loss"] for run in made] for name, made in found.items()}
    scaled = NANOGPT_SECONDS * NANOGPT_RATE / statistics.median(rates)
    yardstick = min(scaled, statistics.median(seconds["nanogpt-cpu"]))
    rows = [
        {
            "run": f"`train.py {' '.join(map(str, runs[name]))}`",
            "seconds, start to exit": spread(seconds[name]),
            "whole-split loss": spread(losses[name], ".4f"),
            "share of the yardstick's time": f"{statistics.median(seconds[name]) / yardstick:.2f}",
        }
        for name in RUNS
    ]
    notes = (
        f"Yardstick: {yardstick:.1f} s, the lesser of "
        f"nanogpt-cpu's {statistics.median(seconds['nanogpt-cpu']):.1f} s and "
        f"nanoGPT's own {NANOGPT_SECONDS:.0f} s x 180 / {statistics.median(rates) / 1e9:.0f} "
        f"GFLOP/s = {scaled:.1f} s; "
        f"its loss is {NANOGPT_LOSS}."
    )
    return (
        rows,
        {"seconds": seconds, "losses": losses, "rates": rates, "yardstick": yardstick},
        notes,
    )


def plain_loop() -> Callable[[], None]:
    """The same model in float32, eager, with PyTorch's AdamW as it comes."""
    torch.manual_seed(0)
    model = GPT(SMALL_GPT2, 65)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.randint(65, (8, SMALL_GPT2.context_length))

    def step() -> None:
        optimizer.zero_grad()
        cross_entropy(model(tokens), tokens).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def throughput(rounds: int, _data: Path) -> tuple[list[dict], object, str]:
    """The 10.7M-parameter GPT-2: tokens per second, and the share of the matrix rate at 6 N + 12
    n_layer d_model T a token.
    """
    optim = OptimConfig(batch_size=8)
    set_up(resolve(PRESETS["nanogpt-cpu"][1].replace(device="cpu")).run)
    steps = {"eager float32, plain loop": ("float32", plain_loop())}
    for precision in cpu_precisions():
        for compiled in (False, True):
            name = f"{precision}, {'compiled' if compiled else 'eager'}"
            steps[name] = (precision, make_step(SMALL_GPT2, optim, 65, precision, compiled))
    laps: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(max(3, rounds) * 2 + 1):  # the first is a warm-up
        for name, (_, step) in steps.items():
            began = time.perf_counter()
            step()
            if number:
                laps[name].append(time.perf_counter() - began)
    n_token = 8 * SMALL_GPT2.context_length
    work = flops_per_token(GPT(SMALL_GPT2, 65)) * n_token
    rates = {precision: matrix_rate("cpu", precision, 2048) for precision in cpu_precisions()}
    base = statistics.median(laps["eager float32, plain loop"])
    rows = []
    for name, (precision, _) in steps.items():
        lap = statistics.median(laps[name])
        rows.append(
            {
                "10.7M GPT-2, batch 8 x 256, AdamW": name,
                "tokens/s": spread([n_token / seconds for seconds in laps[name]], ",.0f"),
                "times plain": f"{base / lap:.2f}",
                "share of the precision's matrix rate": f"{work / lap / rates[precision]:.0%}",
            }
        )
    notes = (
        ""
        if len(rates) > 1
        else "On this CPU bfloat16 is no faster than float32, so its rows are absent."
    )
    return rows, {"seconds": laps, "matrix_rates": rates, "flops_per_step": work}, notes


def kind_of(event: torch.autograd.profiler_util.FunctionEvent) -> str:
    """What an event's own time is spent on. Batched products outside an optimiser are
    attention's.
    """
    name = event.name
    while event and not event.name.startswith("Optimizer.step"):
        event = event.cpu_parent
    if name in ("aten::mm", "aten::addmm"):
        return "matrix products of the model"
    if name in ("aten::bmm", "aten::baddbmm") and event:
        return "matrix products of Muon"
    if name.startswith(
        ("aten::bmm", "aten::baddbmm", "aten::_softmax", "aten::_scaled_dot_product")
    ):
        return "attention"
    return "element-wise, norms, copies" if name.startswith("aten::") else "autograd and Python"


def profile(_rounds: int, _data: Path) -> tuple[list[dict], object, str]:
    """Where a step of speedrun-cpu goes, by torch.profiler, and the floor: its products' FLOPs at
    the matrix rate.
    """
    config = resolve(PRESETS["speedrun-cpu"][1].replace(device="cpu"))
    precision = config.run.precision
    set_up(config.run)
    step = make_step(config.model, config.optim, 65, precision, compiled=False)
    laps = []
    for _ in range(20):
        began = time.perf_counter()
        step()
        laps.append(time.perf_counter() - began)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        for _ in range(10):
            step()
    spent: Counter[str] = Counter()
    for event in profiler.events():
        spent[kind_of(event)] += event.self_cpu_time_total / 1e4
    measured = statistics.median(laps[5:]) * 1e3
    rate = matrix_rate("cpu", precision, 2048)
    model = GPT(config.model, 65)
    shape, ms = config.model, 1e3 / rate
    n_token, attention = (
        config.optim.batch_size * shape.context_length,
        12 * shape.n_layer * shape.d_model * shape.context_length,
    )
    floors = {
        "matrix products of the model": (flops_per_token(model) - attention) * n_token * ms,
        "attention": attention * n_token * ms,
        "matrix products of Muon": sum(
            muon_flops(p.shape) for p in model.blocks.parameters() if p.ndim == 2
        )
        * ms,
    }
    rows = [
        {
            "speedrun-cpu, a step": kind,
            "ms": f"{value:.1f}",
            "floor, ms": f"{floors[kind]:.1f}" if kind in floors else "",
        }
        for kind, value in spent.most_common()
    ]
    rows.append(
        {
            "speedrun-cpu, a step": "all, measured without the profiler",
            "ms": f"{measured:.1f}",
            "floor, ms": f"{sum(floors.values()):.1f}",
        }
    )
    notes = f"Floor: FLOPs at the {precision} rate of a 2048-wide product."
    return rows, {"milliseconds": dict(spent), "step": measured, "floor": floors}, notes


def muon_flops(shape: torch.Size, n_step: int = 5) -> float:
    """Of one orthogonalisation of an m x n matrix, m <= n: each step makes X X^T, its square, and a
    product with X.
    """
    m, n = sorted(shape)
    return n_step * (4 * m * m * n + 2 * m**3)


def one_step(data: Path) -> tuple[float, float]:
    """Seconds from the launch of a run of a single step until that step stands in its log, and
    until it has ended.
    """
    quiet = (
        "--eval-batches",
        1,
        "--sample-tokens",
        0,
        "--probe-tokens",
        0,
        "--stop-at",
        1,
        "--log-every",
        1,
    )
    began = time.perf_counter()
    with launch("nanogpt-cpu", *quiet, "--data", data) as (process, run):
        log = run / "log.jsonl"
        while process.poll() is None and not (
            log.exists() and '"kind": "train"' in log.read_text()
        ):
            time.sleep(0.005)
        stepped = time.perf_counter() - began
        finish(process)
        return stepped, time.perf_counter() - began


def startup(rounds: int, data: Path) -> tuple[list[dict], object, str]:
    """Seconds of `train.py --help`, and of a run of a single step, to that step and to the end
    (evaluation, files, plot).
    """
    helps, firsts, ends = [], [], []
    for _ in range(max(3, rounds)):
        began = time.perf_counter()
        subprocess.run(
            [sys.executable, "train.py", "--help"], cwd=ROOT, check=True, capture_output=True
        )
        helps.append(time.perf_counter() - began)
        stepped, ended = one_step(data)
        firsts.append(stepped)
        ends.append(ended)
    rows = [
        {"start-up": "`train.py --help`", "seconds": spread(helps, ".2f")},
        {
            "start-up": "`train.py nanogpt-cpu`, launch to the first step's line in the log",
            "seconds": spread(firsts, ".2f"),
        },
        {"start-up": "the same, launch to exit after that step", "seconds": spread(ends, ".2f")},
    ]
    return rows, {"help": helps, "first_step": firsts, "exit": ends}, ""


def best_so_far(log: list[dict]) -> list[dict]:
    """The best loss so far over the minutes since a run's first step, from its log."""
    clock, curve, lowest = 0.0, [], float("inf")
    for record in log:
        if record["kind"] == "train":
            # Since the record before; an evaluation counts into the next.
            clock += sum(record["seconds"].values())
        elif record["kind"] == "eval" and record["val_loss"] < lowest:
            lowest = record["val_loss"]
            curve.append({"step": record["step"], "minutes": clock / 60, "best_loss": lowest})
    return curve


def best(_rounds: int, data: Path) -> tuple[list[dict], object, str]:
    """speedrun-best once: the curve of the best loss so far over the time since its start."""
    run = run_training("speedrun-best", "--data", data)
    curve = best_so_far(run["log"])
    rows = [
        {
            "minutes": f"{p['minutes']:.1f}",
            "step": f"{p['step']:,}",
            "best whole-split loss": f"{p['best_loss']:.4f}",
        }
        for p in curve
    ]
    plot(curve, RESULTS / "best.png")
    return (
        rows,
        {"seconds": run["seconds"], "curve": curve},
        f"Start to exit: {run['seconds'] / 60:.1f} minutes. Curve: {RESULTS / 'best.png'}",
    )


def plot(curve: list[dict], out: Path) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    figure, ((axes,),) = make_figure(6, 3.6)
    axes.plot([p["minutes"] for p in curve], [p["best_loss"] for p in curve], marker=".")
    axes.axhline(
        1.4697, color="grey", linestyle="--", linewidth=1, label="nanoGPT's GPU recipe, 1.4697"
    )
    axes.set(xlabel="minutes on this machine", ylabel="best whole-split loss", ylim=(1.4, 2.0))
    axes.legend()
    figure.savefig(out, dpi=120)


def main() -> None:
    command = parser(__doc__, "train")
    command.add_argument(
        "sections",
        nargs="*",
        choices=[*SECTIONS, "best", []],
        default=[],
        help="default: all but best",
    )
    command.add_argument("--rounds", type=int, default=3)
    command.add_argument("--data", type=Path, default=TINYSHAKESPEARE)
    arguments = command.parse_args()
    tables, record, notes = {}, {}, []
    for section in arguments.sections or SECTIONS:
        rows, record[section], note = globals()[section](arguments.rounds, arguments.data)
        tables[section] = rows
        notes += [note] if note else []
    out = arguments.out.with_name("-".join([arguments.out.name, *arguments.sections]))
    publish(out, tables, record, "\n\n".join(notes))


if __name__ == "__main__":
    main()
