"""The feed-forward network: up, a non-linearity (or a gate), down."""

import torch.nn.functional as F
from torch import Tensor, nn

from model.configuration import Activation, ModelConfiguration


class FeedForward(nn.Module):
    """down(f(up(x))) or, gated, down(f(gate(x)) * up(x)); each token by itself.

    The hidden width is nowhere but in the matrices, so that a process that holds some of the hidden units (rows of up
    and gate, columns of down) runs this same code; the results of all processes then sum up to the whole.
    """

    def __init__(self, configuration: ModelConfiguration) -> None:
        super().__init__()
        hidden, inner = configuration.hidden_size, configuration.ffn_hidden_size
        self.activation = configuration.activation
        self.up = nn.Linear(hidden, inner, bias=False)
        self.gate = nn.Linear(hidden, inner, bias=False) if self.activation.gated else None
        self.down = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[b, s, hidden_size] -> the same shape: the sum over the hidden units held here."""
        if self.gate is not None:
            return self.down(self._activate(self.gate(x)) * self.up(x))
        return self.down(self._activate(self.up(x)))

    def _activate(self, x: Tensor) -> Tensor:
        match self.activation:
            case Activation.GELU | Activation.GEGLU:
                return F.gelu(x)
            case Activation.SWIGLU:
                return F.silu(x)
            case Activation.RELU2:
                return F.relu(x).square()
