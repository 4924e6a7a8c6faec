"""A published config.json, read so that no key goes unnoticed: each is used, known to change
nothing, or refused by name.
"""

import json
from typing import Any

from errors import UserError

HARMLESS = {
    # who made it, and how it is shown, loaded or stored
    *("_name_or_path", "name_or_path", "architectures", "model_type", "transformers_version"),
    *("torch_dtype", "dtype", "use_bfloat16", "torchscript", "_commit_hash", "auto_map"),
    *("_attn_implementation", "_attn_implementation_autoset", "attn_implementation"),
    *("transformers.js_config", "is_llama_config", "unsloth_version", "unsloth_fixed"),
    # what a call gives back, and the cache, which are no part of the function
    *("use_cache", "return_dict", "return_dict_in_generate", "output_scores"),
    *("output_hidden_states", "output_attentions", "use_return_dict"),
    # first weights and training
    *("initializer_range", "gradient_checkpointing", "attention_dropout", "task_specific_params"),
    # heads for classification and pooling, whose weights would be refused
    *("summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels"),
    *("summary_first_dropout", "id2label", "label2id", "num_labels", "problem_type"),
    "finetuning_task",
    # defaults of drawing, which sample.py's options say here
    *("max_length", "min_length", "do_sample", "early_stopping", "num_beams", "num_beam_groups"),
    *("diversity_penalty", "temperature", "top_k", "top_p", "typical_p", "repetition_penalty"),
    *("length_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size"),
    *("bad_words_ids", "num_return_sequences", "exponential_decay_length_penalty"),
    *("suppress_tokens", "begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id"),
    *("remove_invalid_values", "prefix", "sep_token_id", "decoder_start_token_id"),
    *("pad_token_id", "unk_token_id"),
    # how it is computed, with the same result
    *("chunk_size_feed_forward", "pretraining_tp", "reorder_and_upcast_attn", "tf_legacy_loss"),
    # of other kinds of model; the values that would matter are refused below
    *("tokenizer_class", "max_window_layers"),
}
"""Keys that change nothing about the logits, whatever they hold."""

ONLY: dict[str, tuple[Any, ...]] = {
    "quantization_config": (None,),
    "compression_config": (None,),
    "pruned_heads": (None, {}),
    "is_encoder_decoder": (False, None),
    "is_decoder": (False, True, None),
    "add_cross_attention": (False, None),
    "cross_attention_hidden_size": (None,),
    "tie_encoder_decoder": (False, None),
    "sliding_window": (None,),
    "use_sliding_window": (False, None),
    "layer_types": (None,),
    "partial_rotary_factor": (None, 1.0),
    "rope_interleaved": (False, None),
    "use_qk_norm": (False, None),
    "qk_layernorm": (False, None),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
}
"""Keys of which a model here has these values alone."""


class Keys:
    """The keys of a configuration; `origin` is the file, for messages. Each reader raises UserError
    for a value of the wrong type.
    """

    def __init__(self, plain: dict[str, Any], origin: str):
        self.plain = plain
        self.origin = origin
        self.used: set[str] = set()

    def refuse(self, name: str, why: str) -> UserError:
        """The error for a key, to be raised."""
        return UserError(f"{self.origin}: {name} is {str(self.plain.get(name))[:60]!r}; {why}")

    def take(self, name: str, default: Any = None) -> Any:
        """A value as it stands, or the default where there is none or null."""
        self.used.add(name)
        value = self.plain.get(name)
        return default if value is None else value

    def whole(self, name: str, default: int | None = None) -> int:
        """A whole number of at least 1; without a default the key must be there."""
        value = self.take(name, default)
        if value is None:
            raise UserError(f"{self.origin} lacks {name}, which says how large the model is")
        if type(value) is not int or not 1 <= value < 2**31:
            raise self.refuse(name, "it must be a whole number of at least 1")
        return value

    def number(self, name: str, default: float) -> float:
        """A number."""
        value = self.take(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.refuse(name, "it must be a number")
        return float(value)

    def truth(self, name: str, default: bool) -> bool:
        """true or false."""
        value = self.take(name, default)
        if not isinstance(value, bool):
            raise self.refuse(name, "it must be true or false")
        return value

    def choice(self, name: str, choices: dict[str, str], default: str) -> str:
        """What one of the words in `choices` stands for here."""
        value = self.take(name, default)
        if not isinstance(value, str) or value not in choices:
            raise self.refuse(name, f"models here have {', '.join(choices)}")
        return choices[value]

    def finish(self) -> None:
        """Raise UserError for the first key that nothing has read and that may matter."""
        for name, value in self.plain.items():
            if name in self.used or name in HARMLESS:
                continue
            if name not in ONLY:
                raise self.refuse(
                    name,
                    "this program doesn't know that key: take it out of a copy of the file if it "
                    "changes nothing",
                )
            if value not in ONLY[name]:
                allowed = " or ".join(map(json.dumps, ONLY[name]))
                raise self.refuse(name, f"models here have {allowed} alone")
