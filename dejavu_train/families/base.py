"""The parts of a decoder layer, whatever a family calls them, and the table of families."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from dejavu_train.families.dims import SILENT, SMOOTH, LayerInput, ModelDims, Target
from dejavu_train.ground.errors import UserError

if TYPE_CHECKING:  # torch is not loaded to check the keys of a run
    from torch import Tensor


@dataclass(frozen=True)
class BlockParts:
    """The modules of one decoder layer. Of a half that it does not have the parts are None.

    Attributes:
        name: of the layer in the model, such as ``model.layers.3``.
        whole: the layer itself. attention: the module that holds q, k, v and out.
        q, k, v, out, up, down: linear maps, or adapters around them, with ``weight`` (out, in) and ``bias`` or None.
        activate: of the output of ``gate``, or of ``up`` where there is none, element by element.
        kinds: the classes that ``whole`` and ``attention`` have where nobody exchanged them.
        n_heads, head_dim: of the queries. scaling: what queries are multiplied with.
        gate: a linear map as ``up``, whose activated output ``up``'s is multiplied with, or None.
        activates_up: where there is a gate, the output of ``up`` is activated too.
        norm_q, norm_k: of every head's queries and keys (B, h, T, e), or None. norms_first: before they are turned.
        post_norm: norms stand behind what a half adds to the residual stream, not before it.
        beside: a module. What it gives for ``mlp_in`` is added with what the neurons add, or None.
        slopes: (h,) fp32, of ALiBi: what a score gains a position that the key stands later. None without.
        rotate: queries or keys (B, h, T, e) at positions (B, T) -> the same, turned. None where they stay.
    """

    name: str
    whole: Any
    kinds: tuple[type, type]
    attention: Any = None
    norm_attn: Any = None
    q: Any = None
    k: Any = None
    v: Any = None
    out: Any = None
    norm_mlp: Any = None
    up: Any = None
    down: Any = None
    activate: Any = None
    n_heads: int = 0
    head_dim: int = 0
    scaling: float = 1.0
    gate: Any | None = None
    activates_up: bool = False
    norm_q: Any | None = None
    norm_k: Any | None = None
    norms_first: bool = False
    post_norm: bool = False
    beside: Any | None = None
    slopes: "Tensor | None" = None
    rotate: "Callable[[Tensor, Tensor], Tensor] | None" = None

    def __post_init__(self) -> None:
        from dejavu_train.families.squared import widened

        object.__setattr__(self, "activate", widened(self.activate))

    @property
    def targets(self) -> tuple[Target, ...]:
        """Targets that the layer has, in the order of a forward pass."""
        halves = {Target.HEADS: self.out, Target.MLP: self.down}
        return tuple(target for target, map_out in halves.items() if map_out is not None)

    @property
    def device(self) -> Any:
        """Where the layer's weights lie."""
        return next(tensor.device for tensor in chain(self.whole.parameters(), self.whole.buffers()))

    @property
    def inputs(self) -> tuple[LayerInput, ...]:
        """Inputs of its halves, in the same order."""
        named = {Target.HEADS: LayerInput.ATTN, Target.MLP: LayerInput.MLP}
        return tuple(named[target] for target in self.targets)

    @property
    def n_groups(self) -> int:
        """Heads of K and V, each with the queries' heads that share it: what a predictor of heads chooses from."""
        return int(self.k.out_features) // self.head_dim

    def project(self, attn_in: "Tensor", positions: "Tensor | None") -> "tuple[Tensor, Tensor, Tensor]":
        """Queries (B, h, T, e), keys and values (B, g, T, e), of attn_in (B, T, d) at positions (B, T)."""
        q, k, v = (part(attn_in).unflatten(-1, (-1, self.head_dim)) for part in (self.q, self.k, self.v))
        q, k, v = q.transpose(-2, -3), k.transpose(-2, -3), v.transpose(-2, -3)
        return self.queries(q, positions), self.keys(k, positions), v

    def queries(self, q: "Tensor", positions: "Tensor | None") -> "Tensor":
        """Queries (B, h, T, e) as attention compares them, but for their scaling."""
        return self._compared(q, positions, self.norm_q)

    def keys(self, k: "Tensor", positions: "Tensor | None") -> "Tensor":
        """Keys (B, g, T, e) as attention compares them."""
        return self._compared(k, positions, self.norm_k)

    def _compared(self, x: "Tensor", positions: "Tensor | None", norm: Any) -> "Tensor":
        if norm is not None and self.norms_first:
            x = norm(x)
        if self.rotate is not None:
            assert positions is not None, "a layer that turns queries and keys is told where they stand"
            x = self.rotate(x, positions)
        return norm(x) if norm is not None and not self.norms_first else x

    def neurons(self, mlp_in: "Tensor") -> "Tensor":
        """Outputs of all neurons, (..., n), for mlp_in (..., d)."""
        if self.gate is None:
            return self.activate(self.up(mlp_in))
        up = self.up(mlp_in)
        return self.activate(self.gate(mlp_in)) * (self.activate(up) if self.activates_up else up)

    def with_beside(self, mlp_in: "Tensor", added: "Tensor") -> "Tensor":
        """Sum of what the neurons add (..., d) and what the module beside them does, for mlp_in (..., d)."""
        return added if self.beside is None else added + self.beside(mlp_in)


