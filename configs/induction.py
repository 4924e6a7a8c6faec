"""A preset to watch: two layers in which an induction head forms, and the loss falls with it."""

from configs.schema import Config, DataConfig, ModelConfig, OptimConfig, RunConfig

PRESETS = {
    "induction": (
        "two layers on random words said again: watch a previous-token head form, then an "
        "induction head, and the loss fall with it",
        Config(
            model=ModelConfig(
                n_layer=2,
                n_head=4,
                d_model=64,
                context_length=32,
                # A table tells a head where the letter before is; rotary's slow waves blur that.
                positions="learned",
                norm="rmsnorm",
                mlp="relu2",
                qk_norm=True,
                bias=False,
                tie_embeddings=False,
            ),
            data=DataConfig("data/prepared/induction-char"),
            optim=OptimConfig(
                optimizer="muon",
                lr=5e-3,
                warmup_steps=20,
                max_steps=240,
                schedule="constant",
                batch_size=48,
                beta2=0.99,
            ),
            run=RunConfig(
                precision="float32",  # so that the moment is the same on CPUs of every kind
                eval_every=20,
                eval_batches=4,
                save_every=100,
                sample_tokens=64,
            ),
        ),
    ),
}
