"""The sections of a configuration besides `model`: every key, its type, unit and default.

What one key may be is checked here; what keys mean together is checked in `training.configuration_checks`.
"""

import re
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from model.configuration import Section
from parallel.schedules import Recompute, Schedule

Count = Annotated[int, Field(gt=0, lt=2**31)]
"""A whole number of at least 1."""

Fraction = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0, le=1e9)]
Text = Annotated[str, Field(min_length=1)]

NAME = r"^[A-Za-z0-9._-]+$"


class Run(Section):
    """What the run is called and where it writes."""

    name: str = Field(pattern=NAME)
    """Name of the run: letters, digits, dots, underscores and hyphens (default: the configuration's file name)."""

    output_dir: Path = Field(default_factory=lambda known: Path("runs") / known["name"])
    """Folder that the run writes to (default: runs/<name>)."""

    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed of the initial weights, the order of samples and dropout."""

    @field_validator("name")
    @classmethod
    def _no_folder_above(cls, name: str) -> str:
        if set(name) == {"."}:
            raise ValueError("expected a name, not a folder that is there already")
        return name


class Parallel(Section):
    """How the model and the batch are divided among the processes, one a device."""

    pipeline: Count = 1
    """Pipeline stages that the blocks are cut into."""

    tensor: Count = 1
    """Processes that share each weight matrix."""

    data: Count | None = None
    """Copies of the model, each with its share of the batch (default: number of processes / (pipeline x tensor))."""

    sequence_parallel: bool = False
    """Whether activations between the tensor-parallel matrices are divided along the sequence; needs tensor above 1."""

    elastic: bool = False
    """Whether pipeline, tensor and data are chosen anew for the number of processes that the job was given, as near as
    can be to the values here; global_batch_size stays."""

    schedule: Schedule = Schedule.ONE_F_ONE_B
    """1f1b, dualpipev (two chunks of blocks a stage) or zero_bubble, which is not built yet."""

    partition: Literal["balanced"] | tuple[Count, ...] = "balanced"
    """balanced (by the cost of each layer), or a list of block counts in model order: one a stage, under dualpipev two
    a stage."""

    zero_stage: int = Field(default=1, ge=0, le=3)
    """What data parallelism divides: 0 nothing, 1 optimizer state, 2 gradients too, 3 weights too. Only 1 with a
    pipeline."""

    offload_optimizer: bool = False
    """Whether optimizer state lies in host memory; needs zero_stage 2 or 3."""

    recompute: Recompute = Recompute.NONE
    """none, sublayer (attention and feed-forward each keep their input only) or block (each block does)."""

    @field_validator("partition", mode="before")
    @classmethod
    def _balanced_or_counts(cls, value: Any) -> Any:
        if value == "balanced":
            return value
        if isinstance(value, list | tuple) and value and all(type(count) is int and count > 0 for count in value):
            return tuple(value)
        raise ValueError("expected balanced or a list of block counts, each at least 1")


class RampUp(Section):
    """A batch that starts small and grows in equal steps."""

    start: Count
    """Sequences of a step at first."""

    increment: Count
    """Sequences by which a step grows."""

    samples: Count
    """Sequences after which global_batch_size is reached."""


class Batch(Section):
    """How many tokens a step sees."""

    sequence_length: Count
    """Tokens of one sequence."""

    global_batch_size: Count
    """Sequences of one optimizer step, over all processes."""

    micro_batch_size: Count = 1
    """Sequences that a process holds at once; the rest of its share is accumulated."""

    ramp_up: RampUp | None = None
    """Growth of the batch at the start: start, increment and samples (default: none)."""


class LearningRateSchedule(StrEnum):
    """The course of the learning rate after warm-up."""

    CONSTANT = "constant"
    COSINE = "cosine"
    LINEAR = "linear"
    WSD = "wsd"


class Optimizer(Section):
    """AdamW and its learning rate; weight decay applies to matrices only."""

    learning_rate: NotNegative
    """Peak learning rate."""

    schedule: LearningRateSchedule = LearningRateSchedule.COSINE
    """constant, cosine, linear or wsd (warm-up, stable, linear decay at the end)."""

    warmup_steps: int = Field(default=0, ge=0)
    """Steps over which the learning rate rises in a straight line to its peak."""

    decay_steps: Count | None = None
    """Step, counted from 0, on which the decay ends; it stays there afterwards (default: training.steps)."""

    wsd_decay_steps: Count | None = None
    """Steps of the decay at the end of wsd (default: a fifth of decay_steps)."""

    min_ratio: Fraction = 0.1
    """Learning rate at the end of the decay, as a part of the peak."""

    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.95)
    """Decay of the two moments a step."""

    eps: Positive = 1e-8
    """Added to the root of the second moment."""

    weight_decay: NotNegative = 0.1
    """Decoupled weight decay a step, times the learning rate; matrices only."""

    grad_clip: NotNegative = 1.0
    """Largest norm of the whole gradient; a longer one is scaled down to it (0: never)."""


class Dtype(StrEnum):
    """The number format of weights and activations in forward and backward."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"


