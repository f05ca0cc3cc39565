"""Tensor-parallel twins of the model's linear layers: each process holds a slice of the matrix.

Column and row slices need no communication of their own: `f` stands before the column-parallel matrices of a
branch and `g` after its row-parallel one (see `parallel.collectives`), set by `parallel.plan` on the block.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallel.collectives import gather_sequence, scatter_sequence, sum_backward, sum_forward
from parallel.mesh import Mesh


class ColumnParallelLinear(nn.Linear):
    """Rows of the stored matrix [out / tensor, in]: this process computes its share of the outputs."""


class RowParallelLinear(nn.Linear):
    """Columns of the stored matrix [out, in / tensor]: the result is a partial sum, which the block's `g` completes."""


class VocabularyParallelEmbedding(nn.Module):
    """Rows [rows, hidden] of the embedding matrix, of a vocabulary padded to a multiple of the tensor size.

    The same rows serve as the head of a tied model, so both directions live here. `first_row` is the first token id
    of this process; rows from `true_rows` on are padding: zero, never looked up, excluded from the softmax.
    """

    def __init__(
        self, rows: int, hidden_size: int, first_row: int, true_rows: int, mesh: Mesh, sequence_parallel: bool
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, hidden_size))
        self.first_row = first_row
        self.true_rows = true_rows
        self.mesh = mesh
        self.sequence_parallel = sequence_parallel

    def embed(self, tokens: Tensor) -> Tensor:
        """Look up tokens [b, s]: [b, s, hidden], or this process's slice [b, s / tensor, hidden] of the sequence."""
        if self.mesh.tensor == 1:
            return F.embedding(tokens, self.weight)
        local = tokens - self.first_row
        elsewhere = (local < 0) | (local >= self.true_rows)
        found = F.embedding(local.masked_fill(elsewhere, 0), self.weight).masked_fill(elsewhere.unsqueeze(-1), 0.0)
        if self.sequence_parallel:
            return scatter_sequence(found, self.mesh.tensor_group)
        return sum_forward(found, self.mesh.tensor_group)

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of this process's rows for normed hidden states: [b, s, rows]; minus infinity for padding rows."""
        if self.mesh.tensor > 1:
            enter = gather_sequence if self.sequence_parallel else sum_backward
            hidden = enter(hidden, self.mesh.tensor_group)
        scores = F.linear(hidden, self.weight)
        if self.true_rows < self.weight.shape[0]:
            # In place: the matrix product's backward does not read its result.
            scores[..., self.true_rows :] = float("-inf")
        return scores
