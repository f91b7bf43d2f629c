"""Finds the parts of any decoder of transformers that a survey needs, by what the modules are and not by a family.

A layer has one module of attention, whose last map back to the model's width reads the heads' outputs. Outside of the
attention it has one map back to that width, which reads the neurons, and one or two maps as large into them. A model of
other layers is refused in one line.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MASKED_LM_MAPPING
from transformers.pytorch_utils import Conv1D

from dejavu_train.families import TARGETS, BlockParts, Target
from dejavu_train.families.base import families
from dejavu_train.ground.errors import UserError, first_line
from dejavu_train.ground.machine import require_package
from dejavu_train.models.hub import looks_local
from dejavu_train.models.stored import MOVED

GGUF = ".gguf"
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_CLASS = "the survey reads decoders with attention and one MLP in every layer"


@dataclass(frozen=True)
class DecoderParts:
    """Names of modules within a layer, and the sizes that all layers share.

    Attributes:
        layers: name of the list of layers in the model.
        out, down: by layer the names of the maps that read the heads and the neurons. "": the layer has none.
        groups: of heads that share K and V. heads: of the queries.
        attention_weights, mlp_weights: of the matrices of all layers together.
        gated: two maps lead into the neurons.
        other_weights: that a step reads of all layers besides.
        experts: how many routed ones a mixture has.
    """

    layers: str
    out: tuple[str, ...]
    down: tuple[str, ...]
    d_model: int
    d_ffn: int
    heads: int
    groups: int
    attention_weights: int
    mlp_weights: int
    head_weights: int
    gated: bool
    other_weights: int = 0
    experts: int = 0

    @property
    def n_layers(self) -> int:
        return len(self.out)

    def layers_of(self, target: Target) -> list[int]:
        """Numbers of the layers that have heads, or neurons."""
        return [number for number, each in enumerate(self.down if target == Target.MLP else self.out) if each]


def read_config(name: str, revision: str | None) -> PreTrainedConfig:
    """The configuration of a causal language model.

    Args:
        name: folder, hub id or .gguf file.
    Raises:
        UserError: nothing there, an unknown kind, one that writes no text from left to right, or no package gguf.
    """
    where, options = located(name, revision)
    if looks_local(name) and not Path(name).exists():
        raise UserError(f"there is no model {name}; give a folder, a .gguf file or a hub id such as facebook/opt-125m")
    if name.endswith(GGUF):
        require_package("gguf", name, "gguf")
    try:
        config = AutoConfig.from_pretrained(where, trust_remote_code=False, **options)
    except (OSError, ValueError, KeyError, ImportError, StrictDataclassError) as error:
        own = "it needs code of its own (trust_remote_code), and no code of a model's folder is run"
        why = own if "trust_remote_code" in str(error) else first_line(error)
        raise UserError(f"cannot read the config of {name}: {why}") from None
    decodes = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING and not getattr(config, "is_encoder_decoder", False)
    if not decodes or _encodes(config):
        raise UserError(f"{name} is of type {config.model_type}, which is no causal language model; {_CLASS}")
    return config


def load_decoder(name: str, revision: str | None, config: PreTrainedConfig, layers: str) -> Any:
    """The dense model on the CPU, in evaluation mode and in the dtype that its weights are stored in.

    Weights of safetensors are mapped into memory, so a layer is read from the disk when it runs.

    Args:
        layers: name of the list of its layers.
    Raises:
        UserError: weights that are missing, of more layers, or cannot be read.
    """
    where, options = located(name, revision)
    if name.endswith(GGUF):
        options |= {"dtype": torch.float32}  # transformers makes floats of the codes, all in memory
    else:
        options |= {"dtype": "auto", "config": config, "use_safetensors": True, "trust_remote_code": False}
        options["ignore_mismatched_sizes"] = True  # they are named below
    try:
        model, info = AutoModelForCausalLM.from_pretrained(where, output_loading_info=True, **options)
    except (OSError, ValueError, RuntimeError, KeyError, ImportError, SafetensorError) as error:
        raise UserError(f"cannot load the weights of {name}: {first_line(error)}") from None
    if missing := sorted(info["missing_keys"]):
        raise UserError(f"the weights of {name} lack {len(missing)} tensors of its config, first {missing[0]}")
    for tensor, *sizes in sorted(info["mismatched_keys"]):
        got, asked = ("x".join(map(str, size)) for size in sizes)
        raise UserError(f"{tensor} of {name} is {got}, its config asks for {asked}; give the config that belongs to it")
    inside = tuple(f"{each}." for each in (layers, layers.partition(".")[2]) if each)
    surplus = sorted(key for key in info["unexpected_keys"] if key.startswith(inside) and not key.endswith(MOVED))
    if surplus:
        raise UserError(
            f"the weights of {name} hold {surplus[0]}, which its config has no place for; give the config that belongs"
            " to them"
        )
    return model.eval().requires_grad_(False)


def find_parts(name: str, config: PreTrainedConfig) -> DecoderParts:
    """The parts of a model of this configuration, found without weights.

    Raises:
        UserError: a config that transformers makes no model of, or layers that a survey cannot read, by the class that
            stands in the way.
    """
    model = _skeleton(name, config)
    text = config.get_text_config()
    d_model, n_layers = _size(name, text, "hidden_size"), _size(name, text, "num_hidden_layers")
    if d_model is None or n_layers is None:
        raise UserError(f"{name} ({type(model).__name__}) has layers of other sizes than a decoder; {_CLASS}")
    heads = _size(name, text, "num_attention_heads") or 1
    paths = {id(module): path for path, module in model.named_modules()}
    inner: nn.Module = model.get_decoder()  # of a model that reads pictures too, the part that reads text
    within = (each for around in (inner, model) for each in around.modules())
    layers: Any = next((each for each in within if isinstance(each, nn.ModuleList) and len(each) == n_layers), None)
    if layers is None:
        raise UserError(f"{name} ({type(model).__name__}) has no list of {n_layers} layers; {_CLASS}")
    blocks = families()[config.model_type].blocks(model) if config.model_type in families() else []
    if any(len(block.targets) < len(TARGETS) for block in blocks):
        return _parts_of_blocks(blocks, paths[id(layers)], config, model)
    experts = _experts(config)
    found = [_layer_parts(name, layer, d_model, heads, experts) for layer in layers]
    if len({(each.width, each.gated) for each in found}) > 1:
        raise UserError(f"{name} has layers of several widths; {_CLASS}")
    groups = _size(name, text, "num_key_value_heads") or found[0].groups
    if heads % groups:
        raise UserError(f"{name} has {heads} heads and {groups} K/V heads, which do not divide them; {_CLASS}")
    return DecoderParts(
        layers=paths[id(layers)], out=tuple(each.out for each in found), down=tuple(each.down for each in found),
        d_model=d_model, d_ffn=found[0].width, heads=heads, groups=groups,
        attention_weights=sum(each.attention_weights for each in found),
        mlp_weights=sum(each.mlp_weights for each in found),
        head_weights=model.get_output_embeddings().weight.numel(), gated=found[0].gated,
    )  # fmt: skip


def _parts_of_blocks(blocks: list[BlockParts], layers: str, config: PreTrainedConfig, model: Any) -> DecoderParts:
    """Parts of a model of a family that has layers without a target. A step reads a token's share of routed experts."""
    inside = {id(module): path for block in blocks for path, module in block.whole.named_modules()}
    head = next(block for block in blocks if block.out is not None)
    up = next(block.up for block in blocks if block.up is not None)
    named = {Target.HEADS: ("q", "k", "v", "out"), Target.MLP: ("up", "down")}
    weights = {}
    for target, names in named.items():
        maps = (getattr(block, name) for block in blocks if target in block.targets for name in names)
        weights[target] = sum(each.weight.numel() for each in maps)
    routed = getattr(config, "num_experts_per_tok", 1) / (getattr(config, "num_local_experts", None) or 1)
    every = [each for block in blocks for each in block.whole.named_parameters()]
    read = sum(each.numel() * (routed if ".experts." in path else 1) for path, each in every if each.dim() > 1)
    return DecoderParts(
        layers=layers, out=tuple(inside.get(id(block.out), "") for block in blocks),
        down=tuple(inside.get(id(block.down), "") for block in blocks), d_model=up.in_features, d_ffn=up.out_features,
        heads=head.n_heads, groups=head.n_groups, attention_weights=weights[Target.HEADS],
        mlp_weights=weights[Target.MLP], head_weights=model.get_output_embeddings().weight.numel(), gated=False,
        other_weights=round(read) - sum(weights.values()),
        experts=max(getattr(routed_experts(block.whole), "num_experts", 0) for block in blocks),
    )  # fmt: skip


