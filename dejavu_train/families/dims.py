"""The sizes of a model of any family, and the names of what a predictor chooses from. Loads no torch."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any, Literal, NamedTuple


class Target(StrEnum):
    """Units that a predictor chooses from: the neurons of an MLP, or the heads of an attention.

    Heads that share K and V are chosen together: the unit is such a group.
    """

    MLP = "mlp"
    HEADS = "heads"


TARGETS = tuple(Target)
HALVES: Mapping[str, tuple[Target, ...]] = {"*": (Target.HEADS,), "-": (Target.MLP,), ".": ()}
"""By a letter of a :attr:`ModelDims.pattern` the targets of such a layer."""


class LayerInput(StrEnum):
    """Input of half a layer: the normalised hidden states in front of its attention, or of its MLP."""

    ATTN = "attn_in"
    MLP = "mlp_in"


class Site(NamedTuple):
    """One input of one layer, which predictors read. Sites are ordered as a forward pass comes by them."""

    layer: int
    input: LayerInput

    @classmethod
    def at(cls, half: int) -> "Site":
        """The site of half a layer, counted from the first: 2 layer, and 1 more for the MLP."""
        return cls(half // 2, LayerInput.MLP if half % 2 else LayerInput.ATTN)

    @property
    def half(self) -> int:
        return 2 * self.layer + (self.input == LayerInput.MLP)


class UnitKey(NamedTuple):
    """The units of one target in one layer. Equals the plain pair of a number and a text."""

    layer: int
    target: Target

    @property
    def site(self) -> Site:
        """Site that the units themselves read."""
        return Site(self.layer, LayerInput.MLP if self.target == Target.MLP else LayerInput.ATTN)


class Norm(StrEnum):
    LAYER_NORM = "layer_norm"
    LAYER_NORM_1P = "layer_norm_1p"  # 1 is added to the weight
    RMS_NORM = "rms_norm"
    RMS_NORM_PLAIN = "rms_norm_plain"  # without a weight


class QkNorm(StrEnum):
    """Where a norm of every head's queries and keys stands."""

    NONE = "none"
    BEFORE = "before"  # their rotation
    BEHIND = "behind"


class Positions(StrEnum):
    LEARNED = "learned"
    ROTARY = "rotary"
    ALIBI = "alibi"
    NONE = "none"


class Activation(StrEnum):
    RELU = "relu"
    RELU2 = "relu2"
    FATRELU = "fatrelu"  # x where it lies above a threshold, else 0
    DRELU = "drelu"  # relu of the gate and of the other map as well
    GELU = "gelu"
    GELU_TANH = "gelu_tanh"


SILENT = (Activation.RELU, Activation.RELU2, Activation.FATRELU, Activation.DRELU)
"""Activations that give zero for many neurons. Of these a neuron is active that is not zero."""

SMOOTH = (Activation.GELU, Activation.GELU_TANH)
"""Activations without zeros. Of these the neurons are active that carry ``CARRIED`` of a token's contribution."""

CARRIED = 0.9
"""The share of a token's contribution that its needed neurons carry, the largest first."""


