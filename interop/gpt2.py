"""GPT-2's format, as Hugging Face has it: learned positions, LayerNorm, and linear layers kept as
inputs x outputs, queries, keys and values in one.
"""

from typing import Any

from interop.keys import Keys
from interop.places import Place, Places
from model.config import ModelConfig

NAME = "GPT-2's format"
PREFIX = "transformer."
"""What transformers puts before the names of all tensors but the unembedding's."""
ACTIVATIONS = {
    "gelu_new": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "gelu_fast": "gelu",
    "gelu": "gelu_exact",
    "relu2": "relu2",
}
"""Their names of the non-linearity -> ours; the first one of ours is written."""
DROPOUTS = ("resid_pdrop", "embd_pdrop", "attn_pdrop")
NO_BIAS = "glassgpt_bias"
"""A key of our own: false where the biases, which the format must have, are zeros put there."""


def read_config(keys: Keys) -> tuple[ModelConfig, list[str]]:
    """The shape that a config.json describes, and lines about it. Raises UserError, by name, for a
    key that no model here follows, ValueError where the numbers don't fit together.
    """
    width = keys.whole("n_embd", 768)
    context_length = keys.whole("n_positions", 1024)
    if keys.take("n_ctx", context_length) != context_length:
        raise keys.refuse("n_ctx", f"it must be as n_positions, {context_length}")
    dropouts = [keys.number(name, 0.1) for name in DROPOUTS]
    notes = []
    if len(set(dropouts)) > 1:
        notes.append(f"note: {', '.join(DROPOUTS)} differ; the run's dropout is 0")
        dropouts = [0.0]
    keys.take("vocab_size")  # the weights say it
    config = ModelConfig(
        n_layer=keys.whole("n_layer", 12),
        n_head=keys.whole("n_head", 12),
        d_model=width,
        d_ff=_unless_usual(keys.whole("n_inner", 4 * width), 4 * width),
        context_length=context_length,
        mlp=keys.choice("activation_function", ACTIVATIONS, "gelu_new"),  # type: ignore[arg-type]
        norm_eps=keys.number("layer_norm_epsilon", 1e-5),
        tie_embeddings=keys.truth("tie_word_embeddings", True),
        bias=keys.truth(NO_BIAS, True),
        dropout=dropouts[0],
    )
    return config, notes


def _unless_usual(value: int, usual: int) -> int:
    return 0 if value == usual else value


def obstacles(config: ModelConfig) -> list[str]:
    """The options of a model that the format can't express; none where it can."""
    found = [
        f"--{name} {getattr(config, name)}"
        for name, wanted in (("positions", "learned"), ("norm", "layernorm"))
        if getattr(config, name) != wanted
    ]
    if config.mlp not in ACTIVATIONS.values():
        found.append(f"--mlp {config.mlp}")
    if config.n_key_head != config.n_head:
        found.append(f"--n-kv-head {config.n_kv_head}")
    return found


def write_config(config: ModelConfig, vocab_size: int) -> dict[str, Any]:
    """config.json of a model without `obstacles`."""
    plain = {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "vocab_size": vocab_size,
        "n_positions": config.context_length,
        "n_embd": config.d_model,
        "n_layer": config.n_layer,
        "n_head": config.n_head,
        "n_inner": config.d_mlp,
        "activation_function": next(a for a, ours in ACTIVATIONS.items() if ours == config.mlp),
        **dict.fromkeys(DROPOUTS, config.dropout),
        "layer_norm_epsilon": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
    }
    return plain if config.bias else {**plain, NO_BIAS: False}


def places(config: ModelConfig, linear: bool = False) -> Places:
    """Where each tensor stands; names without the prefix "transformer.". `linear`: matrices are
    kept as outputs x inputs, as nanoGPT does.
    """
    found = {"embed.weight": Place("wte.weight"), "positions.table.weight": Place("wpe.weight")}
    kinds = ("weight", "bias") if config.bias else ("weight",)
    for kind in kinds:
        turned = kind == "weight" and not linear
        for i in range(config.n_layer):
            ours, theirs = f"blocks.{i}.", f"h.{i}."
            found[f"{ours}attention_norm.{kind}"] = Place(f"{theirs}ln_1.{kind}")
            for part, name in enumerate(("query", "key", "value")):
                place = Place(f"{theirs}attn.c_attn.{kind}", turned, part, 3)
                found[f"{ours}attention.{name}.{kind}"] = place
            found[f"{ours}attention.project.{kind}"] = Place(f"{theirs}attn.c_proj.{kind}", turned)
            found[f"{ours}mlp_norm.{kind}"] = Place(f"{theirs}ln_2.{kind}")
            found[f"{ours}mlp.up.{kind}"] = Place(f"{theirs}mlp.c_fc.{kind}", turned)
            found[f"{ours}mlp.project.{kind}"] = Place(f"{theirs}mlp.c_proj.{kind}", turned)
        found[f"norm.{kind}"] = Place(f"ln_f.{kind}")
    if not config.tie_embeddings:
        found["unembed.weight"] = Place("lm_head.weight")
    return found