def routed_experts(layer: nn.Module) -> Any:
    """The module of a layer that holds its routed experts, or None."""
    return next((each for path, each in layer.named_modules() if path.endswith(".experts")), None)


def _skeleton(name: str, config: PreTrainedConfig) -> Any:
    """The model without weights. Raises :class:`UserError` where transformers makes none."""
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config)
    except (
        AttributeError, ImportError, KeyError, RuntimeError, StrictDataclassError, TypeError, ValueError,
    ) as error:  # fmt: skip
        raise UserError(
            f"transformers makes no model of the config of {name} ({type(error).__name__}: {first_line(error)}); give"
            " the config that belongs to the weights"
        ) from None


def _size(name: str, config: PreTrainedConfig, key: str) -> int | None:
    """A size that all layers share, or None. Raises :class:`UserError` for one that differs from layer to layer."""
    try:
        size: int | None = getattr(config, key, None)
    except RuntimeError:  # transformers' own, of a value that each layer has for itself
        raise UserError(f"{name} has layers of several sizes ({key}); {_CLASS}") from None
    return size


def check_window(name: str, config: PreTrainedConfig, window: int) -> None:
    """Raise :class:`UserError` for sequences of more tokens than the model has positions."""
    text = config.get_text_config()
    keys = ("max_position_embeddings", "max_seq_len")
    positions = next((size for key in keys if (size := _size(name, text, key)) is not None), None)
    if positions is not None and window - 1 > positions:
        raise UserError(f"--window {window} exceeds the {positions} positions of {name}; give {positions + 1} at most")


