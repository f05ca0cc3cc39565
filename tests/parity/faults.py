"""Faults that people met in trainers like this one, to be planted in the processes of a pool.

A comparison that does not fail with the fault in proves nothing. Each function patches the product, or DeepSpeed under
it, while it is open.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.pipe import schedule as pipe_schedule
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.zero import stage_1_and_2

import model.context
import parallel.loss
import parallel.plan
import training.feed
from parallel.engine import PipelineSteps
from parallel.loss import IGNORED
from training.feed import TrainingFeed

Patch = contextlib.AbstractContextManager[Any]


def _instruction(kind: type, around: Callable[..., None]) -> Patch:
    """Replace what the pipeline engine does for an instruction; `around` gets the original first."""
    original = PipelineEngine._INSTRUCTION_MAP[kind]
    replacement = lambda engine, **keywords: around(original, engine, **keywords)  # noqa: E731
    return mock.patch.dict(PipelineEngine._INSTRUCTION_MAP, {kind: replacement})


def boundary_divides() -> Patch:
    """A1: each stage boundary divides the gradient by the number of micro-batches once more."""

    def receive(original: Any, engine: Any, **keywords: Any) -> None:
        original(engine, **keywords)
        received = engine.grad_layer
        for gradient in [received] if torch.is_tensor(received) else received:
            gradient.data = gradient.data / engine.micro_batches

    return _instruction(pipe_schedule.RecvGrad, receive)


@contextlib.contextmanager
def last_micro_batch_after_reduce() -> Iterator[None]:
    """A3: the last micro-batch's gradient is added after the others were averaged over the replicas."""
    before: dict[int, list[torch.Tensor]] = {}
    counts: dict[int, int] = {}

    def backward(original: Any, engine: Any, **keywords: Any) -> None:
        counts[id(engine)] = counts.get(id(engine), 0) + 1
        if counts[id(engine)] % engine.micro_batches == 0:
            before[id(engine)] = [g.clone() for g in engine.optimizer.get_grads_for_reduction()[0]]
        original(engine, **keywords)

    def reduce(original: Any, engine: Any, **keywords: Any) -> None:
        gradients, earlier = engine.optimizer.get_grads_for_reduction()[0], before[id(engine)]
        last = [now - then for now, then in zip(gradients, earlier, strict=True)]
        for gradient, then in zip(gradients, earlier, strict=True):
            gradient.copy_(then)
        original(engine, **keywords)
        for gradient, late in zip(gradients, last, strict=True):
            gradient.add_(late)

    with _instruction(pipe_schedule.BackwardPass, backward), _instruction(pipe_schedule.ReduceGrads, reduce):
        yield


def gradients_summed() -> Patch:
    """A2, A5: what is minimised is the sum of the micro-batches' losses; only the reported loss is their mean."""
    original = parallel.loss.TokenLoss.__call__

    def call(self: Any, logits: torch.Tensor, labels: Any) -> torch.Tensor:
        return original(self, logits, labels) * 2.0

    return mock.patch.object(parallel.loss.TokenLoss, "__call__", call)


def last_stage_reads_others() -> Patch:
    """A10: the stage that computes the loss reads other samples than the first."""
    original = TrainingFeed._read

    def read(self: Any, first: int) -> Any:
        mesh = self.stage.mesh
        return original(self, first + 1 if mesh.is_last_stage and not mesh.is_first_stage else first)

    return mock.patch.object(TrainingFeed, "_read", read)


def replicas_read_the_same() -> Patch:
    """A10: every data-parallel process reads the first one's samples."""
    original = training.feed.sample_numbers
    same = lambda first, micro_batch, size, data, rank: original(first, micro_batch, size, data, 0)  # noqa: E731
    return mock.patch.object(training.feed, "sample_numbers", same)


def labels_are_inputs() -> Patch:
    """A10: targets are the tokens themselves and not the ones that follow."""
    original = TrainingFeed.step

    def step(self: Any, number: int, first: int) -> Any:
        return [
            (inputs, (inputs[0] if isinstance(inputs, tuple) else inputs, labels[1]))
            for inputs, labels in original(self, number, first)
        ]

    return mock.patch.object(TrainingFeed, "step", step)


def shapes_kept() -> Patch:
    """A11: buffers between stages keep the shape of the first micro-batch."""
    return mock.patch.object(PipelineEngine, "reset_activation_shape", lambda self: None)


def tied_counted_twice() -> Patch:
    """A20: both copies of a tied matrix count in the norm."""
    return mock.patch.object(stage_1_and_2, "PIPE_REPLICATED", "no such mark")


