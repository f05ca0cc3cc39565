"""A case of the parity tests: one layout of one model, trained for 20 steps by the product's own loop."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from data.batches import MicroBatch, TrainingData
from data.tokenizer import load_tokenizer
from tests.parity.oracle import Setting
from tests.parity.tables import TableData
from training.configuration import RunConfiguration, check_world, load

CONFIGURATION = "configs/parity.yaml"
SEQUENCE_LENGTH = 32


def blocks(pipeline: int, schedule: str = "1f1b") -> str:
    """As an override: no more blocks than give every stage one, every chunk of dualpipev, and two in any case."""
    return f"model.num_layers={max(2, pipeline * (2 if schedule == 'dualpipev' else 1))}"


def small(*layout: int, overrides: tuple[str, ...] = (), **keywords: Any) -> "Case":
    """A case with no more blocks than it needs: time is for more cases."""
    case = Case(*layout, overrides=overrides, **keywords)
    if any(override.startswith("model.num_layers=") for override in overrides):
        return case
    return replace(case, overrides=(blocks(case.pipeline, case.schedule), *overrides))


@dataclass(frozen=True)
class Case:
    """What a layout, a schedule and an engine are asked to do. Hashable: equal cases are run once."""

    pipeline: int = 1
    tensor: int = 1
    data: int = 1
    schedule: str = "1f1b"
    recompute: str = "none"
    tied: bool = False
    activation: str = "gelu"
    sequence_parallel: bool = False
    micro_batches: int = 2
    zero: int = 1
    dtype: str = "fp32"
    overrides: tuple[str, ...] = ()
    """Further `section.key=value`."""
    table: tuple[int, bool, bool] | None = None
    """(vocabulary, ragged, documents) of a `TableData` in the place of the corpus."""

    @property
    def world(self) -> int:
        """Number of processes."""
        return self.pipeline * self.tensor * self.data

    @property
    def batch(self) -> int:
        """Samples of a step: 16, or more where so many micro-batches need them."""
        return max(16, self.micro_batches * self.data)

    @property
    def name(self) -> str:
        """For people."""
        parts = [f"pipeline {self.pipeline} tensor {self.tensor} data {self.data}", self.schedule]
        parts += [f"{self.micro_batches} micro-batches", f"zero {self.zero}"]
        parts += [] if self.recompute == "none" else [f"recompute {self.recompute}"]
        parts += ["sequence parallel"] if self.sequence_parallel else []
        parts += ["tied"] if self.tied else []
        parts += [self.activation] if self.activation != "gelu" else []
        parts += [self.dtype] if self.dtype != "fp32" else []
        parts += [override.replace("model.num_layers=", "blocks ") for override in self.overrides]
        if self.table:
            parts.append(f"vocabulary {self.table[0]}" + (", ragged" if self.table[1] else ""))
        return ", ".join(parts)

    def all_overrides(self) -> list[str]:
        """The case as overrides of configs/parity.yaml."""
        result = [
            f"batch.sequence_length={SEQUENCE_LENGTH}",
            f"batch.global_batch_size={self.batch}",
            f"batch.micro_batch_size={self.batch // (self.micro_batches * self.data)}",
            f"parallel.pipeline={self.pipeline}",
            f"parallel.tensor={self.tensor}",
            f"parallel.data={self.data}",
            f"parallel.schedule={self.schedule}",
            f"parallel.recompute={self.recompute}",
            f"parallel.sequence_parallel={str(self.sequence_parallel).lower()}",
            f"parallel.zero_stage={self.zero}",
            f"model.tie_embeddings={str(self.tied).lower()}",
            f"model.activation={self.activation}",
            f"precision.dtype={self.dtype}",
            "data.validation=null",
            "training.eval_batches=null",
        ]
        if self.table:
            result += ["data.tokenizer=null", f"model.vocab_size={self.table[0]}"]
        else:
            result += ["model.vocab_size=512"]
        values = dict(override.split("=", 1) for override in [*result, *self.overrides])
        return [f"{key}={value}" for key, value in values.items()]

    def configuration(self) -> RunConfiguration:
        """Checked as the product checks it; raises `ConfigurationError` where it is refused."""
        configuration = load(CONFIGURATION, self.all_overrides())
        check_world(configuration, self.world)
        return configuration

    def arguments(self, folder: Path) -> dict[str, Any]:
        """For `tests.parity.probes:train`."""
        return {"overrides": [*self.all_overrides(), f"run.output_dir={folder}"], "table": self.table}

    def setting(self) -> Setting:
        """The same for the oracle: what is left when the layout is forgotten."""
        configuration = self.configuration()
        optimizer = configuration.optimizer
        assert optimizer.schedule == "constant", "the oracle knows no other course of the learning rate"
        return Setting(
            model=configuration.model,
            samples=_samples(self.table, configuration.batch.sequence_length, configuration.data.document_mask),
            batch=configuration.batch.global_batch_size,
            steps=configuration.training.steps,
            seed=configuration.run.seed,
            learning_rate=optimizer.learning_rate,
            warmup_steps=optimizer.warmup_steps,
            betas=tuple(optimizer.betas),  # type: ignore[arg-type]
            eps=optimizer.eps,
            weight_decay=optimizer.weight_decay,
            clip=optimizer.grad_clip,
        )


@cache
def _samples(
    table: tuple[int, bool, bool] | None, length: int, document_mask: bool
) -> Callable[[list[int]], MicroBatch]:
    if table is not None:
        return TableData(table[0], length, ragged=table[1], documents=table[2]).micro_batch  # type: ignore[return-value]
    configuration = load(CONFIGURATION)
    end = load_tokenizer(str(configuration.data.tokenizer)).end_of_document
    sources = configuration.data.train[0].path
    return TrainingData(sources, length, seed=0, end_of_document=end, document_mask=document_mask).micro_batch


@dataclass(frozen=True)
class CaseKey:
    """What the oracle's result depends on."""

    text: str = field(default="")

    @staticmethod
    def of(case: Case, dtype: str) -> "CaseKey":
        """Equal for two cases that differ in layout alone."""
        layout = ("pipeline", "tensor", "data", "schedule", "recompute", "sequence_parallel", "micro_batches", "zero")
        rest = {key: value for key, value in asdict(case).items() if key not in (*layout, "dtype")}
        rest["overrides"] = [o for o in case.overrides if not o.startswith(("parallel.", "deepspeed."))]
        return CaseKey(f"{rest} {case.batch} {dtype}")