def _experts(config: PreTrainedConfig) -> str | None:
    """Experts that a config names. A model without them may have the key as well."""
    values = {**config.to_dict(), **config.get_text_config().to_dict()}
    return next((f"{values[key]} experts ({key})" for key in EXPERTS if values.get(key)), None)


def rows_in(module: nn.Module) -> Tensor:
    """(out, in), the weight of a linear map, however the module stores it."""
    weight: Any = module.weight
    return weight.T if isinstance(module, Conv1D) else weight


def _encodes(config: PreTrainedConfig) -> bool:
    """Whether a kind that also writes text is meant as an encoder here. GPT-NeoX has the key, and is none."""
    if getattr(config, "is_decoder", None) is not False:
        return False
    written = config.architectures or ()
    masked = type(config) in MODEL_FOR_MASKED_LM_MAPPING
    return masked or bool(written) and MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__ not in written


def located(name: str, revision: str | None) -> tuple[str, dict[str, Any]]:
    """Where transformers finds a folder, hub id or .gguf file, and the keywords that say so."""
    if not name.endswith(GGUF):
        return name, {"revision": revision or "main"}
    folder, _, file = name.rpartition("/")
    return folder or ".", {"gguf_file": file}


def _maps(layer: nn.Module) -> dict[str, Tensor]:
    """By name the weights (out, in) of a layer's linear maps, in the order of registration."""
    return {path: rows_in(each) for path, each in layer.named_modules() if isinstance(each, (nn.Linear, Conv1D))}


