"""Token tables: samples that are a function of their number, for what the text of the corpus does not have.

They stand in the place of `data.batches.TrainingData`, for the trainer and for the oracle alike.
"""

from dataclasses import dataclass

import numpy as np
import torch

from data.batches import NO_TARGET, MicroBatch


@dataclass(frozen=True)
class TableData:
    """Random tokens below `vocabulary`; where `ragged`, a different share of each sample's tokens is a target."""

    vocabulary: int
    sequence_length: int
    ragged: bool = False
    documents: bool = False

    @property
    def every_token_is_a_target(self) -> bool:
        """As `TrainingData` says it."""
        return not self.ragged

    def micro_batch(self, sample_numbers: np.ndarray) -> MicroBatch:
        """The samples of these numbers."""
        rows = [self._sample(int(number)) for number in sample_numbers]
        tokens, targets, documents = (torch.stack(part) for part in zip(*rows, strict=True))
        numbers = torch.as_tensor(np.asarray(sample_numbers, dtype=np.int64))
        return MicroBatch(tokens, targets, numbers, documents if self.documents else None)

    def _sample(self, number: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(1_000_003 * number + self.vocabulary)
        length = self.sequence_length
        # Each token is often the successor of the one before it, so that there is something to learn.
        jumps = torch.randint(0, self.vocabulary, (length + 1,), generator=generator)
        steps = torch.where(torch.rand(length + 1, generator=generator) < 0.3, jumps, 1)
        tokens = steps.cumsum(0) % self.vocabulary
        targets = tokens[1:].clone()
        if self.ragged:
            # Every fourth sample has no target at all, the others between a few and all.
            kept = 0 if number % 4 == 3 else int(torch.randint(1, length + 1, (), generator=generator))
            targets[kept:] = NO_TARGET
        documents = (torch.rand(length, generator=generator) < 0.1).cumsum(0)
        return tokens[:-1], targets, documents
