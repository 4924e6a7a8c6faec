"""The attention page with the model in it: how large it is, how long it takes to open, and how fast
the model reads there, in Chromium: one more token, a whole context, and the longest time for which
the page can't answer meanwhile.

python -m benchmarks.page
"""

import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import product
from pathlib import Path

import torch

from benchmarks.machine import ROOT, parser, publish
from configs import PRESETS
from data.patterns import GPT2
from data.tokenizer import ALL_BYTES, BPETokenizer, ByteTokenizer, CharTokenizer, Tokenizer
from model.config import ModelConfig
from model.gpt import GPT
from viz.living import put_into_page
from viz.maps import read_text
from viz.page import beside_numbers, render_page

DEFAULT_RUN = ROOT / "runs" / "shakespeare-char"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
MEASURE = """(rounds) => {
    const size = MODEL.config.context_length, ids = Array.from({length: size}, (_, i) => (7 * i) % MODEL.vocabSize);
    const timed = (work) => {
        const began = performance.now();
        const result = work();
        return [result, performance.now() - began];
    };
    let whole = read(MODEL, ids);  // once without a look at the clock: code is compiled as it runs
    const wholes = Array.from({length: rounds}, () => timed(() => read(MODEL, ids))[1]);
    const pauses = [], steps = reading(MODEL, ids);
    for (;;) {
        const [step, milliseconds] = timed(() => steps.next());
        pauses.push(milliseconds);
        if (step.done) break;
    }
    const tokens = [], n = Math.max(1, size - 24);
    let typed = read(MODEL, ids.slice(0, n));
    for (let end = n + 1; end <= size; end++) {
        const [longer, milliseconds] = timed(() => read(MODEL, ids.slice(0, end), NO_CHANGES, typed));
        typed = longer;
        tokens.push(milliseconds);
    }
    const same = typed.logits.every((x, i) => x === whole.logits[i]);
    return {wholes, pauses, tokens, same};
}"""  # noqa: E501


def fresh_models() -> dict[str, tuple[ModelConfig, Tokenizer, float]]:
    """Shapes, with a tokenizer of their vocabulary's size and the megabytes allowed."""
    letters = CharTokenizer("".join(chr(code) for code in range(32, 97)))
    two_bytes = [bytes(pair) for pair in product(range(256), repeat=2)]
    tokens = ALL_BYTES + two_bytes[: 50_256 - 256]
    imported = ModelConfig(n_layer=8, n_head=8, d_model=64, context_length=512)
    wide = ModelConfig(n_layer=6, n_head=6, d_model=192, context_length=256)
    gpt2_ids = BPETokenizer("bpe", GPT2, tokens)
    return {
        "10M, characters (shakespeare-gpu)": (PRESETS["shakespeare-gpu"][1].model, letters, 15),
        "GPT-2 of 8 layers, width 64, its 50,257 ids": (imported, gpt2_ids, 15),
        "GPT-2 of 6 layers, width 192, its 50,257 ids": (wide, gpt2_ids, 20),
        "bytes, 1 layer of width 64": (
            ModelConfig(n_layer=1, n_head=2, d_model=64, context_length=128),
            ByteTokenizer(),
            15,
        ),
    }


def fresh_page(config: ModelConfig, tokenizer: Tokenizer, max_mb: float) -> str:
    """The page of a model as it is initialised."""
    torch.manual_seed(0)
    model = GPT(config, tokenizer.vocab_size).eval()
    ids = [(7 * i) % tokenizer.vocab_size for i in range(config.context_length)]
    max_bytes = int(max_mb * 1e6)
    living = put_into_page(model, tokenizer, ids, max_bytes, beside_numbers())
    maps = read_text(model, ids, tokenizer.decode_bytes)
    return render_page(maps, title="fresh", max_bytes=max_bytes, living=living)


def write_pages(folder: Path) -> dict[str, Path]:
    """The default run's page, as attention_map.py writes it, and those of fresh models."""
    paths = {}
    if DEFAULT_RUN.is_dir():
        paths["the default run"] = folder / "default.html"
        command = [
            sys.executable,
            "attention_map.py",
            DEFAULT_RUN,
            "--out",
            folder / "default.html",
        ]
        subprocess.run(list(map(str, command)), cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    models = fresh_models()
    if not paths:
        letters = CharTokenizer("".join(chr(code) for code in range(32, 97)))
        fresh = PRESETS["shakespeare-char"][1].model
        models = {"the default run's shape, not trained": (fresh, letters, 15)} | models
    for number, (name, (config, tokenizer, max_mb)) in enumerate(models.items()):
        paths[name] = folder / f"{number}.html"
        text = fresh_page(config, tokenizer, max_mb)
        paths[name].write_text(text, encoding="utf-8", newline="\n")
    return paths


def measure(browser, path: Path, rounds: int) -> dict:
    """Sizes in bytes, times in milliseconds."""
    opened = []
    for _ in range(rounds):
        page = browser.new_page()
        page.set_default_timeout(120_000)
        began = time.perf_counter()
        page.goto(path.as_uri())
        page.wait_for_selector("html[data-view]", state="attached")  # its first view is drawn
        opened.append(1e3 * (time.perf_counter() - began))
        if len(opened) < rounds:
            page.close()
    told = page.evaluate(
        """() => ({bits: D.model.bits, cost: D.model.cost, context: MODEL.config.context_length,
            parameters: D.model.tensors.flatMap(({name}) => MODEL.weights[name].length)
                .reduce((a, b) => a + b)})"""
    )
    figures = page.evaluate(MEASURE, rounds)
    page.close()
    if not figures["same"]:
        sys.exit(f"{path.name}: read token by token, the logits are others than read whole")
    return {"bytes": path.stat().st_size, "opened": opened, **told, **figures}


def row(name: str, found: dict) -> dict:
    """A row of the table: medians, and the longest pause."""
    tokens = sorted(found["tokens"])
    return {
        "model": name,
        "parameters": f"{found['parameters']:,}",
        "bits": found["bits"],
        "a logit is off by": f"{found['cost']['logits']:.4f}",
        "page, MB": f"{found['bytes'] / 1e6:.1f}",
        "opens, s": f"{statistics.median(found['opened']) / 1e3:.2f}",
        "one more token, ms": f"{statistics.median(tokens):.1f} (to {tokens[-1]:.1f})",
        "context": found["context"],
        "whole context, s": f"{statistics.median(found['wholes']) / 1e3:.2f}",
        "longest pause, ms": f"{max(found['pauses']):.1f}",
    }


def main() -> None:
    arguments = parser(__doc__ or "", "page")
    arguments.add_argument("--rounds", type=int, default=3, help="of each time, the median is told")
    options = arguments.parse_args()
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        sys.exit("playwright is not installed: make .venv/installed-dev")
    if program is None:
        sys.exit(f"no browser found: one of {', '.join(BROWSERS)} is needed")
    found = {}
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=program, args=["--no-sandbox", "--disable-gpu"]
        )
        for name, path in write_pages(Path(folder)).items():
            found[name] = measure(browser, path, options.rounds)
        version = browser.version
        browser.close()
    rows = [row(name, figures) for name, figures in found.items()]
    publish(options.out, {"The model in the page": rows}, found, f"Chromium {version}")


if __name__ == "__main__":
    main()
