"""The whole model on one device: token ids in, logits out. It is what every layout is compared with."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.block import Block
from model.configuration import ModelConfiguration
from model.context import BlockContext, KeyValueCache
from model.dropout import DropoutKey, Site, dropout
from model.initialization import initialize
from model.norm import build_norm


class LanguageModel(nn.Module):
    """Embedding, blocks, final norm, head. The names of its parameters are their names in every layout.

    Under `torch.device("meta")` it is built without memory and without values; anywhere else with the initial values
    of seed 0.
    """

    def __init__(self, configuration: ModelConfiguration) -> None:
        super().__init__()
        self.configuration = configuration
        device = torch.get_default_device()
        with torch.device("meta"):  # the layers' own random values would only be thrown away
            self.embedding = nn.Embedding(configuration.vocabulary, configuration.hidden_size)
            self.blocks = nn.ModuleList(Block(configuration, index) for index in range(configuration.num_layers))
            self.final_norm = build_norm(configuration)
            if not configuration.tie_embeddings:
                self.head = nn.Linear(configuration.hidden_size, configuration.vocabulary, bias=False)
        if device.type != "meta":
            self.to_empty(device=device)
            initialize(self, configuration, seed=0)

    def forward(
        self,
        tokens: Tensor,
        document_ids: Tensor | None = None,
        dropout_key: DropoutKey | None = None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        """Logits of the token after each.

        Args:
            tokens: [b, s] int64.
            document_ids: [b, s]; tokens see those of the same number only, and positions count from 0 in each.
            dropout_key: needed in training mode where the configuration has dropout; unused in evaluation mode.
            cache: filled with the keys and values of these tokens, which follow on those in it.

        Returns:
            [b, s, vocab_size] in the parameters' dtype.
        """
        configuration = self.configuration
        context = BlockContext.build(
            configuration,
            tokens.shape[1],
            tokens.device,
            document_ids=document_ids,
            dropout=dropout_key,
            cache=cache,
        )
        x = self.embedding(tokens)
        if self.training:
            x = dropout(x, configuration.dropout, dropout_key, Site.EMBEDDING)
        for block in self.blocks:
            x = block(x, context)
        if cache is not None:
            cache.advance(tokens.shape[1])
        return F.linear(self.final_norm(x), self.head_weight)

    @property
    def head_weight(self) -> Tensor:
        """[vocab_size, hidden_size]: the head's own matrix, or the embedding's where they are tied."""
        return self.embedding.weight if self.configuration.tie_embeddings else self.head.weight
