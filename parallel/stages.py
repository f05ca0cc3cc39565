"""The model as a list of pipeline layers: embedding, blocks, final norm, head.

Each layer is built only on the stage that holds it: on the meta device from `model/`, divided by the plan,
then given memory and initial values for its own slices. Between layers travels the residual stream [b, s, hidden]
(a slice of the sequence under sequence parallelism), and beside it, where dropout or the document mask
needs it, an int64 tensor with the samples' numbers, the step and the document ids.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import Tensor, nn

from model.block import Block
from model.configuration import ModelConfiguration
from model.context import BlockContext
from model.dropout import DropoutKey, Site, dropout
from model.norm import build_norm
from parallel.layers import VocabularyParallelEmbedding
from parallel.mesh import Mesh
from parallel.plan import apply_plan, local_box, materialize, padded_vocabulary
from parallel.recompute import apply_recompute
from parallel.schedules import Recompute

Carried = Tensor | tuple[Tensor, Tensor]
"""What passes between layers: hidden states, or (hidden states, side tensor)."""


@dataclass(frozen=True)
class StageSettings:
    """What every layer of a stage needs to know to build itself and to run."""

    model: ModelConfiguration
    mesh: Mesh
    device: torch.device
    dtype: torch.dtype
    """Type of the weights and activations: float32, bfloat16 or float16."""
    seed: int = 0
    sequence_parallel: bool = False
    recompute: Recompute = Recompute.NONE
    document_mask: bool = False
    compile: bool = False

    @property
    def has_side(self) -> bool:
        """Whether a side tensor travels with the hidden states."""
        return self.document_mask or self.model.dropout > 0.0


def split_side(side: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Take a side tensor [b, 2 + s or 2] apart: sample numbers [b], step (scalar), document ids [b, s] or None."""
    return side[:, 0], side[0, 1], side[:, 2:] if side.shape[1] > 2 else None


def make_side(sample_numbers: Tensor, step: int, document_ids: Tensor | None) -> Tensor:
    """Join sample numbers [b], step and document ids [b, s] into one int64 tensor; inverse of `split_side`."""
    columns = [sample_numbers.unsqueeze(1), torch.full_like(sample_numbers, step).unsqueeze(1)]
    return torch.cat(columns + ([document_ids] if document_ids is not None else []), dim=1)


class ContextBuilder:
    """Makes what all blocks of a stage share for one micro-batch; keeps the last one, which the next block asks for."""

    def __init__(self, settings: StageSettings) -> None:
        self.settings = settings
        self._last: tuple[tuple[object, ...], BlockContext] | None = None

    def __call__(self, hidden: Tensor, side: Tensor | None, training: bool) -> BlockContext:
        """Context of the micro-batch with these hidden states [b, s or s / tensor, hidden]."""
        settings = self.settings
        shards = settings.mesh.tensor if settings.sequence_parallel else 1
        length = hidden.shape[1] * shards
        # The side tensor itself is in the key (and so kept alive): its identity is the micro-batch's.
        key = (length, training, side)
        if self._last is not None and self._last[0][:2] == key[:2] and self._last[0][2] is side:
            return self._last[1]
        documents, dropout_key = None, None
        if side is not None:
            samples, step, documents = split_side(side)
            if training and settings.model.dropout > 0.0:
                offset = settings.mesh.tensor_rank * hidden.shape[1] if shards > 1 else 0
                dropout_key = DropoutKey(settings.seed, step, samples, position_offset=offset)
        context = BlockContext.build(settings.model, length, hidden.device, document_ids=documents, dropout=dropout_key)
        self._last = (key, context)
        return context


class EmbeddingLayer(VocabularyParallelEmbedding):
    """Token ids [b, s] to hidden states; the first pipeline layer, and the head's matrix of a tied model."""

    def __init__(self, settings: StageSettings, name: str) -> None:
        model, mesh = settings.model, settings.mesh
        vocabulary = model.vocabulary
        (start, stop), _ = local_box(name, (vocabulary, model.hidden_size), mesh.tensor, mesh.tensor_rank)
        rows = padded_vocabulary(vocabulary, mesh.tensor) // mesh.tensor
        super().__init__(
            rows, model.hidden_size, mesh.tensor_rank * rows, stop - start, mesh, settings.sequence_parallel
        )
        self.settings = settings

    def forward(self, inputs: Carried) -> Carried:
        """Look the tokens up; drop elements in training where the model says so."""
        tokens, side = inputs if isinstance(inputs, tuple) else (inputs, None)
        hidden = self.embed(tokens)
        if side is None:
            return hidden
        if self.training and self.settings.model.dropout > 0.0:
            samples, step, _ = split_side(side)
            offset = self.settings.mesh.tensor_rank * hidden.shape[1] if self.settings.sequence_parallel else 0
            key = DropoutKey(self.settings.seed, step, samples, position_offset=offset)
            hidden = dropout(hidden, self.settings.model.dropout, key, Site.EMBEDDING)
        return hidden, side


