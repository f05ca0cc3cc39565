"""The model that speed is measured on, as a bare PyTorch loop and through the engine."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F

from model.configuration import ModelConfiguration
from model.language_model import LanguageModel
from parallel.environment import Environment

MODEL = ModelConfiguration(
    hidden_size=384, num_layers=8, num_heads=12, activation="swiglu", ffn_hidden_size=1024, vocab_size=4096
)
SEQUENCE_LENGTH = 256
MICRO_BATCH_SIZE = 2
MICRO_BATCHES = 8
LEARNING_RATE = 1e-3
GRAD_CLIP = 1.0


def token_batches(seed: int) -> list[torch.Tensor]:
    """Random token ids [micro-batch, s + 1], one tensor a micro-batch."""
    generator = torch.Generator().manual_seed(seed)
    shape = (MICRO_BATCHES, MICRO_BATCH_SIZE, SEQUENCE_LENGTH + 1)
    return list(torch.randint(0, MODEL.vocabulary, shape, generator=generator))


def bare_loop(environment: Environment) -> Callable[[], None]:
    """What a person would write in plain PyTorch: forward, loss, backward, clip, fused AdamW."""
    model = LanguageModel(MODEL)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    batches = token_batches(seed=0)

    def step() -> None:
        for batch in batches:
            logits = model(batch[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
            (loss / MICRO_BATCHES).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), GRAD_CLIP)
        optimizer.step()
        optimizer.zero_grad()

    return step


def through_the_engine(environment: Environment, pipeline: int, tensor: int = 1, **stage: Any) -> Callable[[], None]:
    """The same step as the trainer makes it, on `pipeline` stages x `tensor` slices."""
    from parallel.device import initialize_distributed
    from parallel.engine import build_engine
    from parallel.mesh import build_mesh
    from parallel.partition import partition_blocks
    from parallel.schedules import Schedule
    from parallel.stages import StageSettings
    from parallel.zero import EngineSettings
    from training.optimizer import make_adamw
    from training.sections import Optimizer

    device = initialize_distributed(environment)
    mesh = build_mesh(pipeline, tensor, data=1)
    section = Optimizer(learning_rate=LEARNING_RATE, betas=(0.9, 0.999), weight_decay=0.01)
    engine = build_engine(
        StageSettings(model=MODEL, mesh=mesh, device=device, dtype=torch.float32, **stage),
        EngineSettings(MICRO_BATCH_SIZE, MICRO_BATCHES, data=1, grad_clip=GRAD_CLIP),
        Schedule.ONE_F_ONE_B,
        partition_blocks(MODEL.num_layers, pipeline, *_costs()),
        lambda parameters: make_adamw(section, parameters),
    )
    factor = torch.tensor(1.0 / (MICRO_BATCH_SIZE * SEQUENCE_LENGTH))
    batch: Iterable[Any] = [(ids[:, :-1], (ids[:, 1:], factor)) for ids in token_batches(seed=0)]

    def step() -> None:
        engine.train_step(batch if engine.reads_data else None)

    return step


def _costs() -> tuple[float, float, float]:
    from model.costs import layer_costs

    costs = layer_costs(MODEL, SEQUENCE_LENGTH)
    return costs.block.flops, costs.embedding.flops, costs.head.flops
