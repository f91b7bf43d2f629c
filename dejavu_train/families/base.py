"""The parts of a decoder layer, whatever a family calls them, and the table of families."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from dejavu_train.errors import UserError
from dejavu_train.families.dims import ModelDims

if TYPE_CHECKING:  # torch is not loaded to check the keys of a run
    from torch import Tensor


@dataclass(frozen=True)
class BlockParts:
    """The modules of one decoder layer.

    Attributes:
        name: of the layer in the model, such as ``model.decoder.layers.3``.
        whole: the layer itself; attention: the module that holds q, k, v and out.
        q, k, v, out, up, down: linear maps, or adapters around them, with ``weight`` (out, in) and ``bias`` or None.
        activate: of ``up``'s output, element by element.
        kinds: the classes that ``whole`` and ``attention`` have where nobody exchanged them.
        n_heads, head_dim: of the queries; scaling: what queries are multiplied with.
    """

    name: str
    whole: Any
    attention: Any
    norm_attn: Any
    q: Any
    k: Any
    v: Any
    out: Any
    norm_mlp: Any
    up: Any
    down: Any
    activate: "Callable[[Tensor], Tensor]"
    kinds: tuple[type, type]
    n_heads: int
    head_dim: int
    scaling: float

    def project(self, attn_in: "Tensor") -> tuple["Tensor", "Tensor", "Tensor"]:
        """Queries, keys and values, (B, h, T, e) each, of attn_in (B, T, d)."""
        q, k, v = (part(attn_in).unflatten(-1, (-1, self.head_dim)) for part in (self.q, self.k, self.v))
        return q.transpose(-2, -3), k.transpose(-2, -3), v.transpose(-2, -3)


class Family(Protocol):
    """What the library asks of a kind of model. One file a family."""

    model_types: tuple[str, ...]
    """The ``model_type`` of its configurations."""

    def dims(self, values: Mapping[str, Any], name: str) -> ModelDims:
        """The sizes, from the values of a config.json; ``name``: of the model, for messages.

        Raises:
            UserError: what this family does not run.
        """
        ...

    def blocks(self, model: Any) -> list[BlockParts]:
        """The decoder layers, in order; the model's own modules."""
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


_FAMILIES: dict[str, Family] = {}


def register(family: Family) -> None:
    """Let the library run models of another family. A later one of the same ``model_type`` takes its place."""
    _FAMILIES.update(dict.fromkeys(family.model_types, family))


def family_named(kind: str, name: str) -> Family:
    """The family of the ``model_type`` ``kind``.

    Raises:
        UserError: none is registered for it.
    """
    if kind not in _FAMILIES:
        known = ", ".join(sorted(each for each in _FAMILIES if not each.startswith("dejavu_")))
        raise UserError(f"{name} is of type {kind}; supported are {known}")
    return _FAMILIES[kind]


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
    return family_named(given["model_type"], name).dims(given, name)


def blocks_of(model: Any) -> list[BlockParts]:
    """The decoder layers of a model of any family, in order."""
    return family_of(model).blocks(model)
