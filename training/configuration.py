"""The configuration of a run: sections of keys, read from a YAML file and overrides, checked before anything is built.

`load` is the way in. It imports neither torch nor DeepSpeed, so that a mistake is reported in a fraction of a second.
Keys are described in `training.sections` and `model.configuration`; `docs/configuration.md` is made from them.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import yaml
from pydantic import Field, JsonValue, ValidationError, model_validator

from model.configuration import ModelConfiguration, Section
from parallel.schedules import Schedule
from training.configuration_checks import problems
from training.configuration_errors import as_sentences, known_keys, nearest_key
from training.configuration_file import (
    COMMAND_LINE,
    ConfigurationError,
    Dumper,
    apply_overrides,
    read_file,
    read_overrides,
)
from training.layout import Layout, check_world, with_vocabulary
from training.sections import (
    Batch,
    CheckpointSection,
    Data,
    Dtype,
    LearningRateSchedule,
    MonitorSection,
    Optimizer,
    Parallel,
    Precision,
    Recompute,
    Run,
    Source,
    SpikeAction,
    Training,
)

__all__ = [
    "Batch",
    "CheckpointSection",
    "ConfigurationError",
    "Data",
    "Dtype",
    "Layout",
    "LearningRateSchedule",
    "ModelConfiguration",
    "MonitorSection",
    "Optimizer",
    "Parallel",
    "Precision",
    "Recompute",
    "Run",
    "RunConfiguration",
    "Schedule",
    "Source",
    "SpikeAction",
    "Training",
    "check_world",
    "load",
    "to_yaml",
    "with_vocabulary",
]


class RunConfiguration(Section):
    """The whole configuration of one run."""

    run: Run
    """What the run is called and where it writes."""

    model: ModelConfiguration
    """Sizes and choices of the transformer."""

    parallel: Parallel = Field(default_factory=Parallel)
    """How the model and the batch are divided among the processes."""

    batch: Batch
    """How many tokens a step sees."""

    optimizer: Optimizer
    """AdamW and its learning rate."""

    precision: Precision = Field(default_factory=Precision)
    """Number formats."""

    data: Data
    """Prepared text and its tokenizer."""

    training: Training
    """The loop: how long, what is reported when, and when it gives up."""

    checkpoint: CheckpointSection = Field(default_factory=CheckpointSection)
    """When the state of the run is saved, and from what it starts."""

    monitor: MonitorSection = Field(default_factory=MonitorSection)
    """What can be seen of the run besides its console and metrics.jsonl."""

    deepspeed: dict[str, JsonValue] = Field(default_factory=dict)
    """Keys of DeepSpeed's own configuration, for what the other sections do not name."""

    @model_validator(mode="after")
    def _keys_fit_together(self) -> Self:
        for problem in problems(self):
            raise ValueError(problem)
        return self


def load(path: str | Path, overrides: Sequence[str] = ()) -> RunConfiguration:
    """Read a YAML file and `section.key=value` overrides, later ones on top.

    Raises ConfigurationError, one sentence that names the file (or the command line), the key, the value found and
    what is allowed.
    """
    path = Path(path)
    sections = read_file(path)
    given = read_overrides(overrides)
    for key in given:
        if key.partition(".")[0] not in RunConfiguration.model_fields:
            nearest = nearest_key(key, known_keys(RunConfiguration))
            raise ConfigurationError(f"{COMMAND_LINE}: unknown key {key}, the nearest known one is {nearest}")
    _forget_default_folder(sections, given)
    apply_overrides(sections, given)
    for name in RunConfiguration.model_fields:
        # A section that is absent or has nothing under it is one with defaults only.
        if sections.get(name) is None:
            sections[name] = {}
    if isinstance(sections["run"], dict):
        sections["run"].setdefault("name", path.stem)
    try:
        # JSON mode is strict where Python mode is not: text is no number and a number is no truth value, but a list
        # may become a tuple and a word a choice.
        return RunConfiguration.model_validate_json(json.dumps(sections), strict=True)
    except ValidationError as error:
        sentences = as_sentences(error, RunConfiguration)
    # Where a key of the sentence came from the command line, the file is not to blame.
    source = COMMAND_LINE if any(_mentions(sentences, key) for key in given) else path
    raise ConfigurationError(f"{source}: {sentences}")


def to_yaml(configuration: RunConfiguration) -> str:
    """The resolved configuration, every key written out; `load` reads it back as an equal one."""
    return yaml.dump(configuration.model_dump(mode="json"), Dumper=Dumper, sort_keys=False, allow_unicode=True)


def _mentions(sentences: str, key: str) -> bool:
    # A section's own findings name the first key in full and the others by their last part.
    section, _, last = key.rpartition(".")
    return re.search(rf"\b{re.escape(section)}\.", sentences + ".") is not None and (
        re.search(rf"\b{re.escape(last)}\b", sentences) is not None
    )


def _forget_default_folder(sections: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Drop runs/<old name> from a resolved configuration that is started under a new name.

    It was a default written out. Kept, it would make the new run write into the old one's folder.
    """
    run = sections.get("run")
    if isinstance(run, dict) and "run.name" in given and run.get("output_dir") == f"runs/{run.get('name')}":
        del run["output_dir"]