@dataclass(frozen=True)
class ModelDims:
    """The sizes of a decoder, and what its layers compute.

    Attributes:
        d_ffn: neurons of an MLP. vocab_size, max_positions: rows of the tables.
        head_dim: of queries, keys and values. 0 = d_model / n_heads. n_kv_heads: heads of K and V. 0 = n_heads.
        gated: an MLP multiplies its activation with a second map's output.
        biases: the linear maps have biases.
        rotary_share: of a head's dimensions, that rotary positions turn. threshold: of FATReLU.
        embedding_norm: a norm stands behind the embedding.
        qk_norm: whether queries and keys are normed. logit_cap: what logits are kept below by a tanh. 0: they are not.
        post_norm: norms stand behind what a half of a layer adds, not before it.
        embedding_dim: width of the embedding and of what the LM head reads. 0 = d_model.
        pattern: for each layer a letter of :data:`HALVES`. "": each has attention and then an MLP.
        other_weights: numbers in all layers' matrices that belong to no target.
        tied: the LM head is the embedding. It changes nothing that a predictor chooses, so it is neither compared nor
            stored.
    """

    d_model: int
    d_ffn: int
    n_layers: int
    n_heads: int
    vocab_size: int
    max_positions: int
    head_dim: int = 0
    n_kv_heads: int = 0
    norm: Norm = Norm.LAYER_NORM
    positions: Positions = Positions.LEARNED
    activation: Activation = Activation.RELU
    gated: bool = False
    biases: bool = True
    rotary_share: float = 1.0
    threshold: float = 0.0
    embedding_norm: bool = False
    qk_norm: QkNorm = QkNorm.NONE
    logit_cap: float = 0.0
    post_norm: bool = False
    embedding_dim: int = 0
    pattern: str = ""
    other_weights: int = 0
    tied: bool = field(default=True, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "head_dim", self.head_dim or self.d_model // self.n_heads)
        object.__setattr__(self, "embedding_dim", self.embedding_dim or self.d_model)
        object.__setattr__(self, "n_kv_heads", self.n_kv_heads or self.n_heads)
        for name, kind in (("norm", Norm), ("positions", Positions), ("activation", Activation), ("qk_norm", QkNorm)):
            object.__setattr__(self, name, kind(getattr(self, name)))

    @classmethod
    def from_stored(cls, values: Mapping[str, Any]) -> "ModelDims":
        """Read what :meth:`stored` gave. Raises TypeError or ValueError for other values."""
        for each in fields(cls):
            value = values[each.name] if each.name in SIZES else values.get(each.name, each.default)
            kinds: Any = {int: int, bool: bool, float: (int, float)}.get(each.type, str)  # type: ignore[arg-type]
            number = kinds is not str and (isinstance(value, bool) != (kinds is bool) or not 0 <= value < math.inf)
            if not isinstance(value, kinds) or number or (each.name in SIZES and value == 0):
                raise ValueError(f"{each.name} of the shape is {value!r}")
        return cls(**values)

    def stored(self) -> dict[str, Any]:
        """The values for a file: the six sizes, and what is not as in an OPT of these sizes."""
        plain = ModelDims(**{name: getattr(self, name) for name in SIZES})
        names = [each.name for each in fields(self) if each.compare]
        return {n: getattr(self, n) for n in names if n in SIZES or getattr(self, n) != getattr(plain, n)}

    def has_layers_of(self, other: "ModelDims") -> bool:
        """Whether layers are of the same number and kind. Vocabulary and positions may differ."""
        free = ("vocab_size", "max_positions")
        names = [each.name for each in fields(self) if each.compare and each.name not in free]
        return all(getattr(self, name) == getattr(other, name) for name in names)

    def targets_of(self, layer: int) -> tuple[Target, ...]:
        """Targets that a layer has, in the order of a forward pass."""
        return HALVES[self.pattern[layer]] if self.pattern else (Target.HEADS, Target.MLP)

    def layers_of(self, *targets: Target) -> Sequence[int]:
        """Numbers of the layers that have one of these targets. Without an argument: any."""
        wanted = set(targets or TARGETS)
        every = range(self.n_layers)
        return [layer for layer in every if wanted & set(self.targets_of(layer))] if self.pattern else every

    @property
    def keys(self) -> list[UnitKey]:
        """Every target of every layer."""
        return [UnitKey(layer, target) for layer in range(self.n_layers) for target in self.targets_of(layer)]

    @property
    def sites(self) -> set[Site]:
        """Every input of a half of a layer."""
        return {key.site for key in self.keys}

    @property
    def kv_group(self) -> int:
        """How many heads share one of K and V."""
        return self.n_heads // self.n_kv_heads

    def units(self, target: Target) -> int:
        """How many units a predictor of ``target`` chooses from."""
        return self.d_ffn if target == Target.MLP else self.n_kv_heads

    @property
    def half_dtype(self) -> Literal["float16", "bfloat16"]:
        """The dtype of 16 bits in which the dense model runs. Squares of neurons overflow float16 from 256 on."""
        return "bfloat16" if self.activation == Activation.RELU2 else "float16"

    @property
    def group_dim(self) -> int:
        """How wide the outputs of the heads are that share one of K and V."""
        return self.kv_group * self.head_dim

    def rows_of(self, target: Target) -> int:
        """How many rows of ``d_model`` weights one unit of ``target`` has: of a neuron its gate, up and down rows.

        A group of heads has those of its queries and outputs, and of its K and V.
        """
        if target == Target.MLP:
            return 3 if self.gated else 2
        return 2 * (self.group_dim + self.head_dim)

    @property
    def weights(self) -> int:
        """Numbers in all layers' matrices and around the layers."""
        own = sum(self.target_weights(key.target) for key in self.keys)
        return own + self.other_weights + self.outer_weights

    @property
    def outer_weights(self) -> int:
        """Numbers around the layers: the embeddings, and an LM head of its own."""
        return self.embedding_weights + (0 if self.tied else self.vocab_size * self.embedding_dim)

    @property
    def embedding_weights(self) -> int:
        """Numbers in the embedding, in that of learned positions, and in the maps between two widths."""
        positions = self.max_positions if self.positions is Positions.LEARNED else 0
        maps = 0 if self.embedding_dim == self.d_model else 2 * self.embedding_dim
        return self.vocab_size * self.embedding_dim + (positions + maps) * self.d_model

    @property
    def mean_layer_weights(self) -> float:
        """Weights of all matrices of a layer, mean over the layers."""
        return (self.weights - self.outer_weights) / self.n_layers

    @property
    def layer_weights(self) -> int:
        """Weights of all matrices of a layer that has every target."""
        return sum(map(self.target_weights, TARGETS))

    def target_weights(self, target: Target) -> int:
        """Weights of a target's matrices in one layer."""
        return self.d_model * self.units(target) * self.rows_of(target)


def listed(layers: Sequence[int]) -> str:
    """Rising layer numbers in words, as ``--layers`` takes them.

    >>> listed([1, 4, 5, 6, 9])
    '1,4-6,9'
    """
    parts: list[list[int]] = []
    for layer in layers:
        if parts and layer == parts[-1][-1] + 1:
            parts[-1].append(layer)
        else:
            parts.append([layer])
    return ",".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)


