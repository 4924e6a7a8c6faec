"""Presets that learn as much as they can, as fast as they can, on two CPU cores: tinyshakespeare,
character by character.
"""

from dataclasses import replace

from configs.schema import Config, DataConfig, ModelConfig, OptimConfig, RunConfig

DATA = DataConfig("data/prepared/tinyshakespeare-char")
MODERN = ModelConfig(
    positions="rotary",
    norm="rmsnorm",
    mlp="relu2",
    qk_norm=True,
    bias=False,
    tie_embeddings=False,
    zero_init=True,
)

PRESETS = {
    "speedrun-cpu": (
        "nanoGPT's CPU loss in a fifth of its time or less; needs tinyshakespeare-char",
        Config(
            model=replace(
                MODERN, n_layer=2, n_head=2, d_model=64, context_length=160, bigrams=65**2
            ),
            data=DATA,
            optim=OptimConfig(
                optimizer="muon",
                lr=1e-2,
                warmup_steps=10,
                max_steps=200,
                schedule="linear",
                batch_size=8,
                beta2=0.99,
                grad_clip=0.0,
            ),
            run=RunConfig(eval_every=0, eval_batches=0, save_every=0),
        ),
    ),
    "speedrun-best": (
        "nanoGPT's GPU loss, 1.47, in a quarter of an hour; needs tinyshakespeare-char",
        Config(
            model=replace(MODERN, n_layer=4, n_head=5, d_model=160, context_length=256),
            data=DATA,
            optim=OptimConfig(
                optimizer="muon",
                lr=7e-3,
                warmup_steps=50,
                max_steps=2800,
                schedule="linear",
                batch_size=8,
                beta2=0.99,
                weight_decay=0.2,
                grad_clip=0.0,
            ),
            run=RunConfig(compile="on", eval_every=350, eval_batches=0, save_every=700),
        ),
    ),
}
