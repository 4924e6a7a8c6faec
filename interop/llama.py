"""Llama's format, as Hugging Face has it: rotary positions, whose pairs stand half a head apart as
they do here, RMSNorm and SwiGLU.

Meta's own files have pairs side by side; Hugging Face's converter has reordered the rows of queries
and keys already.
"""

from typing import Any

from interop.keys import Keys
from interop.places import Place, Places
from model.config import ModelConfig

NAME = "Llama's format"
PREFIX = "model."
"""What transformers puts before the names of all tensors but the unembedding's."""
ACTIVATIONS = {"silu": "swiglu", "swish": "swiglu"}
SCALED = "positions here turn without scaling"


def read_config(keys: Keys) -> tuple[ModelConfig, list[str]]:
    """The shape that a config.json describes, and lines about it (none). Raises UserError, by name,
    for a key that no model here follows, ValueError where the numbers don't fit together.
    """
    width, n_head = keys.whole("hidden_size"), keys.whole("num_attention_heads")
    bias = keys.truth("attention_bias", False)
    if keys.truth("mlp_bias", False) != bias:
        raise keys.refuse("mlp_bias", f"models here have biases everywhere or nowhere, {bias=}")
    if keys.whole("head_dim", max(1, width // n_head)) * n_head != width:
        raise keys.refuse(
            "head_dim", f"heads here share the width {width} evenly, {width / n_head:g} each"
        )
    n_kv_head = keys.whole("num_key_value_heads", n_head)
    d_ff = keys.whole("intermediate_size")
    keys.take("vocab_size")  # the weights say it
    config = ModelConfig(
        n_layer=keys.whole("num_hidden_layers"),
        n_head=n_head,
        n_kv_head=0 if n_kv_head == n_head else n_kv_head,
        d_model=width,
        d_ff=0 if d_ff == 8 * max(1, round(width / 3)) else d_ff,
        context_length=keys.whole("max_position_embeddings", 2048),
        positions="rotary",
        rope_base=_rope_base(keys),
        norm="rmsnorm",
        norm_eps=keys.number("rms_norm_eps", 1e-6),
        mlp=keys.choice("hidden_act", ACTIVATIONS, "silu"),  # type: ignore[arg-type]
        tie_embeddings=keys.truth("tie_word_embeddings", False),
        bias=bias,
    )
    return config, []


def _rope_base(keys: Keys) -> float:
    """rope_theta, which newer files keep inside rope_parameters."""
    base = keys.number("rope_theta", 10_000.0)
    for name in ("rope_scaling", "rope_parameters"):
        inner = keys.take(name, {})
        if not isinstance(inner, dict):
            raise keys.refuse(name, "it must be an object or null")
        kind = inner.get("rope_type", inner.get("type", "default"))
        others = inner.keys() - {"rope_type", "type", "rope_theta"}
        if kind != "default" or any(
            inner[other] not in (None, 1.0) or other != "partial_rotary_factor" for other in others
        ):
            raise keys.refuse(name, SCALED)
        found = inner.get("rope_theta", base)
        if isinstance(found, bool) or not isinstance(found, int | float):
            raise keys.refuse(name, "rope_theta in it must be a number")
        if "rope_theta" in keys.plain and found != base:
            raise keys.refuse(name, f"rope_theta beside it is {base:g}")
        base = float(found)
    return base


def obstacles(config: ModelConfig) -> list[str]:
    """The options of a model that the format can't express; none where it can."""
    return [
        f"--{name} {getattr(config, name)}"
        for name, wanted in (("positions", "rotary"), ("norm", "rmsnorm"), ("mlp", "swiglu"))
        if getattr(config, name) != wanted
    ]


def write_config(config: ModelConfig, vocab_size: int) -> dict[str, Any]:
    """config.json of a model without `obstacles`."""
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": vocab_size,
        "hidden_size": config.d_model,
        "intermediate_size": config.d_mlp,
        "num_hidden_layers": config.n_layer,
        "num_attention_heads": config.n_head,
        "num_key_value_heads": config.n_key_head,
        "head_dim": config.d_head,
        "hidden_act": "silu",
        "max_position_embeddings": config.context_length,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_base,
        "rope_scaling": None,
        "attention_bias": config.bias,
        "mlp_bias": config.bias,
        "attention_dropout": config.dropout,
        "tie_word_embeddings": config.tie_embeddings,
    }


def places(config: ModelConfig) -> Places:
    """Where each tensor stands; names without the prefix "model."."""
    found = {"embed.weight": Place("embed_tokens.weight"), "norm.weight": Place("norm.weight")}
    for i in range(config.n_layer):
        ours, theirs = f"blocks.{i}.", f"layers.{i}."
        found[f"{ours}attention_norm.weight"] = Place(f"{theirs}input_layernorm.weight")
        found[f"{ours}mlp_norm.weight"] = Place(f"{theirs}post_attention_layernorm.weight")
        for kind in ("weight", "bias") if config.bias else ("weight",):
            for name, other in (
                ("attention.query", "self_attn.q_proj"),
                ("attention.key", "self_attn.k_proj"),
                ("attention.value", "self_attn.v_proj"),
                ("attention.project", "self_attn.o_proj"),
                ("mlp.gate", "mlp.gate_proj"),
                ("mlp.up", "mlp.up_proj"),
                ("mlp.project", "mlp.down_proj"),
            ):
                found[f"{ours}{name}.{kind}"] = Place(f"{theirs}{other}.{kind}")
    if not config.tie_embeddings:
        found["unembed.weight"] = Place("lm_head.weight")
    return found
