"""What a process is doing right now, noted by its main thread for whoever looks at it from another.

A note costs one assignment of a few words; nobody is told, and nothing waits.
"""

import time
from collections.abc import Callable
from types import MethodType
from typing import Any

from deepspeed.runtime.pipe import schedule


class Phase:
    """The newest note. Written by one thread, read by any."""

    def __init__(self) -> None:
        self.step = 0
        """Steps finished."""
        self.name = "starting"
        self.since = time.monotonic()
        self.moves = 0
        """Notes since the last finished step: who has fewer is further behind."""
        self.alive_at = self.since
        """When a step, or a micro-batch of an evaluation, was last finished."""
        self.evaluating = False
        self.micro_batch = {"forward": 0, "backward": 0}

    def enter(self, name: str) -> None:
        """Note what begins now."""
        self.name, self.since = name, time.monotonic()
        self.moves += 1

    def begin_batch(self, evaluating: bool = False) -> None:
        """Micro-batches are counted from here."""
        self.evaluating = evaluating
        self.micro_batch = {"forward": 0, "backward": 0}

    def pass_over(self, kind: str) -> None:
        """Note the next forward or backward pass."""
        self.micro_batch[kind] += 1
        self.enter(f"{'evaluating, ' if self.evaluating else ''}{kind} micro-batch {self.micro_batch[kind]}")
        if self.evaluating:
            self.alive_at = self.since

    def finished(self, step: int) -> None:
        """Note that a step is done."""
        self.step, self.moves = step, 0
        self.alive()

    def alive(self) -> None:
        """Note that whatever takes long has got on."""
        self.alive_at = time.monotonic()


Instruction = Callable[..., Any]


def announce_instructions(engine: Any, phase: Callable[[], Phase]) -> None:
    """Make a pipeline engine of DeepSpeed note each instruction of its schedule before it carries it out."""
    stage = engine.stage_id
    names: dict[type, str] = {
        schedule.LoadMicroBatch: "taking a micro-batch",
        schedule.SendActivation: f"sending to stage {stage + 1}",
        schedule.RecvActivation: f"receiving from stage {stage - 1}",
        schedule.SendGrad: f"sending the gradient to stage {stage - 1}",
        schedule.RecvGrad: f"receiving the gradient from stage {stage + 1}",
        schedule.ReduceTiedGrads: "reducing the gradient of the tied matrix",
        schedule.ReduceGrads: "reducing gradients",
        schedule.OptimizerStep: "updating",
    }
    if hasattr(schedule, "CommitP2P") and schedule.CommitP2P in engine._INSTRUCTION_MAP:
        # The V-shaped schedule only queues what it sends and receives, and exchanges it all at once.
        for queued in (schedule.SendActivation, schedule.RecvActivation, schedule.SendGrad, schedule.RecvGrad):
            names[queued] = "queueing an exchange"
        names[schedule.CommitP2P] = "exchanging with the neighbouring stages"

    def announced(kind: type, carry_out: Instruction) -> Instruction:
        def instruction(self: Any, **arguments: Any) -> Any:
            if kind is schedule.ForwardPass:
                phase().pass_over("forward")
            elif kind is schedule.BackwardPass:
                phase().pass_over("backward")
            else:
                phase().enter(names.get(kind, kind.__name__))
            return MethodType(carry_out, self)(**arguments)

        return instruction

    engine._INSTRUCTION_MAP = {kind: announced(kind, method) for kind, method in engine._INSTRUCTION_MAP.items()}
