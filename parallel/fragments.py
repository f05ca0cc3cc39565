"""What each process owns of weights, moments and gradients, whatever the engine and the ZeRO stage.

A fragment is a flat range of this process's slice of one parameter. All fragments of all processes together cover
every parameter once (replicated ones have one owner). Checkpoints are written from and read into fragments.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor, nn

from parallel.mesh import Mesh
from parallel.plan import ParameterSlice

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Fragment:
    """A flat range of a parameter's slice, with its fp32 weight and Adam moments as views."""

    slice: ParameterSlice
    offset: int
    """First element, in the flattened slice of this process (whose last rows may be padding)."""
    weight: Tensor
    """[n] float32."""
    exp_avg: Tensor
    """[n] float32."""
    exp_avg_sq: Tensor
    """[n] float32."""
    saved_here: bool
    """Whether this process is the one that writes this fragment to a checkpoint."""


def _is_partitioned(optimizer: object) -> bool:
    return isinstance(optimizer, DeepSpeedZeroOptimizer | BF16_Optimizer)


def flat_parameters(engine: DeepSpeedEngine) -> list[Tensor]:
    """The tensors that torch's optimizer updates: flat partitions under ZeRO, parameters otherwise."""
    if isinstance(engine.optimizer, DeepSpeedZeroOptimizer_Stage3):
        # It shows them to torch's optimizer one at a time; the groups are empty between steps.
        return list(engine.optimizer.fp32_partitioned_groups_flat)
    return [tensor for group in engine.optimizer.param_groups for tensor in group["params"]]


def _torch_optimizer(engine: DeepSpeedEngine) -> torch.optim.Optimizer:
    optimizer = engine.optimizer
    return optimizer.optimizer if hasattr(optimizer, "optimizer") else optimizer


def prepare_optimizer_state(engine: DeepSpeedEngine) -> None:
    """Give every flat parameter the state that AdamW makes at its first step, so that it can be read before."""
    optimizer = _torch_optimizer(engine)
    for tensor in flat_parameters(engine):
        state = optimizer.state[tensor]
        if "exp_avg" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=tensor.device)
            state["exp_avg"] = torch.zeros_like(tensor, requires_grad=False)
            state["exp_avg_sq"] = torch.zeros_like(tensor, requires_grad=False)
    if _is_partitioned(engine.optimizer):
        # DeepSpeed links them once, after the first group's first step, when the second group has no state yet.
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()


def adam_step(engine: DeepSpeedEngine) -> int:
    """Updates that AdamW has made (skipped steps are none); 0 before the first."""
    optimizer = _torch_optimizer(engine)
    states = [optimizer.state[tensor] for tensor in flat_parameters(engine) if tensor in optimizer.state]
    return int(states[0]["step"].item()) if states and "step" in states[0] else 0


def set_adam_step(engine: DeepSpeedEngine, step: int) -> None:
    """Set the number of updates that AdamW corrects its moments for."""
    prepare_optimizer_state(engine)
    optimizer = _torch_optimizer(engine)
    for tensor in flat_parameters(engine):
        optimizer.state[tensor]["step"].fill_(step)


def _saved_here(parameter: nn.Parameter, mesh: Mesh) -> bool:
    """One owner each: of replicated parameters the first tensor rank, of a tied matrix the first stage."""
    first_of_tensor = not parameter.slice.replicated or mesh.tensor_rank == 0  # type: ignore[attr-defined]
    return first_of_tensor and not getattr(parameter, "ds_pipe_replicated", False)


def owned_fragments(engine: DeepSpeedEngine, mesh: Mesh) -> Iterator[Fragment]:
    """Yield this process's fragments, in the order of the module's parameters."""
    for parameter in engine.module.parameters():
        part = parameter.slice
        saved = _saved_here(parameter, mesh)
        if _is_partitioned(engine.optimizer):
            mapping = parameter._hp_mapping
            if mapping is None:
                continue
            offset = mapping.lp_fragment_address.start
            exp_avg, exp_avg_sq = (mapping.get_optim_state_fragment(moment) for moment in MOMENTS)
            yield Fragment(part, offset, mapping.get_hp_fragment(), exp_avg, exp_avg_sq, saved)
        elif hasattr(parameter, "ds_id"):
            yield from _stage3_fragments(parameter, part, saved)
        else:
            state = _torch_optimizer(engine).state[parameter]
            yield Fragment(
                part,
                0,
                parameter.data.view(-1),
                state["exp_avg"].view(-1),
                state["exp_avg_sq"].view(-1),
                saved and mesh.data_rank == 0,
            )


def _stage3_fragments(parameter: Any, part: ParameterSlice, saved: bool) -> Iterator[Fragment]:
    """ZeRO 3: each data-parallel process holds an equal range of the flattened parameter, the last one padded."""
    from deepspeed.utils import safe_get_local_fp32_param, safe_get_local_optimizer_state

    partition = parameter.ds_tensor.ds_numel
    rank = parameter.ds_process_group.rank()
    offset = partition * rank
    length = max(0, min(partition, parameter.ds_numel - offset))
    if length:
        weight = safe_get_local_fp32_param(parameter)
        moments = [safe_get_local_optimizer_state(parameter, moment) for moment in MOMENTS]
        yield Fragment(part, offset, weight[:length], moments[0][:length], moments[1][:length], saved)


def owned_gradients(engine: DeepSpeedEngine) -> Iterator[tuple[nn.Parameter, int, Tensor]]:
    """Yield (parameter, offset, flat gradient) for what this process owns, after reduction and before clipping.

    Tensors are views where the engine keeps them as such. To be called when an update is about to be made.
    """
    optimizer = engine.optimizer
    for parameter in engine.module.parameters():
        if _is_partitioned(optimizer):
            mapping = parameter._hp_mapping
            if mapping is None:
                continue
            address = mapping.lp_fragment_address
            gradient = mapping.get_lp_grad_fragment(parameter._index_in_param_group).view(-1)
            if gradient.numel() == parameter.numel() != address.numel:
                gradient = gradient.narrow(0, address.start, address.numel)
            yield parameter, address.start, gradient
        elif hasattr(parameter, "ds_id"):
            from deepspeed.utils import safe_get_local_grad

            partition = parameter.ds_tensor.ds_numel
            offset = partition * parameter.ds_process_group.rank()
            length = max(0, min(partition, parameter.ds_numel - offset))
            if length:
                yield parameter, offset, safe_get_local_grad(parameter).view(-1)[:length]
        elif parameter.grad is not None:
            yield parameter, 0, parameter.grad.view(-1)


def share_weights(engine: DeepSpeedEngine) -> None:
    """Copy the fp32 weights into the weights that the model computes with, on all data-parallel processes."""
    optimizer = engine.optimizer
    if _is_partitioned(optimizer):
        optimizer.update_lp_params()
    elif isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        for low, wide in zip(
            optimizer.fp16_partitioned_groups_flat, optimizer.fp32_partitioned_groups_flat, strict=True
        ):
            low.data.copy_(wide.data)
        if optimizer.persistent_parameters:  # small ones, which every process keeps whole
            optimizer.persistent_parameters[0].all_gather(optimizer.persistent_parameters)