class HeadLayer(EmbeddingLayer):
    """Normed hidden states to the scores of this process's token ids; the last pipeline layer of an untied model."""

    def forward(self, inputs: Carried) -> Tensor:
        """Scores [b, s, local vocabulary]."""
        return self.logits(inputs[0] if isinstance(inputs, tuple) else inputs)


def tied_head(embedding: nn.Module, inputs: Carried) -> Tensor:
    """The embedding's other use, as the head of a tied model."""
    assert isinstance(embedding, EmbeddingLayer)
    return embedding.logits(inputs[0] if isinstance(inputs, tuple) else inputs)


class BlockLayer(nn.Module):
    """One block of the model as a pipeline layer."""

    def __init__(self, block: Block, contexts: ContextBuilder, recompute: Recompute) -> None:
        super().__init__()
        self.block = block
        self.contexts = contexts
        self.recompute = recompute
        self._run = apply_recompute(block, recompute)

    def forward(self, inputs: Carried) -> Carried:
        """Add the block's two branches to the hidden states; hand the side tensor on."""
        hidden, side = inputs if isinstance(inputs, tuple) else (inputs, None)
        context = self.contexts(hidden, side, self.training)
        # Without gradients nothing is kept, so there is nothing to compute again.
        hidden = (self._run if torch.is_grad_enabled() else self.block)(hidden, context)
        return hidden if side is None else (hidden, side)


class FinalNormLayer(nn.Module):
    """The norm before the head as a pipeline layer."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, inputs: Carried) -> Carried:
        """Norm the hidden states; hand the side tensor on."""
        if isinstance(inputs, tuple):
            return self.norm(inputs[0]), inputs[1]
        return self.norm(inputs)


class _Lazy(LayerSpec):
    """A layer that is built when its stage asks for it. DeepSpeed takes classes only, hence the override of `build`."""

    def __init__(self, layer: type[nn.Module], build: Callable[[], nn.Module]) -> None:
        super().__init__(layer)
        self._build_layer = build

    def build(self, log: bool = False) -> nn.Module:
        return self._build_layer()


class _LazyTied(TiedLayerSpec):
    """The same for a layer whose weight is used twice."""

    def __init__(
        self,
        key: str,
        layer: type[nn.Module],
        build: Callable[[], nn.Module],
        forward_fn: Callable[[nn.Module, Carried], Tensor] | None = None,
    ) -> None:
        super().__init__(key, layer, forward_fn=forward_fn)
        self._build_layer = build

    def build(self, log: bool = False) -> nn.Module:
        return self._build_layer()


def layer_list(settings: StageSettings) -> list[LayerSpec]:
    """The whole model as layers that build themselves: embedding, every block, final norm, head.

    Layer 0 is the embedding, layer i + 1 block i, layer L + 1 the final norm, layer L + 2 the head.
    """
    model = settings.model
    contexts = ContextBuilder(settings)

    def real(module: nn.Module, global_name: Callable[[str], str]) -> nn.Module:
        return materialize(
            module,
            global_name,
            model,
            settings.mesh,
            seed=settings.seed,
            device=settings.device,
            dtype=settings.dtype,
            sequence_parallel=settings.sequence_parallel,
        )

    def embedding() -> nn.Module:
        with torch.device("meta"):
            layer = EmbeddingLayer(settings, "embedding.weight")
        return real(layer, lambda _: "embedding.weight")

    def head() -> nn.Module:
        with torch.device("meta"):
            layer = HeadLayer(settings, "head.weight")
        return real(layer, lambda _: "head.weight")

    def final_norm() -> nn.Module:
        with torch.device("meta"):
            layer = FinalNormLayer(build_norm(model))
        return real(layer, lambda _: "final_norm.gain")

    def block(index: int) -> nn.Module:
        with torch.device("meta"):
            plain = Block(model, index)
        divided = apply_plan(plain, settings.mesh, settings.sequence_parallel)
        real(divided, lambda name: f"blocks.{index}.{name}")
        if settings.compile:
            divided.compile(dynamic=False)
        return BlockLayer(divided, contexts, settings.recompute)

    layers: list[LayerSpec] = []
    if model.tie_embeddings:
        layers.append(_LazyTied("embedding", EmbeddingLayer, embedding))
    else:
        layers.append(_Lazy(EmbeddingLayer, embedding))
    layers += [_Lazy(BlockLayer, lambda index=index: block(index)) for index in range(model.num_layers)]  # type: ignore[misc]
    layers.append(_Lazy(FinalNormLayer, final_norm))
    if model.tie_embeddings:
        layers.append(_LazyTied("embedding", EmbeddingLayer, embedding, forward_fn=tied_head))
    else:
        layers.append(_Lazy(HeadLayer, head))
    return layers
