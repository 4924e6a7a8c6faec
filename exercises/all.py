"""The exercises, in order."""

from exercises import part_1, part_2
from exercises.kinds import Exercise

EXERCISES: list[Exercise] = [*part_1.EXERCISES, *part_2.EXERCISES]
