"""The two engines behind one interface: DeepSpeed's pipeline engine and its plain one.

ZeRO 1 runs the pipeline engine for every pipeline size, 1 included; ZeRO 0, 2 and 3 run the plain engine,
without a pipeline. Either takes the micro-batches of one step, does forward, backward and update, and returns the
mean loss over all targets of the global batch.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.dualpipev import DualPipeVEngine, DualPipeVModule
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.module import PipelineModule
from torch import Tensor, nn

from parallel.deepspeed_patches import grid_reused
from parallel.fragments import Fragment, owned_fragments, owned_gradients, prepare_optimizer_state, share_weights
from parallel.loss import TokenLoss
from parallel.mesh import Mesh
from parallel.partition import stage_bounds
from parallel.schedules import Schedule
from parallel.stages import StageSettings, layer_list
from parallel.zero import EngineSettings, deepspeed_configuration

PipelineInput = Tensor | tuple[Tensor, Tensor]
"""Token ids [b, s], or (token ids, side tensor)."""
Labels = tuple[Tensor, Tensor]
"""Targets [b, s] and the float32 factor on their summed loss."""
StepBatch = Sequence[tuple[PipelineInput, Labels]]
"""The micro-batches of one step of one data-parallel process."""

OptimizerFactory = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True)
class StepResult:
    """What one training step yields; the same on every process."""

    losses: Tensor
    """[2] float32 on the device: mean loss over the targets of the global batch, before the update, and the mean z-loss."""
    grad_norm: Any
    """Norm of the whole gradient before clipping (a float or a tensor); infinite where the step was skipped."""
    skipped: bool
    """Whether a loss or a gradient was not finite, so that weights and moments stayed as they were."""


class _CutAsTold(PipelineModule):
    """DeepSpeed's container for the layers of this process's stage, on our grid and cut where we say."""

    def __init__(self, settings: StageSettings, block_counts: Sequence[int], loss: Callable[..., Tensor]) -> None:
        self.block_counts = list(block_counts)
        with grid_reused(settings.mesh.grid):
            super().__init__(layers=layer_list(settings), topology=settings.mesh.grid.topology(), loss_fn=loss)

    def _synchronize_tied_weights(self) -> None:
        """Nothing to do: both copies of a tied matrix are drawn by the same name."""


class _StageModule(_CutAsTold):
    """One run of layers a process."""

    def _partition_layers(self, method: str = "") -> None:
        stage = self._topo.get_coord(self.global_rank).pipe
        self.parts = layer_bounds(self.block_counts)
        self._set_bounds(self.parts[stage], self.parts[stage + 1])


class _VModule(_CutAsTold, DualPipeVModule):
    """Two runs of layers a process, for the V-shaped schedule: chunk r and chunk 2 x pipeline - 1 - r."""

    def _partition_layers(self, method: str = "") -> None:
        self.num_stages *= 2
        self.parts = layer_bounds(self.block_counts)
        mirror = self.num_stages - 1 - self.stage_id
        self.phase_bounds = [(self.parts[chunk], self.parts[chunk + 1]) for chunk in (self.stage_id, mirror)]


def layer_bounds(block_counts: Sequence[int]) -> list[int]:
    """First pipeline layer of each stage, and the number of layers: the embedding goes to the first, norm and head to the last."""
    bounds = [start + 1 for start, _ in stage_bounds(block_counts)] + [sum(block_counts) + 3]
    bounds[0] = 0
    return bounds


class _Steps:
    """What both engines share: recorded losses, the guard against a loss that is not finite, learning rate, state."""

    mesh: Mesh
    loss: TokenLoss
    engine: DeepSpeedEngine
    holds_loss: bool
    """Whether this process computes the loss: the last stage under 1f1b, the first under dualpipev."""
    loss_stage: int
    before_update: Callable[[], None] | None
    """Called once before the next update, while gradients are reduced and not yet clipped; then forgotten."""
    micro_batches: int

    def _take_over_update(self) -> None:
        """Put our steps before the engine's update: every engine of DeepSpeed ends in `self.optimizer.step()`."""
        update = self.engine.optimizer.step

        def step(*arguments: Any, **keywords: Any) -> Any:
            self._spread_nonfinite_loss()
            if self.before_update is not None:
                self.before_update()
                self.before_update = None
            return self._update(update, *arguments, **keywords)

        self.engine.optimizer.step = step

    def _update(self, update: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        """Let the engine measure the norm, clip, skip where it is not finite, and step."""
        return update(*arguments, **keywords)

    def _spread_nonfinite_loss(self) -> None:
        """Make one gradient element NaN where the loss is not finite (0 x loss is 0 otherwise): then all ranks skip."""
        if self.holds_loss:
            gradient = next(owned_gradients(self.engine), None)
            if gradient is not None:
                element = gradient[2].view(-1)[:1]
                element.add_((self.loss.total() * 0.0).sum().to(element.dtype))

    def _mean_losses(self, micro_batches: int | None = None) -> Tensor:
        """Recorded sums over all micro-batches and data-parallel processes, divided as the factors ask: [2], everywhere."""
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


class PipelineSteps(_Steps):
    """DeepSpeed's pipeline engine, ZeRO 1, any pipeline size."""

    def __init__(
        self,
        stage: StageSettings,
        settings: EngineSettings,
        schedule: Schedule,
        block_counts: Sequence[int],
        make_optimizer: OptimizerFactory,
        on_cpu: bool,
    ) -> None:
        self.mesh = stage.mesh
        self.micro_batches = settings.micro_batches
        self.loss = TokenLoss(stage.model, stage.mesh)
        self.before_update = None
        v_shaped = schedule is Schedule.DUALPIPEV
        module = (_VModule if v_shaped else _StageModule)(stage, block_counts, self.loss)
        # What `deepspeed.initialize` would do for a pipeline module, less its banner.
        config = deepspeed_configuration(settings, on_cpu)
        self.engine = (DualPipeVEngine if v_shaped else PipelineEngine)(
            args=None,
            model=module,
            optimizer=make_optimizer(list(module.parameters())),
            mpu=module.mpu(),
            config=config,
            config_class=DeepSpeedConfig(config, module.mpu()),
            dist_init_required=False,
        )
        self.loss_stage = 0 if v_shaped else self.mesh.pipeline - 1
        self.holds_loss = self.mesh.pipeline_rank == self.loss_stage
        self.minimum_micro_batches = 2 * self.mesh.pipeline if v_shaped else 1
        # Our own mean replaces DeepSpeed's, which would be computed besides and counts z-loss as loss.
        self.engine._aggregate_total_loss = self._mean_losses
        self._take_over_update()

    @property
    def reads_data(self) -> bool:
        """Whether this process needs micro-batches: the first stage their tokens, the loss's stage their targets."""
        return self.mesh.is_first_stage or self.holds_loss

    def train_step(self, batch: StepBatch | None) -> StepResult:
        """Forward, backward and update over the step's micro-batches (None on stages that read nothing)."""
        self.loss.reset()
        losses = self.engine.train_batch(iter(batch) if batch is not None else None)
        optimizer = self.engine.optimizer
        return StepResult(losses, optimizer._global_grad_norm, bool(optimizer.overflow))

    def evaluate(self, batch: StepBatch | None, micro_batches: int) -> Tensor:
        """Mean losses [2] over the targets of `micro_batches` micro-batches of each data-parallel process; no update."""
        self.loss.reset()
        # Buffers between stages keep the shape of the first micro-batch they saw.
        self.engine.reset_activation_shape()
        self.engine.eval_batch(
            iter(batch) if batch is not None else None,
            reduce_output=None,
            bcast_loss=False,
            num_micro_batches=micro_batches,
        )
        self.engine.reset_activation_shape()
        with torch.no_grad():
            return self._mean_losses(micro_batches)


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


class PlainSteps(_Steps):
    """DeepSpeed's plain engine: ZeRO 0, 2 and 3, one pipeline stage."""

    reads_data = True
    minimum_micro_batches = 1

    def __init__(
        self, stage: StageSettings, settings: EngineSettings, make_optimizer: OptimizerFactory, on_cpu: bool
    ) -> None:
        self.mesh = stage.mesh
        self.micro_batches = settings.micro_batches
        self.loss = TokenLoss(stage.model, stage.mesh)
        self.before_update = None
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
        return (tuple(map(move, inputs)) if isinstance(inputs, tuple) else move(inputs)), move(targets), move(factor)  # type: ignore[return-value]

    def train_step(self, batch: StepBatch | None) -> StepResult:
        """Forward and backward of each micro-batch; the update with the last."""
        assert batch is not None
        self.loss.reset()
        self.engine.train()
        for micro_batch in batch:
            self.engine.backward(self.engine(*self._inputs(micro_batch)))
            self.engine.step()
        losses = self._mean_losses()
        if self.clips_itself:
            return StepResult(losses, self.grad_norm, self.skipped)
        return StepResult(losses, self.engine.get_global_grad_norm(), not self.engine._step_applied)

    def _update(self, update: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        """Without ZeRO DeepSpeed hands the update to torch's optimizer: norm, clipping and skipping are ours."""
        if not self.clips_itself:
            return update(*arguments, **keywords)
        parameters = [parameter for parameter in self.parameters if parameter.grad is not None]
        counted = [p for p in parameters if not p.slice.replicated or self.mesh.tensor_rank == 0]  # type: ignore[attr-defined]
        norms = torch._foreach_norm([parameter.grad for parameter in counted])
        square = torch.stack(norms).square().sum() if norms else torch.zeros((), device=self.device)
        dist.all_reduce(square, group=self.mesh.model_group)
        self.grad_norm = float(square.sqrt())
        self.skipped = not math.isfinite(self.grad_norm)
        if self.skipped:
            self.grad_norm = math.inf
            return None
        if self.grad_clip > 0.0:
            coefficient = min(1.0, self.grad_clip / (self.grad_norm + 1e-6))
            torch._foreach_mul_([parameter.grad for parameter in parameters], coefficient)
        return update(*arguments, **keywords)

    def evaluate(self, batch: StepBatch | None, micro_batches: int) -> Tensor:
        """Mean losses [2] over the targets of the micro-batches of all data-parallel processes; no update."""
        assert batch is not None
        self.loss.reset()
        self.engine.eval()
        with torch.no_grad():
            for micro_batch in batch:
                self.engine(*self._inputs(micro_batch))
            return self._mean_losses(micro_batches)


TrainingEngine = PipelineSteps | PlainSteps


def build_engine(
    stage: StageSettings,
    settings: EngineSettings,
    schedule: Schedule,
    block_counts: Sequence[int],
    make_optimizer: OptimizerFactory,
) -> TrainingEngine:
    """Build the model's part of this process and the engine that trains it. Collective: every process calls it.

    `block_counts` has an entry a stage, under dualpipev an entry a chunk, two a stage, in model order.
    """
    on_cpu = stage.device.type == "cpu"
    if settings.zero_stage == 1:
        return PipelineSteps(stage, settings, schedule, block_counts, make_optimizer, on_cpu)
    return PlainSteps(stage, settings, make_optimizer, on_cpu)
