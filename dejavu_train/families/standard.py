"""Decoders whose modules are called as Llama's. What differs from family to family stands in each family's file."""

import importlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from dejavu_train.families.base import BlockParts, decoder_tensors, refuse_activation
from dejavu_train.families.dims import Activation, ModelDims, Norm, Positions
from dejavu_train.ground.errors import UserError

if TYPE_CHECKING:  # torch is not loaded to check the keys of a run
    from torch import Tensor

SIZES = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size",
    "max_position_embeddings",
)  # fmt: skip
_LARGEST = 2**31 - 1


class StandardFamily:
    """See :class:`dejavu_train.families.base.Family`. A family is a subclass.

    Attributes:
        classes: by ``model_type`` what its classes in transformers begin with.
        coded_as: the ``model_type`` that transformers has those classes under. "": the family's own.
        least_transformers: the version that has them first.
        activations: by ``hidden_act`` the kind that a family runs.
        defaults: of keys that a config.json may leave out.
        needed: keys that its classes cannot read a null of.
        epsilon: the key of the norms' epsilon.
        steady: kinds of rotary positions that it has and that do not change with the length.
        turns_part: its classes read ``partial_rotary_factor``. Others turn whole heads, whatever that key says.
    """

    classes: Mapping[str, str] = {}
    coded_as = ""
    least_transformers = ""
    activations: Mapping[str, Activation] = {"relu": Activation.RELU}
    defaults: Mapping[str, Any] = {}
    needed: tuple[str, ...] = ()
    epsilon = "rms_norm_eps"
    norm = Norm.RMS_NORM
    last_norm = "norm"
    gated = False
    steady: tuple[str, ...] = ("default", "linear", "llama3", "yarn")
    turns_part = True
    around = "model"
    embedding = "embed_tokens.weight"
    maps = ("up_proj", "down_proj", "act_fn")
    """Names of an MLP's map into the neurons, the one out of them, and its activation."""

    @property
    def model_types(self) -> tuple[str, ...]:
        return tuple(self.classes)

    @property
    def matrices(self) -> dict[str, str]:
        up, down, _ = (f"mlp.{name}" for name in self.maps)
        made = {part: f"self_attn.{part}_proj" for part in "qkv"} | {"out": "self_attn.o_proj"}
        return made | ({"gate": "mlp.gate_proj"} if self.gated else {}) | {"up": up, "down": down}

    @property
    def structure(self) -> tuple[str, ...]:
        return (
            *SIZES, "num_key_value_heads", "head_dim", "hidden_act", "attention_bias", "mlp_bias", "rope_parameters",
            "rope_scaling", "rope_theta", "partial_rotary_factor", "sliding_window", self.epsilon,
        )  # fmt: skip

    def given(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The values of a config.json, and defaults of what it leaves out."""
        return {"hidden_act": "", "attention_bias": False, "mlp_bias": False, **self.defaults, **values}

    def dims(self, values: Mapping[str, Any], name: str) -> ModelDims:
        given = self.given(values)
        if given["hidden_act"] not in self.activations:
            refuse_activation(name, str(given["hidden_act"]), self.activations)
        sizes = {key: whole_number(given, key, name) for key in (*SIZES, *given.keys() & self.needed)}
        d_model, heads = sizes["hidden_size"], sizes["num_attention_heads"]
        if not given.get("head_dim") and d_model % heads:
            raise UserError(
                f"{name} has the hidden_size {d_model}, which its {heads} num_attention_heads do not divide; give the"
                " config that belongs to the weights"
            )
        if given.get("num_key_value_heads") is None:
            given["num_key_value_heads"] = heads
        groups = whole_number(given, "num_key_value_heads", name)
        if heads % groups:
            raise UserError(f"{name} has {groups} num_key_value_heads, which do not divide its {heads} heads")
        if bool(given["attention_bias"]) != bool(given["mlp_bias"]):
            raise UserError(f"{name} has biases in its attention or its MLP alone, which is not read here")
        head_dim, share = int(given.get("head_dim") or d_model // heads), self.rotary_share(given, name)
        if int(head_dim * share) % 2:  # transformers rounds up in some families, and fails in others
            raise UserError(
                f"{name} turns {int(head_dim * share)} dimensions of a head (head_dim {head_dim},"
                f" partial_rotary_factor {share:g}), and they are turned in pairs; give the config that belongs to the"
                " weights"
            )
        return ModelDims(
            d_model=d_model,
            d_ffn=sizes["intermediate_size"],
            n_layers=sizes["num_hidden_layers"],
            n_heads=heads,
            n_kv_heads=groups,
            head_dim=head_dim,
            vocab_size=sizes["vocab_size"],
            max_positions=min(sizes["max_position_embeddings"], given.get("sliding_window") or _LARGEST),
            norm=self.norm,
            positions=Positions.ROTARY,
            rotary_share=share,
            activation=self.activations[given["hidden_act"]],
            threshold=self.threshold(given),
            gated=self.gated,
            biases=bool(given["mlp_bias"]),
            tied=bool(given.get("tie_word_embeddings", False)),
        )

    def threshold(self, given: Mapping[str, Any]) -> float:
        """Threshold of FATReLU."""
        return 0.0

    def rotary_share(self, given: Mapping[str, Any], name: str) -> float:
        """The share of a head's dimensions that are turned.

        Raises:
            UserError: rotary positions that change with the length of a text, or that transformers cannot compute.
        """
        rope = given.get("rope_scaling") or given.get("rope_parameters") or {}  # transformers has this order
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind not in self.steady:
            raise UserError(f"{name} has rotary positions of the kind {kind}; supported are {', '.join(self.steady)}")
        share = float(rope.get("partial_rotary_factor", given.get("partial_rotary_factor") or 1.0))
        if self.turns_part or share == 1:
            return share
        if kind != "default":  # whose function reads the key all the same, and the layers do not
            raise UserError(
                f"{name} has the partial_rotary_factor {share:g} beside rotary positions of the kind {kind}, which"
                " transformers does not run in its family; leave that key out"
            )
        return 1.0

    def stored_tensors(self, values: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        dims = self.dims(values, "this model")
        parts = {Norm.RMS_NORM: ("weight",), Norm.RMS_NORM_PLAIN: ()}.get(self.norm, ("weight", "bias"))
        return decoder_tensors(dims, self, "layers.", {self.last_norm: dims.d_model}, self.layer_norms(dims), parts)

    def layer_norms(self, dims: ModelDims) -> dict[str, int]:
        """Width of each of a layer's norms by its name."""
        return dict.fromkeys(("input_layernorm", "post_attention_layernorm"), dims.d_model)

    def blocks(self, model: Any) -> list[BlockParts]:
        kinds = self.kinds(model)
        rotate = self.rotation(model)
        return [self.block(f"model.layers.{i}", layer, kinds, rotate) for i, layer in enumerate(model.model.layers)]

    def block(
        self, name: str, layer: Any, kinds: tuple[type, type], rotate: "Callable[[Tensor, Tensor], Tensor]"
    ) -> BlockParts:
        """The modules of one layer."""
        attention, mlp = layer.self_attn, layer.mlp
        up, down, activate = (getattr(mlp, each) for each in self.maps)
        return BlockParts(
            name=name,
            whole=layer,
            attention=attention,
            norm_attn=layer.input_layernorm,
            **{part: getattr(attention, f"{part}_proj") for part in "qkv"},
            out=attention.o_proj,
            norm_mlp=layer.post_attention_layernorm,
            gate=mlp.gate_proj if self.gated else None,
            up=up,
            down=down,
            activate=activate,
            kinds=kinds,
            n_heads=attention.config.num_attention_heads,
            head_dim=attention.head_dim,
            scaling=attention.scaling,
            rotate=rotate,
        )

    def kinds(self, model: Any) -> tuple[type, type]:
        """The classes of a layer and of its attention."""
        kind = next(kind for kind in self.classes if model.config.model_type.endswith(kind))
        coded, first = self.coded_as or kind, self.classes[kind]
        modeling = importlib.import_module(f"transformers.models.{coded}.modeling_{coded}")
        return getattr(modeling, f"{first}DecoderLayer"), getattr(modeling, f"{first}Attention")

    def rotation(self, model: Any) -> "Callable[[Tensor, Tensor], Tensor]":
        """Turns queries or keys (B, h, T, e) at positions (B, T), by the model's own cosines and sines."""
        return partial(_rotate, model.model.rotary_emb)

    def embed(self, model: Any, inputs: "Tensor", positions: "Tensor") -> "Tensor":
        embedded: Tensor = inputs if inputs.is_floating_point() else model.model.embed_tokens(inputs)
        return embedded

    def embeddings(self, model: Any) -> list[Any]:
        return [model.model.embed_tokens]

    def final_norm(self, model: Any) -> Any:
        return getattr(model.model, self.last_norm)


def _rotate(rotary: Any, x: "Tensor", positions: "Tensor") -> "Tensor":
    from dejavu_train.families.block import turn

    # YaRN has a factor of its own in both. They follow from positions alone, of padding (-1) they are not looked at.
    return turn(x, *rotary(x, positions))


def whole_number(values: Mapping[str, Any], key: str, name: str) -> int:
    """A size of a config.json. Raises :class:`UserError` for what is none."""
    size = values.get(key)
    if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size <= _LARGEST:
        raise UserError(f"{key} of {name} must be a whole number of at least 1, got {size!r}")
    return size
