"""How many parameters a configuration has, and how many floating-point operations its training takes.

The rules, so that a figure can be compared with others':

- A product of matrices [m, k] x [k, n] counts 2 m n k. Nothing else counts: no norm, softmax or embedding look-up.
- Causal attention counts as the half of the square that is computed: scores and mixing together take
  4 s^2 x (num_heads x head_dim) in a block and a sequence of s tokens, and 2 s^2 x (num_heads x head_dim) count.
  Bounds between documents take nothing off that.
- Backward takes twice the forward pass. What is computed again to save memory is not useful work and never counts.
- The vocabulary is the true one: its padding for tensor parallelism is neither a parameter nor work.
"""

from dataclasses import dataclass

from model.configuration import ModelConfiguration

PASSES = 3
"""A training step in forward passes: forward, gradients of the activations, gradients of the weights."""


@dataclass(frozen=True)
class Cost:
    """What a part of the model costs."""

    parameters: int
    flops: int
    """Of the forward pass over one sequence."""


@dataclass(frozen=True)
class LayerCosts:
    """What each kind of layer costs, which is what a cut into pipeline stages wants to know."""

    embedding: Cost
    block: Cost
    """One of the num_layers blocks, which are all alike."""
    head: Cost
    """Final norm and head. Tied, its parameters are the norm's alone: the matrix is the embedding's."""


def layer_costs(configuration: ModelConfiguration, sequence_length: int) -> LayerCosts:
    """Cost of each kind of layer for sequences of this many tokens."""
    hidden, query, kv = configuration.hidden_size, configuration.query_size, configuration.kv_size
    attention = hidden * (query + 2 * kv) + query * hidden
    feed_forward = (3 if configuration.activation.gated else 2) * hidden * configuration.ffn_hidden_size
    gains = 2 * hidden + (2 * configuration.head_dim if configuration.qk_norm else 0)
    vocabulary = configuration.vocabulary * hidden
    scores_and_mixing = 2 * sequence_length**2 * query
    return LayerCosts(
        embedding=Cost(vocabulary, 0),
        block=Cost(
            parameters=attention + feed_forward + gains,
            flops=2 * sequence_length * (attention + feed_forward) + scores_and_mixing,
        ),
        head=Cost(
            parameters=hidden + (0 if configuration.tie_embeddings else vocabulary),
            flops=2 * sequence_length * vocabulary,
        ),
    )


def parameter_count(configuration: ModelConfiguration) -> int:
    """Parameters of the whole model, each counted once."""
    costs = layer_costs(configuration, sequence_length=1)
    return costs.embedding.parameters + configuration.num_layers * costs.block.parameters + costs.head.parameters


def flops_per_sequence(configuration: ModelConfiguration, sequence_length: int) -> int:
    """Floating-point operations of the forward pass over one sequence."""
    costs = layer_costs(configuration, sequence_length)
    return costs.embedding.flops + configuration.num_layers * costs.block.flops + costs.head.flops


def training_flops_per_token(configuration: ModelConfiguration, sequence_length: int) -> float:
    """Floating-point operations of training, for each token of sequences of this length: what MFU is taken from."""
    return PASSES * flops_per_sequence(configuration, sequence_length) / sequence_length