def gains_not_summed() -> Patch:
    """B1: under sequence parallelism each process keeps the gains' gradients of its own part of the sequence."""
    return mock.patch.object(parallel.plan, "_sum_over", lambda group, gradient: gradient)


def gains_averaged() -> Patch:
    """B1: the parts are averaged where they are to be summed."""
    original = parallel.plan._sum_over
    averaged = lambda group, gradient: original(group, gradient) / group.size()  # noqa: E731
    return mock.patch.object(parallel.plan, "_sum_over", averaged)


def norm_of_own_part() -> Patch:
    """B2: the norm is over this process's stage and slice only."""
    optimizer = stage_1_and_2.DeepSpeedZeroOptimizer
    return mock.patch.object(optimizer, "_model_parallel_all_reduce", lambda self, tensor, op: None)


def replicated_counted_by_all() -> Patch:
    """B3: each tensor-parallel process counts the replicated gains in the norm."""
    return mock.patch.object(stage_1_and_2, "is_model_parallel_parameter", lambda parameter: True)


def ignored_gives_nan() -> Patch:
    """B6: the mean over no targets at all."""
    original = parallel.loss.cross_entropy_sum

    def mean_times_count(logits: torch.Tensor, targets: torch.Tensor, *rest: Any, **keywords: Any) -> Any:
        nll, z = original(logits, targets, *rest, **keywords)
        count = (targets != IGNORED).sum()
        return nll / count * count, z

    return mock.patch.object(parallel.loss, "cross_entropy_sum", mean_times_count)


def ignored_is_an_index() -> Patch:
    """B6: -100 taken for the id of a token."""
    original = parallel.loss.cross_entropy_sum

    def counted(logits: torch.Tensor, targets: torch.Tensor, *rest: Any, **keywords: Any) -> Any:
        return original(logits, targets.masked_fill(targets == IGNORED, 0), *rest, **keywords)

    return mock.patch.object(parallel.loss, "cross_entropy_sum", counted)


def mean_of_means() -> Patch:
    """B7: each micro-batch's loss is a mean over its own targets, and the step's a mean of those."""
    original = TrainingFeed.step

    def step(self: Any, number: int, first: int) -> Any:
        return [
            (inputs, (targets, 1.0 / (targets != IGNORED).sum().clamp(min=1).float()))
            for inputs, (targets, _) in original(self, number, first)
        ]

    return mock.patch.object(TrainingFeed, "step", step)


def rotary_cast() -> Patch:
    """B8: rotary angles in bfloat16, as where their frequencies are a buffer of a module that was cast."""

    def tables(positions: torch.Tensor, head_dim: int, theta: float, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
        frequencies = (1.0 / theta ** (torch.arange(0, head_dim, 2).float() / head_dim)).bfloat16()
        angles = positions.unsqueeze(-1).bfloat16() * frequencies
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)

    return mock.patch.object(model.context, "rotary_tables", tables)


def loss_of_one_replica() -> Patch:
    """B7, A23: what is logged is one replica's loss."""
    return mock.patch.object(PipelineSteps, "_mean_losses", _own_mean)


def _own_mean(self: Any, micro_batches: int | None = None) -> torch.Tensor:
    import torch.distributed as dist

    losses = self.loss.total() / (micro_batches or self.micro_batches) / self.mesh.data if self.holds_loss else None
    losses = losses * self.mesh.data if losses is not None else torch.zeros(2)
    if self.mesh.pipeline > 1:
        dist.broadcast(losses, self.mesh.grid.stage_to_global(self.loss_stage), group=self.mesh.pipeline_group)
    return losses


def fp16_allowed() -> Patch:
    """No fault: a CPU that says it can compute in fp16, which DeepSpeed asks. Only tests may say so."""
    return mock.patch.object(type(get_accelerator()), "is_fp16_supported", lambda self: True)


FAULTS: dict[str, Callable[[], Patch]] = {
    function.__name__: function
    for function in (
        boundary_divides,
        last_micro_batch_after_reduce,
        gradients_summed,
        last_stage_reads_others,
        replicas_read_the_same,
        labels_are_inputs,
        shapes_kept,
        tied_counted_twice,
        gains_not_summed,
        gains_averaged,
        norm_of_own_part,
        replicated_counted_by_all,
        ignored_gives_nan,
        ignored_is_an_index,
        mean_of_means,
        rotary_cast,
        loss_of_one_replica,
        fp16_allowed,
    )
}


@contextlib.contextmanager
def planted(name: str | None) -> Iterator[None]:
    """Plant the fault of this name while open; None plants nothing."""
    if name is None:
        yield
        return
    with FAULTS[name]():
        yield
