"""Tensor parallelism piece by piece, on 2 and 4 processes: collectives, loss, layers, each against its definition."""

import pytest
import torch
import torch.nn.functional as F

from tests.parallel.probes import all_logits
from tests.parity.pool import CaseFailed, Pool

PROBES = "tests.parallel.probes:"
SIZES = [2, 4]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ["sum_backward", "sum_forward", "gather_sequence", "scatter_sequence"])
def test_a_collective_and_its_gradient(pool: Pool, name: str, size: int) -> None:
    ranks = pool.run(size, PROBES + "collective", {"name": name})
    tensors, results, weights, gradients = (
        [torch.tensor(rank[key]) for rank in ranks] for key in ("tensor", "result", "weight", "grad")
    )
    summed, weight = sum(tensors), sum(weights)
    length = tensors[0].shape[1]
    for rank in range(size):
        mine = slice(rank * length, (rank + 1) * length)
        part = slice(rank * length // size, (rank + 1) * length // size)
        expected = {
            "sum_backward": (tensors[rank], weight),
            "sum_forward": (summed, weights[rank]),
            "gather_sequence": (torch.cat(tensors, 1), weight[:, mine] if name == "gather_sequence" else None),
            "scatter_sequence": (summed[:, part], torch.cat(weights, 1)),
        }[name]
        torch.testing.assert_close(results[rank], expected[0])
        torch.testing.assert_close(gradients[rank], expected[1])


TARGETS = [
    [[0, 5, 7, 2, -100, 3]],
    [[3, -100, -100, 5]],
    [[-100, -100, -100]],
    [[1, 2, 3], [-100, -100, -100]],
]


@pytest.mark.parametrize("with_z", [False, True])
@pytest.mark.parametrize("scale", [1.0, 1000.0])
@pytest.mark.parametrize("targets", TARGETS, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_b5_b6_the_loss_over_a_divided_vocabulary(
    pool: Pool, size: int, targets: list[list[int]], scale: float, with_z: bool
) -> None:
    arguments = {"vocabulary": 8, "scale": scale, "targets": targets, "with_z": with_z}
    ranks = pool.run(size, PROBES + "divided_loss", arguments)
    logits = all_logits(8, scale, targets).double().requires_grad_()
    ids = torch.tensor(targets)
    nll = F.cross_entropy(logits.flatten(0, 1), ids.flatten(), reduction="sum", ignore_index=-100)
    z = logits.logsumexp(-1)[ids != -100].square().sum()
    (nll + 0.01 * z if with_z else nll).backward()
    found = torch.cat([torch.tensor(rank["grad"]).view(*ids.shape, -1) for rank in ranks], -1)
    torch.testing.assert_close(found.double(), logits.grad, rtol=1e-5, atol=1e-5 * max(1.0, scale if with_z else 1.0))
    for rank in ranks:
        assert rank["nll"] == pytest.approx(nll.item(), rel=1e-5) and rank["nll"] == ranks[0]["nll"]
        assert rank["z"] == (pytest.approx(z.item(), rel=1e-5) if with_z else None)


MODELS = {
    "gelu": {},
    "grouped-query, swiglu, tied": {"num_kv_heads": 4, "activation": "swiglu", "tie_embeddings": True},
    "qk-norm, layernorm": {"qk_norm": True, "norm": "layernorm"},
    "a vocabulary that leaves processes without rows": {"vocab_size": 130},
}


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("size", SIZES)
def test_divided_layers_are_the_plain_model(pool: Pool, size: int, name: str, sequence_parallel: bool) -> None:
    base = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "vocab_size": 300, "init_std": 0.1}
    arguments = {"model": {**base, **MODELS[name]}, "sequence_parallel": sequence_parallel}
    for rank in pool.run(size, PROBES + "divided_model", arguments):
        assert {what: apart for what, apart in rank.items() if apart > 5e-6} == {}


def test_blocks_of_a_micro_batch_share_what_is_made_of_its_samples(pool: Pool) -> None:
    assert all(pool.run(2, PROBES + "contexts_are_shared", {}))


def test_a_case_that_fails_or_hangs_is_reported_and_leaves_nothing_behind(pool: Pool) -> None:
    with pytest.raises(CaseFailed, match="KeyError: 'no such'"):
        pool.run(2, PROBES + "collective", {"name": "no such"})
    with pytest.raises(CaseFailed, match="rank 0, 1 of 2 did not answer in 1 s"):
        pool.run(2, "tests.parallel.probes:sleep", {"seconds": 60}, timeout=1.0)
    assert 2 not in pool.worlds
    assert pool.run(2, "tests.parallel.probes:sleep", {"seconds": 0}) == [None, None]
