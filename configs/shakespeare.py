"""Presets that train on Shakespeare, character by character, in minutes on a laptop."""

from dataclasses import replace

from configs.schema import Config, DataConfig, ModelConfig, OptimConfig, RunConfig


def _nanogpt(model: ModelConfig, batch_size: int, max_steps: int, run: RunConfig) -> Config:
    """What nanoGPT's recipes for Shakespeare's characters have in common."""
    return Config(
        model=replace(model, mlp="gelu_exact", bias=False),
        data=DataConfig("data/prepared/tinyshakespeare-char"),
        optim=OptimConfig(
            lr=1e-3,
            min_lr=1e-4,
            warmup_steps=100,
            max_steps=max_steps,
            batch_size=batch_size,
            beta2=0.99,
            weight_decay=0.1,
        ),
        run=run,
    )


PRESETS = {
    "shakespeare-char": (
        "the default: a modern small GPT on the plays; two minutes on two CPU cores",
        Config(
            model=ModelConfig(
                n_layer=4,
                n_head=4,
                d_model=192,
                context_length=128,
                positions="rotary",
                norm="rmsnorm",
                mlp="relu2",
                qk_norm=True,
                bias=False,
                tie_embeddings=False,
            ),
            data=DataConfig("data/prepared/shakespeare-char"),
            optim=OptimConfig(
                optimizer="muon",
                lr=1e-2,
                warmup_steps=20,
                max_steps=1200,
                schedule="linear",
                batch_size=16,
                beta2=0.95,
            ),
            run=RunConfig(eval_every=100, save_every=300),
        ),
    ),
    "nanogpt-cpu": (
        "GPT-2 architecture with nanoGPT's published CPU recipe, to compare with; "
        "needs tinyshakespeare-char",
        _nanogpt(
            ModelConfig(n_layer=4, n_head=4, d_model=128, context_length=64),
            batch_size=12,
            max_steps=2000,
            run=RunConfig(precision="float32", eval_every=250, eval_batches=20),
        ),
    ),
    "shakespeare-gpu": (
        "nanoGPT's published GPU recipe (validation loss 1.4697), to compare with; "
        "needs tinyshakespeare-char",
        _nanogpt(
            ModelConfig(n_layer=6, n_head=6, d_model=384, context_length=256, dropout=0.2),
            batch_size=64,
            max_steps=5000,
            run=RunConfig(eval_every=250, eval_batches=0),
        ),
    ),
}
