"""What both engines share: recorded losses, the guard against a loss that is not finite, learning rate, state."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor, nn

from parallel.fragments import Fragment, owned_fragments, owned_gradients, prepare_optimizer_state, share_weights
from parallel.loss import TokenLoss
from parallel.loss_scale import loss_scale_state, set_loss_scale_state
from parallel.phase import Phase
from parallel.stages import StageSettings
from parallel.zero import EngineSettings

PipelineInput = Tensor | tuple[Tensor, Tensor]
"""Token ids [b, s], or (token ids, side tensor)."""
Labels = tuple[Tensor, Tensor]
"""Targets [b, s] and the float32 factor on their summed loss."""
StepBatch = Iterable[tuple[PipelineInput, Labels]]
"""The micro-batches of one step of one data-parallel process."""

OptimizerFactory = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True)
class StepResult:
    """What one training step yields; the same on every process."""

    losses: Tensor
    """[2] float32 on the device: mean loss over the targets of the global batch, before the update; mean z-loss."""
    grad_norm: Any
    """Norm of the whole gradient before clipping (a float or a tensor); infinite where the step was skipped."""
    skipped: bool
    """Whether a loss or a gradient was not finite, so that weights and moments stayed as they were."""


class EngineSteps:
    """What both engines share: recorded losses, the guard against a loss that is not finite, learning rate, state."""

    engine: DeepSpeedEngine
    holds_loss: bool
    """Whether this process computes the loss: the last stage under 1f1b, the first under dualpipev."""
    loss_stage: int

    def __init__(self, stage: StageSettings, settings: EngineSettings) -> None:
        self.mesh = stage.mesh
        self.micro_batches = settings.micro_batches
        self.loss = TokenLoss(stage.model, stage.mesh)
        self.phase = Phase()
        """Where this process notes what it is doing."""
        self.before_update: Callable[[], None] | None = None
        """Called once before the next update, while gradients are reduced and not yet clipped; then forgotten."""
        self.refuse_update: Callable[[float], bool] | None = None
        """Asked before each update with the step's mean loss, the same on every process: whether to leave it out."""
        self._step_losses: Tensor | None = None
        """The mean losses of the newest step, the same on every process."""

    def _take_over_update(self) -> None:
        """Put our steps before the engine's update: every engine of DeepSpeed ends in `self.optimizer.step()`."""
        update = self.engine.optimizer.step

        def step(*arguments: Any, **keywords: Any) -> Any:
            self._step_losses = self._mean_losses()
            self._spread_nonfinite_loss()
            if self.before_update is not None:
                self.before_update()
                self.before_update = None
            if not self._is_refused():
                return self._update(update, *arguments, **keywords)
            # A gradient that is not finite is what every engine knows how to leave out, on all processes alike; but
            # this one says nothing about the loss scale.
            scale = loss_scale_state(self.engine)
            if (gradient := next(owned_gradients(self.engine), None)) is not None:
                gradient[2].view(-1)[:1].fill_(math.nan)
            result = self._update(update, *arguments, **keywords)
            set_loss_scale_state(self.engine, scale or {})
            return result

        self.engine.optimizer.step = step

    def _is_refused(self) -> bool:
        return self.refuse_update is not None and self.refuse_update(float(self._losses_of_the_step()[0]))

    def _losses_of_the_step(self) -> Tensor:
        """The mean losses, gathered before the update."""
        assert self._step_losses is not None
        return self._step_losses

    def _update(self, update: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        """Let the engine measure the norm, clip, skip where it is not finite, and step."""
        return update(*arguments, **keywords)

    def _spread_nonfinite_loss(self) -> None:
        """Make one gradient element NaN where the loss is not finite (0 x loss is 0 otherwise): then all ranks skip.

        On every process, by the loss that all know: with bf16 each data-parallel process looks at its own gradients
        only, and one that skipped alone would be waited for by the others.
        """
        gradient = next(owned_gradients(self.engine), None)
        if gradient is not None and self._step_losses is not None:
            element = gradient[2].view(-1)[:1]
            element.add_((self._step_losses * 0.0).sum().to(element.dtype))

    def _mean_losses(self, micro_batches: int | None = None) -> Tensor:
        """Recorded sums over micro-batches and data-parallel processes, divided as the factors ask: [2], everywhere."""
        count = (micro_batches or self.micro_batches) * self.mesh.data
        losses = self.loss.total() / count if self.holds_loss else torch.zeros(2, device=self.engine.device)
        if self.holds_loss and self.mesh.data > 1:
            dist.all_reduce(losses, group=self.mesh.data_group)
        if self.mesh.pipeline > 1:
            dist.broadcast(losses, self.mesh.grid.stage_to_global(self.loss_stage), group=self.mesh.pipeline_group)
        return losses

    def set_learning_rate(self, value: float) -> None:
        """Set the learning rate of every parameter group."""
        for group in self.engine.optimizer.param_groups:
            group["lr"] = value

    def set_micro_batches(self, count: int) -> None:
        """Set the micro-batches of the steps that follow, on each data-parallel process."""
        if count != self.micro_batches:
            self.micro_batches = count
            self.engine.set_train_batch_size(count * self.engine.train_micro_batch_size_per_gpu() * self.mesh.data)
            self.engine.optimizer.gradient_accumulation_steps = count

    @property
    def parameters(self) -> Iterator[nn.Parameter]:
        """Parameters of this process; each carries `.slice`."""
        return self.engine.module.parameters()

    def fragments(self) -> Iterator[Fragment]:
        """The parts of weights and moments that this process owns, as views that may be read and overwritten."""
        prepare_optimizer_state(self.engine)
        return owned_fragments(self.engine, self.mesh)

    def gradients(self) -> Iterator[tuple[nn.Parameter, int, Tensor]]:
        """Parts of the reduced gradient that this process owns; only inside `before_update`."""
        return owned_gradients(self.engine)

    def weights_were_overwritten(self) -> None:
        """After writing to fragments: bring the weights of all data-parallel processes up to date."""
        share_weights(self.engine)
