"""Knowing before paying: what a run takes in parameters, FLOPs, memory and time, and which dial to
turn when memory has run out.
"""

from ops.plan.advice import (
    advise,
    agree_on_micro_batch,
    memory_warning,
    out_of_memory_advice,
    warn_at_start,
)
from ops.plan.counting import Plan, make_plan, training_bytes
from ops.plan.report import describe, report
from ops.plan.timing import time_steps

__all__ = [
    "Plan",
    "advise",
    "agree_on_micro_batch",
    "describe",
    "make_plan",
    "memory_warning",
    "out_of_memory_advice",
    "report",
    "time_steps",
    "training_bytes",
    "warn_at_start",
]
