"""DeepSpeed's pipeline engine: ZeRO 1, any pipeline size, either schedule."""

from collections.abc import Callable, Sequence

import torch
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.pipe.dualpipev import DualPipeVEngine, DualPipeVModule
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.module import PipelineModule
from torch import Tensor

from parallel.deepspeed_patches import grid_reused
from parallel.engine_steps import EngineSteps, OptimizerFactory, StepBatch, StepResult
from parallel.partition import stage_bounds
from parallel.phase import announce_instructions
from parallel.schedules import Schedule
from parallel.stages import StageSettings, layer_list
from parallel.zero import EngineSettings, deepspeed_configuration


def layer_bounds(block_counts: Sequence[int]) -> list[int]:
    """First pipeline layer of each stage, and the number of layers.

    The embedding goes to the first stage, final norm and head to the last.
    """
    bounds = [start + 1 for start, _ in stage_bounds(block_counts)] + [sum(block_counts) + 3]
    bounds[0] = 0
    return bounds


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


class PipelineSteps(EngineSteps):
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
        super().__init__(stage, settings)
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
        self.engine._aggregate_total_loss = self._losses_of_the_step
        announce_instructions(self.engine, lambda: self.phase)
        self._take_over_update()

    @property
    def reads_data(self) -> bool:
        """Whether this process needs micro-batches: the first stage their tokens, the loss's stage their targets."""
        return self.mesh.is_first_stage or self.holds_loss

    def train_step(self, batch: StepBatch | None) -> StepResult:
        """Forward, backward and update over the step's micro-batches (None on stages that read nothing)."""
        self.loss.reset()
        self.phase.begin_batch()
        losses = self.engine.train_batch(iter(batch) if batch is not None else None)
        optimizer = self.engine.optimizer
        return StepResult(losses, optimizer._global_grad_norm, bool(optimizer.overflow))

    def evaluate(self, batch: StepBatch | None, micro_batches: int) -> Tensor:
        """Mean losses [2] over `micro_batches` micro-batches of each data-parallel process; no update."""
        self.loss.reset()
        self.phase.begin_batch(evaluating=True)
        # Buffers between stages keep the shape of the first micro-batch they saw.
        self.engine.reset_activation_shape()
        # DualPipeV finds the buffers of its way back by the number of micro-batches of a training step.
        trained, self.engine.micro_batches = self.engine.micro_batches, micro_batches
        try:
            self.engine.eval_batch(
                iter(batch) if batch is not None else None,
                reduce_output=None,
                bcast_loss=False,
                num_micro_batches=micro_batches,
            )
        finally:
            self.engine.micro_batches = trained
        self.engine.reset_activation_shape()
        with torch.no_grad():
            return self._mean_losses(micro_batches)


class EvaluationSteps(PipelineSteps):
    """The same engine without an optimizer: weights and nothing else, for a model that is only to be evaluated."""

    def __init__(self, stage: StageSettings, block_counts: Sequence[int], micro_batch_size: int) -> None:
        # The layers have the type of the weights already, so DeepSpeed need not know of it.
        settings = EngineSettings(micro_batch_size, micro_batches=1, data=stage.mesh.data, zero_stage=0)
        EngineSteps.__init__(self, stage, settings)
        self.minimum_micro_batches = 1
        module = _StageModule(stage, block_counts, self.loss)
        config = deepspeed_configuration(settings, on_cpu=stage.device.type == "cpu")
        self.engine = PipelineEngine(
            args=None,
            model=module,
            mpu=module.mpu(),
            config=config,
            config_class=DeepSpeedConfig(config, module.mpu()),
            dist_init_required=False,
        )
        self.loss_stage = self.mesh.pipeline - 1
        self.holds_loss = self.mesh.is_last_stage
