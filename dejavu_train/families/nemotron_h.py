"""Nemotron-H, Nemotron Nano 2 and Nemotron 3: a layer is a Mamba, an attention, an MLP or a mixture, and no more.

An MLP is squared ReLU without a gate. Attention turns nothing: positions follow from the Mamba layers. A mixture has a
shared expert, which every token uses, and that is an MLP as well. Its routed experts run as transformers runs them.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dejavu_train.families.base import BlockParts, layer_tensors, refuse_activation
from dejavu_train.families.dims import Activation, ModelDims, Norm, Positions
from dejavu_train.families.standard import whole_number
from dejavu_train.ground.errors import UserError

if TYPE_CHECKING:  # torch is not loaded to check the keys of a run
    from torch import Tensor

_ACTIVATIONS = {"relu2": Activation.RELU2, "relu": Activation.RELU}
_KINDS = {  # by what a config.json calls a layer
    "mamba": "M", "linear_attention": "M", "attention": "*", "full_attention": "*", "mlp": "-", "moe": "E",
}  # fmt: skip
_SIZES = (
    "hidden_size", "num_attention_heads", "vocab_size", "max_position_embeddings", "mamba_num_heads", "mamba_head_dim",
    "ssm_state_size", "n_groups", "conv_kernel",
)  # fmt: skip
_OF_EXPERTS = ("n_routed_experts", "moe_intermediate_size", "moe_shared_expert_intermediate_size")
_LAYERS = ("layers_block_type", "layer_types", "hybrid_override_pattern")  # the first that is there counts
_DEFAULTS: Mapping[str, Any] = {  # of transformers, for what a config.json leaves out
    "layers_block_type": ["mamba", "moe", "attention", "mlp"], "hidden_size": 4096, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 131072, "max_position_embeddings": 4096,
    "mamba_num_heads": 128, "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8, "conv_kernel": 4,
    "intermediate_size": 21504, "mlp_hidden_act": "relu2", "mlp_bias": False, "use_bias": False, "use_conv_bias": True,
    "n_routed_experts": 8, "moe_intermediate_size": 7688, "moe_shared_expert_intermediate_size": 7688,
    "moe_latent_size": None,
}  # fmt: skip


class NemotronHFamily:
    """See :class:`dejavu_train.families.base.Family`."""

    model_types = ("nemotron_h",)
    least_transformers = "5.3"
    around = "backbone"
    embedding = "embeddings.weight"
    extra = (r"^mtp\.",)
    structure = (
        *_SIZES, *_OF_EXPERTS, "intermediate_size", "num_key_value_heads", "head_dim", "mlp_hidden_act", "mlp_bias",
        "use_bias", "use_conv_bias", "moe_latent_size", "layer_norm_epsilon", *_LAYERS,
    )  # fmt: skip
    matrices: Mapping[str, str] = {
        **{part: f"mixer.{part}_proj" for part in "qkv"}, "out": "mixer.o_proj", "up": "mixer.up_proj",
        "down": "mixer.down_proj",
    }  # fmt: skip

    def dims(self, values: Mapping[str, Any], name: str) -> ModelDims:
        given = _given(values)
        if given["mlp_hidden_act"] not in _ACTIVATIONS:
            refuse_activation(name, str(given["mlp_hidden_act"]), _ACTIVATIONS)
        layers = layer_letters(given, name)
        sizes = {key: whole_number(given, key, name) for key in _SIZES}
        heads, groups = sizes["num_attention_heads"], whole_number(given, "num_key_value_heads", name)
        if heads % groups:
            raise UserError(f"{name} has {groups} num_key_value_heads, which do not divide its {heads} heads")
        if "*" not in layers:
            raise UserError(f"{name} has no layer with attention ({layers}), by which a text's length is known here")
        if not {"-", "E"} & set(layers):
            raise UserError(f"{name} has no layer with an MLP ({layers}), so there are no neurons to predict")
        for key in (*(_OF_EXPERTS if "E" in layers else ()), *(("intermediate_size",) if "-" in layers else ())):
            sizes[key] = whole_number(given, key, name)
        made = ModelDims(
            d_model=sizes["hidden_size"],
            d_ffn=sizes.get("intermediate_size", sizes.get("moe_shared_expert_intermediate_size", 0)),
            n_layers=len(layers),
            n_heads=heads,
            n_kv_heads=groups,
            head_dim=whole_number(given, "head_dim", name),
            vocab_size=sizes["vocab_size"],
            max_positions=sizes["max_position_embeddings"],
            norm=Norm.RMS_NORM,
            positions=Positions.NONE,
            activation=_ACTIVATIONS[given["mlp_hidden_act"]],
            biases=bool(given["mlp_bias"]),
            pattern=layers.replace("M", ".").replace("E", "-" if _shared_is_target(given, layers) else "."),
            tied=False,  # its class shares nothing, whatever a config.json says
        )
        stored = sum(math.prod(size) for key, size in _layer_tensors(given, layers).items() if len(size) > 1)
        own = sum(made.target_weights(key.target) for key in made.keys)
        return replace(made, other_weights=stored - own)

    def stored_tensors(self, values: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        given, dims = _given(values), self.dims(values, "this model")
        made: dict[str, tuple[int, ...]] = dict.fromkeys(
            (self.embedding, "lm_head.weight"), (dims.vocab_size, dims.d_model)
        )
        return made | {"norm_f.weight": (dims.d_model,)} | _layer_tensors(given, layer_letters(given, "this model"))

    def blocks(self, model: Any) -> list[BlockParts]:
        given = _given(model.config.to_dict())
        shared = _shared_is_target(given, layer_letters(given, "this model"))
        return [self._block(f"model.layers.{i}", layer, shared) for i, layer in enumerate(model.model.layers)]

    def _block(self, name: str, layer: Any, shared: bool) -> BlockParts:
        from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHAttention, NemotronHBlock

        from dejavu_train.families.experts import RoutedExperts

        mixer, kind = layer.mixer, _KINDS[layer.block_type]
        made: dict[str, Any] = {"name": name, "whole": layer, "kinds": (NemotronHBlock, type(None))}
        if kind == "*":
            made |= {part: getattr(mixer, f"{part}_proj") for part in "qkv"}
            made |= {"attention": mixer, "out": mixer.o_proj, "norm_attn": layer.norm, "scaling": mixer.scaling}
            made |= {"n_heads": mixer.config.num_attention_heads, "head_dim": mixer.head_dim}
            made["kinds"] = (NemotronHBlock, NemotronHAttention)
        elif kind == "-" or (kind == "E" and shared):
            mlp = mixer if kind == "-" else mixer.shared_experts
            made |= {"norm_mlp": layer.norm, "up": mlp.up_proj, "down": mlp.down_proj, "activate": mlp.act_fn}
            made["beside"] = RoutedExperts(mixer) if kind == "E" else None
        return BlockParts(**made)

    def assembled(self, tensors: Mapping[str, "Tensor"]) -> "dict[str, Tensor]":
        """Tensors of a layer by its own names, for those of a checkpoint, which has each routed expert for itself."""
        from torch import stack

        made = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
        for part in ("up_proj", "down_proj"):
            found = [name for name in tensors if ".experts." in name and name.endswith(f".{part}.weight")]
            if found:
                found.sort(key=lambda name: int(name.split(".")[-3]))
                made[f"mixer.experts.{part}"] = stack([tensors[name] for name in found])
        return made

    def shortest(self) -> dict[str, Any]:
        """Values of a config.json of as few layers as one of each kind with a target takes."""
        return {"layers_block_type": ["linear_attention", "full_attention", "mlp"]}

    def embed(self, model: Any, inputs: "Tensor", positions: "Tensor") -> "Tensor":
        embedded: Tensor = inputs if inputs.is_floating_point() else model.model.embeddings(inputs)
        return embedded

    def embeddings(self, model: Any) -> list[Any]:
        return [model.model.embeddings]

    def final_norm(self, model: Any) -> Any:
        return model.model.norm_f


def layer_letters(given: Mapping[str, Any], name: str) -> str:
    """A letter for each layer, as NVIDIA's patterns have them: M a Mamba, * attention, - an MLP, E a mixture.

    Raises:
        UserError: another letter or kind.
    """
    named = (given.get(key) for key in _LAYERS)
    kinds: Any = next((each for each in named if each), _DEFAULTS[_LAYERS[0]])
    letters = [_KINDS.get(str(kind), str(kind)) for kind in kinds]
    other = sorted({letter for letter in letters if letter not in "M*-E"})
    if other:
        raise UserError(f"{name} has layers of the kind {other[0]}; supported in its family are {', '.join(_KINDS)}")
    return "".join(letters)


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a config.json, and defaults of what it leaves out."""
    given = {**{key: value for key, value in _DEFAULTS.items() if key not in _LAYERS}, **values}
    if given["num_key_value_heads"] is None:
        given["num_key_value_heads"] = given.get("num_attention_heads")
    return given


