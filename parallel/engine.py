"""The two engines behind one interface, and which of them a layout gets.

ZeRO 1 runs DeepSpeed's pipeline engine for every pipeline size, 1 included; ZeRO 0, 2 and 3 run its plain engine,
without a pipeline. Either takes the micro-batches of one step, does forward, backward and update, and returns the
mean loss over all targets of the global batch.
"""

from collections.abc import Sequence

from parallel.deepspeed_patches import import_muon_uncompiled
from parallel.engine_steps import Labels, OptimizerFactory, PipelineInput, StepBatch, StepResult
from parallel.pipeline_engine import PipelineSteps
from parallel.plain_engine import PlainSteps
from parallel.schedules import Schedule
from parallel.stages import StageSettings
from parallel.zero import EngineSettings

__all__ = ["Labels", "PipelineInput", "StepBatch", "StepResult", "TrainingEngine", "build_engine"]

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
    import_muon_uncompiled()
    on_cpu = stage.device.type == "cpu"
    if settings.zero_stage == 1:
        return PipelineSteps(stage, settings, schedule, block_counts, make_optimizer, on_cpu)
    return PlainSteps(stage, settings, make_optimizer, on_cpu)