class Family(Protocol):
    """Interface of a kind of model to the library. One file a family."""

    @property
    def model_types(self) -> tuple[str, ...]:
        """The ``model_type`` of its configurations, as transformers has them."""
        ...

    @property
    def least_transformers(self) -> str:
        """The version of transformers that has its classes first."""
        ...

    @property
    def around(self) -> str:
        """Prefix of names in a checkpoint: that of the model around its layers, in transformers' class."""
        ...

    @property
    def structure(self) -> tuple[str, ...]:
        """The keys of a configuration that decide which tensors there are and what they mean."""
        ...

    @property
    def matrices(self) -> Mapping[str, str]:
        """By the names of :class:`BlockParts` what a layer calls its linear maps, in the order in which they are read.

        One map for q, k and v stands there three times.
        """
        ...

    @property
    def embedding(self) -> str:
        """The name of the tokens' embedding among :meth:`stored_tensors`."""
        ...

    def dims(self, values: Mapping[str, Any], name: str) -> ModelDims:
        """The sizes, from the values of a config.json. ``name``: of the model, for messages.

        Raises:
            UserError: what this family does not run.
        """
        ...

    def stored_tensors(self, values: Mapping[str, Any]) -> Mapping[str, tuple[int, ...]]:
        """The shapes of what a checkpoint of this config.json holds, whose weights are numbers.

        Names have no :attr:`around` before them. ``lm_head.weight`` is there only where it is not the embedding.
        """
        ...

    def blocks(self, model: Any) -> list[BlockParts]:
        """The decoder layers, in order. The model's own modules."""
        ...

    def embed(self, model: Any, inputs: "Tensor", positions: "Tensor") -> "Tensor":
        """(B, T, d), what the first layer reads: inputs (B, T) token ids or (B, T, d) embeddings, positions (B, T)."""
        ...

    def embeddings(self, model: Any) -> list[Any]:
        """The modules that :meth:`embed` calls."""
        ...

    def final_norm(self, model: Any) -> Any:
        """The norm behind the last layer, or None."""
        ...


SAVED_TOGETHER = "dejavu_sparse_"
"""Before the ``model_type`` of a model that is saved with its bundle: no one takes it for the dense model."""

LOGIT_CAP = "final_logit_softcapping"  # of a config.json
_FAMILIES: dict[str, Family] = {}
_NEVER = {  # why a model_type cannot be a family
    "bitnet": "which needs kernels for ternary weights: in them the LM head in bf16 is over half of the bytes",
    **dict.fromkeys(
        ("jamba", "bamba", "zamba", "zamba2", "falcon_h1", "granitemoehybrid"),
        "which has Mamba layers besides attention",
    ),
}
_TOWERS = {"cosmos3_edge": "cosmos3_edge_text"}  # models of text and pictures, and the type of their text alone


def register(family: Family) -> None:
    """Let the library run models of another family. A later one of the same ``model_type`` takes its place."""
    _FAMILIES.update(dict.fromkeys(family.model_types, family))


def family_named(kind: str, name: str, values: Mapping[str, Any] | None = None) -> Family:
    """The family of the ``model_type`` ``kind``.

    Args:
        values: of its config.json, where they are at hand, to say what was found there.
    Raises:
        UserError: none is registered for it.
    """
    if dense_type(kind) in _NEVER:
        raise UserError(
            f"{name} is of type {kind}, {_NEVER[dense_type(kind)]}; it has no sparse form here; {survey_of(name)}"
        )
    if kind in _TOWERS:
        raise UserError(
            f"{name} is of type {kind}, which reads pictures too; supported is its text tower ({_TOWERS[kind]}), and"
            " docs/guides/families.md says how to save that alone"
        )
    if dense_type(kind) not in _FAMILIES:
        raise UserError(_unknown(dense_type(kind), name, values or {}))
    return _FAMILIES[dense_type(kind)]


def _unknown(kind: str, name: str, values: Mapping[str, Any]) -> str:
    """Refusal of a type without a family: the nearest one, what its config.json holds, and the guide."""
    keys = ("hidden_act", "activation_function", "hidden_size", "num_hidden_layers")
    found = ", ".join(f"{key} {values[key]}" for key in keys if key in values)
    code = "trust_remote_code is not taken, since no code of a model's folder is run"
    return (
        f"{name} is of type {kind}; supported are {', '.join(sorted(_FAMILIES))}; the nearest is"
        f" {_nearest(kind, values)}{f', and its config.json says {found}' if found else ''};"
        f" docs/guides/families.md says how to add one; {code if 'auto_map' in values else survey_of(name)}"
    )


