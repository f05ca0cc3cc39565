"""DeepSpeed's plain engine: ZeRO 0, 2 and 3, without a pipeline."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor, nn

from parallel.engine_steps import EngineSteps, Labels, OptimizerFactory, PipelineInput, StepBatch, StepResult
from parallel.loss import TokenLoss
from parallel.stages import StageSettings, layer_list
from parallel.zero import EngineSettings, deepspeed_configuration


class _WholeModel(nn.Module):
    """All layers in one process, with the loss: what the plain engine runs."""

    def __init__(self, stage: StageSettings, loss: TokenLoss) -> None:
        super().__init__()
        specs = layer_list(stage)
        self.layers = nn.ModuleList(spec.build() for spec in (specs[:-1] if stage.model.tie_embeddings else specs))
        self._tied_head = specs[-1].forward_fn if stage.model.tie_embeddings else None
        self._loss = loss

    def forward(self, inputs: PipelineInput, targets: Tensor, factor: Tensor) -> Tensor:
        """Weighted loss of one micro-batch."""
        carried: Any = inputs
        for layer in self.layers:
            carried = layer(carried)
        if self._tied_head is not None:
            carried = self._tied_head(self.layers[0], carried)
        return self._loss(carried, (targets, factor))


class PlainSteps(EngineSteps):
    """DeepSpeed's plain engine: ZeRO 0, 2 and 3, one pipeline stage."""

    reads_data = True
    minimum_micro_batches = 1

    def __init__(
        self, stage: StageSettings, settings: EngineSettings, make_optimizer: OptimizerFactory, on_cpu: bool
    ) -> None:
        super().__init__(stage, settings)
        self.device = stage.device
        self.clips_itself = settings.zero_stage == 0
        self.grad_clip = settings.grad_clip
        self.grad_norm: float | None = None
        self.skipped = False
        model = _WholeModel(stage, self.loss)
        config = deepspeed_configuration(settings, on_cpu)
        self.engine = DeepSpeedEngine(
            args=None,
            model=model,
            optimizer=make_optimizer(list(model.parameters())),
            mpu=self.mesh.grid,
            config=config,
            config_class=DeepSpeedConfig(config, self.mesh.grid),
            dist_init_required=False,
        )
        self.loss_stage, self.holds_loss = 0, True
        self._take_over_update()

    def _inputs(self, micro_batch: tuple[PipelineInput, Labels]) -> tuple[PipelineInput, Tensor, Tensor]:
        inputs, (targets, factor) = micro_batch
        move = lambda tensor: tensor.to(self.device, non_blocking=True)  # noqa: E731
        return (tuple(map(move, inputs)) if isinstance(inputs, tuple) else move(inputs)), move(targets), move(factor)

    def train_step(self, batch: StepBatch | None) -> StepResult:
        """Forward and backward of each micro-batch; the update with the last."""
        assert batch is not None
        self.loss.reset()
        self.engine.train()
        self.phase.begin_batch()
        for micro_batch in batch:
            self.phase.pass_over("forward")
            loss = self.engine(*self._inputs(micro_batch))
            self.phase.pass_over("backward")
            self.engine.backward(loss)
            self.phase.enter("reducing and updating")
            self.engine.step()
        losses = self._losses_of_the_step()
        if self.clips_itself:
            return StepResult(losses, self.grad_norm, self.skipped)
        return StepResult(losses, self.engine.get_global_grad_norm(), not self.engine._step_applied)

    def _update(self, update: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        """Without ZeRO DeepSpeed hands the update to torch's optimizer: norm, clipping and skipping are ours."""
        if not self.clips_itself:
            return update(*arguments, **keywords)
        parameters = [parameter for parameter in self.parameters if parameter.grad is not None]
        counted = [p for p in parameters if not p.slice.replicated or self.mesh.tensor_rank == 0]  # type: ignore[attr-defined]
        norms = torch._foreach_norm([p.grad for p in counted if p.grad is not None])
        square = torch.stack(norms).square().sum() if norms else torch.zeros((), device=self.device)
        dist.all_reduce(square, group=self.mesh.model_group)
        self.grad_norm = float(square.sqrt())
        self.skipped = not math.isfinite(self.grad_norm)
        if self.skipped:
            self.grad_norm = math.inf
            return None
        if self.grad_clip > 0.0:
            coefficient = min(1.0, self.grad_clip / (self.grad_norm + 1e-6))
            torch._foreach_mul_([p.grad for p in parameters if p.grad is not None], coefficient)
        return update(*arguments, **keywords)

    def evaluate(self, batch: StepBatch | None, micro_batches: int) -> Tensor:
        """Mean losses [2] over the targets of the micro-batches of all data-parallel processes; no update."""
        assert batch is not None
        self.loss.reset()
        self.engine.eval()
        self.phase.begin_batch(evaluating=True)
        with torch.no_grad():
            for micro_batch in batch:
                self.phase.pass_over("forward")
                self.engine(*self._inputs(micro_batch))
            return self._mean_losses(micro_batches)