Runs = Mapping[str, Collection[Any] | None]
"""Models that an engine runs beside an OPT: values of fields of :class:`ModelDims` by name. None = all values."""


def engine_refusal(dims: ModelDims, runs: Runs) -> str | None:
    """Lack of an engine: "no kernels for ...". None: it runs such a model."""

    def lacks(name: str, value: Any) -> bool:
        allowed = runs.get(name, ())
        return allowed is not None and value not in allowed

    free = (*SIZES, "head_dim", "biases", "other_weights")
    others = {name: value for name, value in dims.stored().items() if name not in free and lacks(name, value)}
    words = {
        "gated": "a gated MLP",
        "rotary_share": "a partial rotation",
        "embedding_norm": "a norm behind the embedding",
        "embedding_dim": f"an embedding of {dims.embedding_dim} columns",
        "qk_norm": "norms of queries and keys",
        "logit_cap": "capped logits",
        "post_norm": "norms behind the halves of a layer",
        "n_kv_heads": f"{dims.n_kv_heads} K/V heads of {dims.n_heads} heads",
        "pattern": "layers without attention or an MLP (mask and gather run, and vLLM with the plug-in dejavu-vllm)",
    }
    listed = ", ".join(words.get(name, f"{name} {value}") for name, value in others.items())
    return f"no kernels for {listed}" if others else None


SIZES = ("d_model", "d_ffn", "n_layers", "n_heads", "vocab_size", "max_positions")
