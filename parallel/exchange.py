"""Small messages between processes as JSON: nothing is pickled, and so nothing is unpickled."""

import json
from typing import Any

import torch
import torch.distributed as dist


def _device() -> torch.device:
    from deepspeed.accelerator import get_accelerator

    return torch.device(get_accelerator().current_device_name())


def gather_json(value: Any) -> list[Any]:
    """Return the values of all ranks, in their order, on every rank. Collective; values are what JSON can hold."""
    text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(_device())
    size = torch.tensor([text.numel()], device=text.device)
    sizes = [torch.zeros_like(size) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, size)
    longest = int(max(sizes).item())
    padded = torch.zeros(longest, dtype=torch.uint8, device=text.device)
    padded[: text.numel()] = text
    texts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(texts, padded)
    return [json.loads(bytes(text[: int(size)].cpu().numpy())) for text, size in zip(texts, sizes, strict=True)]


def barrier() -> None:
    """Wait until every process is here."""
    dist.barrier()


def maximum(values: list[float]) -> list[float]:
    """Return the largest of all ranks' values at each place, on every rank. Collective."""
    largest = torch.tensor(values, dtype=torch.float64, device=_device())
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return [float(value) for value in largest.tolist()]