def _shared_is_target(given: Mapping[str, Any], layers: str) -> bool:
    """True where shared experts have as many neurons as the plain MLPs, or there are no plain ones."""
    return "-" not in layers or given["moe_shared_expert_intermediate_size"] == given["intermediate_size"]


def _layer_tensors(given: Mapping[str, Any], layers: str) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors of all layers, by their names in a checkpoint."""
    d, made = given["hidden_size"], dict[str, tuple[int, ...]]()
    of_kind = {"M": _mamba, "*": _attention, "-": _mlp, "E": _mixture}
    for number, letter in enumerate(layers):
        made[f"layers.{number}.norm.weight"] = (d,)
        made |= {f"layers.{number}.mixer.{part}": size for part, size in of_kind[letter](given, d).items()}
    return made


def _mamba(given: Mapping[str, Any], d: int) -> dict[str, tuple[int, ...]]:
    heads = given["mamba_num_heads"]
    inner = heads * given["mamba_head_dim"]
    mixed = inner + 2 * given["n_groups"] * given["ssm_state_size"]
    made: dict[str, tuple[int, ...]] = dict.fromkeys(("A_log", "D", "dt_bias"), (heads,))
    made |= {"norm.weight": (inner,), "conv1d.weight": (mixed, 1, given["conv_kernel"])}
    made |= {"conv1d.bias": (mixed,)} if given["use_conv_bias"] else {}
    return made | layer_tensors(
        [""], {"in_proj": (inner + mixed + heads, d), "out_proj": (d, inner)}, given["use_bias"]
    )


def _attention(given: Mapping[str, Any], d: int) -> dict[str, tuple[int, ...]]:
    rows, shared = (given["head_dim"] * given[f"num_{kind}_heads"] for kind in ("attention", "key_value"))
    maps = {"q_proj": (rows, d), "k_proj": (shared, d), "v_proj": (shared, d), "o_proj": (d, rows)}
    return layer_tensors([""], maps, False)


def _mlp(given: Mapping[str, Any], d: int, size: str = "intermediate_size") -> dict[str, tuple[int, ...]]:
    return layer_tensors([""], {"up_proj": (given[size], d), "down_proj": (d, given[size])}, given["mlp_bias"])


def _mixture(given: Mapping[str, Any], d: int) -> dict[str, tuple[int, ...]]:
    experts, inner, latent = given["n_routed_experts"], given["moe_intermediate_size"], given["moe_latent_size"] or d
    shared = _mlp(given, d, "moe_shared_expert_intermediate_size")
    made = {"gate.weight": (experts, d), "gate.e_score_correction_bias": (experts,)}
    made |= {f"shared_experts.{name}": size for name, size in shared.items()}
    of_experts = {"up_proj": (inner, latent), "down_proj": (latent, inner)}
    made |= layer_tensors([f"experts.{number}." for number in range(experts)], of_experts, False)
    around = {"fc1_latent_proj": (latent, d), "fc2_latent_proj": (d, latent)} if given["moe_latent_size"] else {}
    return made | layer_tensors([""], around, given["mlp_bias"])