def _nearest(kind: str, values: Mapping[str, Any]) -> str:
    """The family whose name is most like a type's, or whose keys and activation are most like a config.json's."""
    from difflib import get_close_matches

    within = [each for each in _FAMILIES if each in kind.replace("-", "_")]
    named = [*sorted(within, key=len, reverse=True), *get_close_matches(kind, _FAMILIES, 1)]
    runs = [each for each, own in _FAMILIES.items() if values.get("hidden_act") in getattr(own, "activations", ())]
    return [*named, max(runs or _FAMILIES, key=lambda each: sum(key in values for key in _FAMILIES[each].structure))][0]


def dense_type(kind: str) -> str:
    """The ``model_type`` of the dense model, of a model's or of one's that is saved with its bundle."""
    return kind.removeprefix(SAVED_TOGETHER)


def family_of(model: Any) -> Family:
    """The family of a model. Raises as :func:`family_named`."""
    return family_named(getattr(model.config, "model_type", type(model).__name__), type(model).__name__)


def dims_of(values: Any, name: str = "this model") -> ModelDims:
    """The sizes of a model, from the values of its config.json or from a configuration of transformers.

    Raises:
        UserError: no family is registered for it, or its family does not run it.
    """
    given = values if isinstance(values, Mapping) else values.to_dict()
    if "model_type" not in given:
        raise UserError(f"the config.json of {name} names no model_type; give the config that belongs to the weights")
    dims = family_named(given["model_type"], name, given).dims(given, name)
    if dims.activation not in (*SILENT, *SMOOTH):
        refuse_activation(name, dims.activation, [*SILENT, *SMOOTH])
    return dims


def refuse_activation(name: str, activation: str, runs: Iterable[str]) -> NoReturn:
    """Raise :class:`UserError` for an activation that a model's family does not run. runs: those that it does."""
    raise UserError(
        f"{name} uses the activation {activation}; supported in its family are {', '.join(runs)}; {survey_of(name)}"
    )


def survey_of(name: str) -> str:
    """End of a refusal of a model. A model without a name has no command."""
    model = name if name and " " not in name else "MODEL"
    return f"dejavu survey --model {model} tells what the model would gain, where transformers knows its type"


def logits_of(model: Any, hidden: "Tensor") -> "Tensor":
    """The logits (..., V) of hidden states (..., d) behind the final norm, of any class of transformers.

    A family whose classes read no cap of logits has none, whatever a config.json holds.
    """
    logits: Tensor = model.get_output_embeddings()(hidden)
    family = _FAMILIES.get(dense_type(model.config.model_type))
    reads_cap = family is None or LOGIT_CAP in family.structure
    cap = getattr(model.config, LOGIT_CAP, None) if reads_cap else None
    return cap * (logits / cap).tanh() if cap else logits


def families() -> dict[str, Family]:
    """The registered families by ``model_type``, the first of them that of OPT."""
    return dict(_FAMILIES)


def blocks_of(model: Any) -> list[BlockParts]:
    """The decoder layers of a model of any family, in order."""
    return family_of(model).blocks(model)


def map_shapes(dims: ModelDims, matrices: Mapping[str, str]) -> dict[str, tuple[int, int]]:
    """(rows, columns) of the weights of a layer's linear maps, by their names in it. ``matrices``: of a family."""
    d, n, h, g = dims.d_model, dims.d_ffn, dims.n_heads * dims.head_dim, dims.n_kv_heads * dims.head_dim
    sizes = {"q": (h, d), "k": (g, d), "v": (g, d), "out": (d, h), "gate": (n, d), "up": (n, d), "down": (d, n)}
    made: dict[str, tuple[int, int]] = {}
    for part, name in matrices.items():
        rows, columns = sizes[part]
        made[name] = (made.get(name, (0, 0))[0] + rows, columns)
    return made


def decoder_tensors(
    dims: ModelDims,
    family: Family,
    layers: str,
    norms: Mapping[str, int],
    of_layer: Mapping[str, int],
    parts: Iterable[str] = ("weight", "bias"),
) -> dict[str, tuple[int, ...]]:
    """Shapes of the embedding, each layer's maps and norms, the norms around the layers, and an LM head of its own.

    Args:
        layers: what stands in front of a layer's number. norms, of_layer: width of each by its name. parts: of each.
    """
    before = [f"{layers}{i}." for i in range(dims.n_layers)]
    ends: tuple[int, ...] = (dims.vocab_size, dims.embedding_dim)
    made = {family.embedding: ends} | ({} if dims.tied else {"lm_head.weight": ends})
    widths = {**norms, **{f"{layer}{name}": width for layer in before for name, width in of_layer.items()}}
    made |= {f"{name}.{part}": (width,) for name, width in widths.items() for part in parts}
    return made | layer_tensors(before, map_shapes(dims, family.matrices), dims.biases)


def layer_tensors(
    layers: Iterable[str], maps: Mapping[str, tuple[int, int]], biases: bool = True
) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors of every layer's maps, by their names in a checkpoint.

    Args:
        layers: what stands in front of a layer's names. maps: (rows, columns) of each weight.
    """
    made: dict[str, tuple[int, ...]] = {}
    for layer in layers:
        for name, (rows, columns) in maps.items():
            made[f"{layer}{name}.weight"] = (rows, columns)
            if biases:
                made[f"{layer}{name}.bias"] = (rows,)
    return made
