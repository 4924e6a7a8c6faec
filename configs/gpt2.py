"""Presets of GPT-2's four sizes, on GPT-2's tokens of a text of your own. `--plan` tells what each
takes on your machine.

Shapes: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", table 2.
Training follows Brown et al. 2020, "Language Models are Few-Shot Learners": half a million tokens a
step, peak rates and betas, decay, clipping, 375 million tokens of warm-up and a cosine to a tenth
of the rate (table 2.1 and appendix B); but 10 billion tokens in all, not 300.
"""

from configs.schema import Config, DataConfig, ModelConfig, OptimConfig, RunConfig


def _gpt2(n_layer: int, n_head: int, d_model: int, lr: float, micro_batch_size: int) -> Config:
    return Config(
        model=ModelConfig(n_layer=n_layer, n_head=n_head, d_model=d_model, context_length=1024),
        data=DataConfig("data/prepared/openwebtext-gpt2"),
        optim=OptimConfig(
            lr=lr,
            min_lr=lr / 10,
            warmup_steps=700,
            max_steps=19_000,
            batch_size=512,
            micro_batch_size=micro_batch_size,
            beta1=0.9,
            beta2=0.95,
            weight_decay=0.1,
            grad_clip=1.0,
        ),
        run=RunConfig(eval_every=1000, eval_batches=1, save_every=1000),
    )


PRESETS = {
    "gpt2-124m": (
        "GPT-2's smallest size, on your own text: a day on one GPU",
        _gpt2(12, 12, 768, 6e-4, 16),
    ),
    "gpt2-350m": ("GPT-2 medium", _gpt2(24, 16, 1024, 3e-4, 8)),
    "gpt2-774m": ("GPT-2 large", _gpt2(36, 20, 1280, 2.5e-4, 4)),
    "gpt2-1.5b": ("GPT-2 itself, 1.5 billion parameters", _gpt2(48, 25, 1600, 2e-4, 2)),
}
