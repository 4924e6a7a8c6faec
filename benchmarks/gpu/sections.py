"""The sections by name. Importing this loads torch and all that they need."""

from benchmarks.gpu.checks import tests
from benchmarks.gpu.facts import facts
from benchmarks.gpu.lengths import attention
from benchmarks.gpu.process import Section
from benchmarks.gpu.runs import resume, speedruns
from benchmarks.gpu.sampling import sampling
from benchmarks.gpu.training import batches, itself, training

SECTIONS: dict[str, Section] = {
    "facts": facts,
    "training": training,
    "train.py": itself,
    "sampling": sampling,
    "tests": tests,
    "resume": resume,
    "attention": attention,
    "batches": batches,
    "speedruns": speedruns,
}