@dataclass(frozen=True)
class _LayerParts:
    """Parts of one layer, as in :class:`DecoderParts`. width: neurons. groups: of heads, by the sizes of its maps."""

    out: str
    down: str
    width: int
    gated: bool
    groups: int
    attention_weights: int
    mlp_weights: int


def _layer_parts(name: str, layer: nn.Module, d_model: int, heads: int, experts: str | None) -> _LayerParts:
    attention, maps = _attention(name, layer), _maps(layer)
    own = {path: weight for path, weight in maps.items() if _is_in(path, attention)}
    rest = {path: weight for path, weight in maps.items() if path not in own}
    order = list(maps)
    back = [path for path, weight in own.items() if weight.shape[0] == d_model and weight.shape[1] % heads == 0]
    outs = [path for path in back if "gate" not in path.rpartition(".")[2]]  # a gate of the heads may come last
    downs = [path for path, weight in rest.items() if weight.shape[0] == d_model]
    out = max(outs, key=order.index, default=None)
    down = max(downs, key=lambda path: (maps[path].shape[1], order.index(path)), default=None)
    width = 0 if down is None else maps[down].shape[1]
    into = {path: weight for path, weight in rest.items() if path != down and weight.shape[1] == d_model}
    rows = sum(weight.shape[0] for weight in into.values())
    further = [path for path in rest if path != down and (path not in into or rows not in (width, 2 * width))]
    further += [
        path for path, each in layer.named_parameters() if each.dim() > 2 and not _is_in(path, attention)
    ]  # weights of all experts together, or a convolution
    if experts and (further or down is None):
        raise UserError(f"{name} has {experts}, which choose already; {_CLASS}")
    if out is None or down is None:
        raise UserError(f"{name} has a {type(layer).__name__} without {'MLP' if out else 'heads'}; {_CLASS}")
    if further:
        odd = (path for path in further if path not in into or into[path].shape[0] not in (width, 2 * width))
        raise UserError(f"{name} has more than attention and one MLP in its layers ({next(odd, further[0])}); {_CLASS}")
    for path, inside in layer.named_modules():
        weight = getattr(inside, "weight", None)
        if "Norm" in type(inside).__name__ and weight is not None and tuple(weight.shape) == (width,) != (d_model,):
            if not _is_in(path, attention):
                raise UserError(f"{name} norms all neurons ({path}), also those that would be skipped; {_CLASS}")
    projected = sum(weight.shape[0] for path, weight in own.items() if path != out and weight.shape[1] == d_model)
    shared, left = divmod(projected - maps[out].shape[1], 2 * maps[out].shape[1] // heads)  # rows of K and V
    groups = shared if not left and shared >= 1 and heads % shared == 0 else heads
    numbers = [sum(weight.numel() for weight in each.values()) for each in (own, rest)]
    return _LayerParts(out, down, width, rows == 2 * width, groups, *numbers)


def _attention(name: str, layer: nn.Module) -> str:
    """The name of a layer's attention, the outermost module whose class says so.

    Raises:
        UserError: there is none, several, or one that reads something else than the text.
    """
    kinds = {path: type(each).__name__ for path, each in layer.named_modules() if path}
    named = [path for path, kind in kinds.items() if "Attention" in kind]
    outermost = [path for path in named if not any(path != each and _is_in(path, each) for each in named)]
    if not outermost:
        inner = [kinds[path] for path, _ in layer.named_children()]
        plain = (kind for kind in inner if not any(part in kind for part in ("Norm", "MLP", "MoE", "FeedForward")))
        raise UserError(f"{name} has a {next(plain, type(layer).__name__)} in its layers; {_CLASS}")
    for path in outermost:
        if path != outermost[0] or "Cross" in kinds[path]:
            raise UserError(f"{name} has a second attention in its layers, or one to another text ({path}); {_CLASS}")
    return outermost[0]


def _is_in(path: str, module: str) -> bool:
    """Whether a path within a layer is that of a module, or of something inside it."""
    return path == module or path.startswith(f"{module}.")
