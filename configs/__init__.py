"""Configuration and presets. A preset is a typed value, named on the command line and varied there
field by field.
"""

from configs.gpt2 import PRESETS as GPT2
from configs.induction import PRESETS as INDUCTION
from configs.schema import Config, DataConfig, ModelConfig, OptimConfig, RunConfig, read_config
from configs.shakespeare import PRESETS as SHAKESPEARE
from configs.speedrun import PRESETS as SPEEDRUN

PRESETS: dict[str, tuple[str, Config]] = {**SHAKESPEARE, **INDUCTION, **SPEEDRUN, **GPT2}
"""Name -> (what it is, in one line; the configuration)."""

__all__ = [
    "PRESETS",
    "Config",
    "DataConfig",
    "ModelConfig",
    "OptimConfig",
    "RunConfig",
    "read_config",
]
