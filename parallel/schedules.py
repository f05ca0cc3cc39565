"""The choices of a layout that a configuration names; without torch, so that a configuration is read quickly."""

from enum import StrEnum


class Schedule(StrEnum):
    """In which order a stage computes the micro-batches of a step."""

    ONE_F_ONE_B = "1f1b"
    """One forward, one backward (arXiv 2104.04473, section 2.2.1)."""
    DUALPIPEV = "dualpipev"
    """Each stage holds a chunk of the way out and one of the way back (DualPipeV of DeepSeek-V3)."""

    def chunks(self, pipeline: int) -> int:
        """Number of parts into which the blocks are cut."""
        return 2 * pipeline if self is Schedule.DUALPIPEV else pipeline


class Recompute(StrEnum):
    """What is computed again in the backward pass instead of being kept."""

    NONE = "none"
    SUBLAYER = "sublayer"
    """Each residual branch keeps its input only."""
    BLOCK = "block"
    """Each block keeps its input only."""
