"""Presets of GPT-2's four sizes, on GPT-2's tokens of a text of your own. `--plan` tells what each
takes on your machine; docs/gpu.md has the arithmetic of the smallest.

Shapes: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", table 2.
Training follows Brown et al. 2020, "Language Models are Few-Shot Learners": half a million tokens a
step, peak rates and betas, decay, clipping, 375 million tokens of warm-up and a cosine to a tenth
of the rate (table 2.1 and appendix B); but 10 billion tokens in all, not 300. The smallest goes to
315 billion, with nanoGPT's 2,000 steps of warm-up (its config/train_gpt2.py).
"""

from dataclasses import replace

from configs.schema import Config, DataConfig, ModelConfig, OptimConfig, RunConfig
from configs.speedrun import MODERN

TOKENS_PER_STEP = 2**19
CONTEXT = 1024


def _gpt2(n_layer: int, n_head: int, d_model: int, lr: float, micro_batch_size: int) -> Config:
    return Config(
        model=ModelConfig(n_layer=n_layer, n_head=n_head, d_model=d_model, context_length=CONTEXT),
        data=DataConfig("data/prepared/openwebtext-gpt2"),
        optim=OptimConfig(
            lr=lr,
            min_lr=lr / 10,
            warmup_steps=700,
            max_steps=19_000,
            batch_size=TOKENS_PER_STEP // CONTEXT,
            micro_batch_size=micro_batch_size,
            beta1=0.9,
            beta2=0.95,
            weight_decay=0.1,
            grad_clip=1.0,
        ),
        run=RunConfig(eval_every=1000, eval_batches=1, save_every=1000),
    )


SMALLEST = _gpt2(12, 12, 768, 6e-4, 16)

FAST = Config(
    model=replace(MODERN, n_layer=12, n_head=6, d_model=768, context_length=CONTEXT),
    data=DataConfig("data/prepared/fineweb-gpt2"),
    optim=replace(
        SMALLEST.optim,
        optimizer="muon",
        # modded-nanogpt's record 7 moves a block's entries by 3.6e-4 (root mean square) a step;
        # Muon's updates here have a root mean square of 0.2 lr.
        lr=1.8e-3,
        min_lr=0.0,
        warmup_steps=100,
        max_steps=5600,
        schedule="linear",
        weight_decay=0.0,
        grad_clip=0.0,
    ),
    run=replace(SMALLEST.run, eval_every=280, eval_batches=10),
)
"""What won on the CPU (configs/speedrun.py), at GPT-2's smallest size: batch, rate and number of
tokens after modded-nanogpt's records 7 and 8, see docs/gpu.md.
"""

PRESETS = {
    "gpt2-124m": (
        "GPT-2's smallest size with nanoGPT's recipe, 315 billion tokens: about a week on an H100",
        SMALLEST.replace(warmup_steps=2000, max_steps=600_000),
    ),
    "gpt2-124m-fast": (
        "a modern model of that size, aimed at GPT-2's loss on FineWeb: about two hours on an H100",
        FAST,
    ),
    "gpt2-350m": ("GPT-2 medium", _gpt2(24, 16, 1024, 3e-4, 8)),
    "gpt2-774m": ("GPT-2 large", _gpt2(36, 20, 1280, 2.5e-4, 4)),
    "gpt2-1.5b": ("GPT-2 itself, 1.5 billion parameters", _gpt2(48, 25, 1600, 2e-4, 2)),
}