class Precision(Section):
    """Number formats; master weights, moments and the accumulated gradient are fp32 in each."""

    dtype: Dtype = Dtype.FP32
    """fp32, bf16 or fp16 (with loss scaling)."""

    compile: bool = False
    """Whether each block goes through torch.compile, which needs a C++ compiler."""


class Source(Section):
    """One set of prepared training text."""

    path: Text
    """Prefix of its .bin and .idx files."""

    weight: Positive = 1.0
    """Its share of the samples, relative to the other weights."""


class Data(Section):
    """Prepared text. Relative paths start at the current folder."""

    train: tuple[Source, ...]
    """Prefix of the training tokens (PREFIX.bin, PREFIX.idx), or a list of {path, weight}."""

    validation: Text | dict[str, str] | None = None
    """Prefix of the held-out tokens, or names to prefixes (default: no evaluation)."""

    tokenizer: Text | None = None
    """The tokenizer's file (default: none; then model.vocab_size must be given)."""

    document_mask: bool = False
    """Whether attention stays within a document."""

    @field_validator("train", mode="before")
    @classmethod
    def _prefix_is_a_list_of_one(cls, value: Any) -> Any:
        if isinstance(value, str):
            return (Source(path=value),) if value else value
        if isinstance(value, list | tuple) and value:
            # A bare prefix in the list has weight 1, as it has alone.
            return tuple({"path": source} if isinstance(source, str) else source for source in value)
        raise ValueError("expected a prefix or a list of {path, weight}")

    @field_validator("validation", mode="before")
    @classmethod
    def _prefix_or_named_prefixes(cls, value: Any) -> Any:
        if value is None or (isinstance(value, str) and value):
            return value
        if isinstance(value, dict) and value:
            pairs = list(value.items())
            if all(re.fullmatch(NAME, name) and isinstance(prefix, str) and prefix for name, prefix in pairs):
                return value
        raise ValueError("expected a prefix or names to prefixes, each name of letters, digits, '.', '_' and '-'")

    @property
    def validation_sets(self) -> dict[str, str]:
        """Name to prefix; a set given by its prefix alone has the empty name."""
        if self.validation is None:
            return {}
        return {"": self.validation} if isinstance(self.validation, str) else dict(self.validation)


class SpikeAction(StrEnum):
    """What happens when the loss jumps far above its recent values."""

    WARN = "warn"
    SKIP = "skip"
    REWIND = "rewind"


class Training(Section):
    """The loop: how long, what is reported when, and when it gives up."""

    steps: Count
    """Optimizer steps of the whole run; a skipped step counts."""

    stop_after: Count | None = None
    """Step after which this start saves and stops, as if asked to; the run itself stays as long (default: none)."""

    log_every: Count = 10
    """Steps between two lines of metrics."""

    eval_every: Count | None = None
    """Steps between two evaluations, and one follows the last step; needs data.validation (default: that one only)."""

    eval_batches: Count | None = None
    """Global batches of one evaluation; needs data.validation (default: the whole set)."""

    max_minutes: Positive | None = None
    """Minutes from the start of the processes after which the run saves and stops (default: no limit)."""

    grace_seconds: Seconds = 60.0
    """Seconds from a request to stop to the end of the running step or evaluation; after them the process leaves
    without saving."""

    hang_seconds: Seconds | None = 1200.0
    """Seconds without a finished step (or micro-batch of an evaluation) after which all processes write their stacks
    and fail; ten minutes more until the first step of a start (null: no limit)."""

    skipped_in_a_row: Count = 10
    """Steps skipped one after another, for a loss or gradient that is not finite, after which the run fails."""

    on_spike: SpikeAction | None = None
    """What to do when the loss jumps: warn, skip (the step) or rewind (to the last checkpoint, then pass over those
    samples) (default: nothing)."""

    spike_window: int = Field(default=128, ge=2, lt=2**31)
    """Recent steps that a loss is compared with."""

    spike_threshold: Positive = 6.0
    """Standard deviations above the mean of those steps that make a spike."""

    def is_due(self, every: int | None, step: int) -> bool:
        """Whether what is done every so many steps (None: never), and after the last one, is done after this step."""
        return step == self.steps or (every is not None and step % every == 0)


class CheckpointSection(Section):
    """When the state of the run is saved, and from what it starts."""

    every: Count | None = 500
    """Steps between two checkpoints; the last step is always saved (null: only the last step)."""

    keep: Count | None = None
    """Newest checkpoints of this run that are kept; older ones are deleted (default: all)."""

    resume: Text = "auto"
    """auto (the newest sound checkpoint of this run), never, or the path of a checkpoint or run to start from where
    this run has none."""

    asynchronous: bool = True
    """Whether files are written while training goes on, from a copy in host memory (12 bytes a parameter over all
    processes)."""


class MonitorSection(Section):
    """What can be seen of the run besides its console and metrics.jsonl."""

    tensorboard: bool = True
    """Whether TensorBoard files are written."""

    profile: tuple[Count, ...] = ()
    """Steps that are recorded by the profiler."""

    timeline: tuple[Count, ...] = ()
    """Steps whose pipeline is drawn as a timeline."""

    dump_gradients: tuple[Count, ...] = ()
    """Steps whose whole gradients, before clipping, are written as safetensors by global name."""
