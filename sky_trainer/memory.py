"""What a run takes of each GPU's memory, computed from the model's shape before anything is loaded.

An estimate, good to within a factor: what a step holds (weights, gradients, optimizer, reference, kept activations) is
counted, what libraries keep for themselves is a flat share. The longest row that the run may make decides, since one
such row is enough to end it. Bytes throughout.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

GIB = 1 << 30
TILE_TOKENS, TILE_VOCABULARY = 4096, 32768
"""Rows and columns of the output layer that TRL computes at a time."""
TILES_GPU, TILES_CPU = 2, 8
"""Copies of such a tile at one moment: fused in a kernel, and in plain torch (measured)."""
CONTEXT_BYTES = GIB
FRAGMENTS = 1.06
"""What a CUDA context takes, and what the allocator cannot use, as a factor."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What memory depends on of a model. Counts of parameters and of elements; `trainable` with adapters is theirs."""

    parameters: int
    trainable: int
    embedding: int
    tied: bool
    layers: int
    hidden: int
    attention: int
    key_value: int
    inner: int
    vocabulary: int

    @property
    def layer(self) -> int:
        """Parameters of one layer."""
        return (self.parameters - self.outside) // self.layers

    @property
    def outside(self) -> int:
        """Parameters of input embedding and output layer."""
        return self.embedding * (1 if self.tied else 2)

    @property
    def cache(self) -> int:
        """Elements that one token takes in a key-value cache."""
        return 2 * self.layers * self.key_value

    @property
    def kept(self) -> int:
        """Elements that one token leaves behind in one layer for its backward pass."""
        return 8 * self.hidden + 8 * self.attention + 6 * self.key_value + 4 * self.inner


def shape_of(model: Any) -> Shape:
    """The shape of a module, which may be on the meta device and may have adapters."""
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    inner = config.intermediate_size
    if experts := getattr(config, "num_experts_per_tok", None):
        inner = experts * config.moe_intermediate_size
    return Shape(
        parameters=sum(p.numel() for p in model.parameters()),
        trainable=sum(p.numel() for p in model.parameters() if p.requires_grad),
        embedding=config.vocab_size * config.hidden_size,
        tied=bool(config.tie_word_embeddings),
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        attention=heads * size,
        key_value=(config.num_key_value_heads or heads) * size,
        inner=inner,
        vocabulary=config.vocab_size,
    )


@dataclass(frozen=True, slots=True)
class Load:
    """How a model is trained. `width`: bytes of a stored weight; `mixed`: computed in 16 bits beside it.

    `shards`: GPUs that share weights, gradients and optimizer; 1 when each holds all. `reference`: a second copy for
    a KL penalty. `moments`: bytes of optimizer state a trainable parameter. `rows` of `length` tokens go through at
    once, `tiles` of the output layer at a time; `cached` rows are generated at a time by an engine in this process,
    which holds `copies` more of the weights.
    """

    width: int
    mixed: bool
    shards: int
    reference: bool
    moments: int
    checkpointing: bool
    rows: int
    length: int
    tiles: int = TILES_GPU
    cached: int = 0
    copies: int = 0


@dataclass(frozen=True, slots=True)
class Estimate:
    """Bytes on one GPU. Generation and the backward pass do not happen at the same time."""

    weights: float
    gradients: float
    optimizer: float
    reference: float
    working: float
    activations: float
    output: float
    generation: float

    @property
    def total(self) -> float:
        """The most that stands at one moment, without what the libraries keep for themselves."""
        held = self.weights + self.optimizer + self.reference
        return held + max(self.gradients + self.working + self.activations + self.output, self.generation)

    @property
    def on_gpu(self) -> float:
        """With a CUDA context and the allocator's fragments."""
        return CONTEXT_BYTES + FRAGMENTS * self.total

    def describe(self) -> str:
        """The parts in GiB, the largest first."""
        parts = [(getattr(self, item.name), item.name) for item in fields(self)]
        return ", ".join(f"{name} {size / GIB:.1f}" for size, name in sorted(parts, reverse=True) if size >= GIB / 20)


def estimate(shape: Shape, load: Load) -> Estimate:
    """What training takes of each GPU."""
    compute = 2 if load.mixed else load.width
    tokens = load.rows * load.length
    kept_of_layer = tokens * shape.kept * compute
    if load.checkpointing:
        activations = tokens * shape.hidden * shape.layers * load.width + kept_of_layer
    else:
        activations = kept_of_layer * shape.layers
    if load.shards > 1:
        working = 2 * 2 * shape.layer * compute + shape.outside * compute
    else:
        working = shape.parameters * 2 if load.mixed and load.width > 2 else 0
    head_gradient = shape.embedding * 4 if shape.trainable == shape.parameters else 0
    output = load.tiles * 4 * min(tokens, TILE_TOKENS) * min(shape.vocabulary, TILE_VOCABULARY) + head_gradient
    return Estimate(
        weights=shape.parameters * load.width / load.shards,
        gradients=shape.trainable * load.width / load.shards,
        optimizer=shape.trainable * load.moments / load.shards,
        reference=shape.parameters * load.width / load.shards if load.reference else 0,
        working=working,
        activations=activations,
        output=output,
        generation=load.cached * load.length * shape.cache * load.width + load.copies * shape.parameters * load.width,
    )


@dataclass(frozen=True, slots=True)
class Serving:
    """An inference server in 16 bits. `gpus`: the fewest, as a power of two, that hold weights and one longest row.

    `rows`: how many longest rows fit at a time with that many; fewer than are asked for wait or are preempted.
    """

    weights: int
    gpus: int
    rows: int


def serving(shape: Shape, length: int, gpu_bytes: float, gpus: int, share: float) -> Serving:
    """What a server of at least `gpus` GPUs holds in `share` of each; rows is 0 when 64 GPUs do not hold one."""
    weights, row = shape.parameters * 2, length * shape.cache * 2
    while True:
        free = gpus * gpu_bytes * share - weights - gpus * CONTEXT_BYTES
        if free >= row or gpus >= 64:
            return Serving(weights, gpus, max(0, int(free // row)))
        gpus *= 2
