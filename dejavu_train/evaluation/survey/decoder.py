"""Finds the parts of any decoder of transformers that a survey needs, by what the modules are and not by a family.

A layer has one module of attention, whose last map back to the model's width reads the heads' outputs. Outside of the
attention its last map back to that width reads the neurons. A model without such layers is refused in one line.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MASKED_LM_MAPPING
from transformers.pytorch_utils import Conv1D

from dejavu_train.errors import UserError, first_line
from dejavu_train.machine import require_package
from dejavu_train.models.hub import looks_local

GGUF = ".gguf"
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_CLASS = "the survey reads decoders with attention and one MLP in every layer"


@dataclass(frozen=True)
class DecoderParts:
    """Names of modules within a layer, and the sizes that all layers share.

    Attributes:
        layers: name of the list of layers in the model.
        out, down: by layer the names of the maps that read the heads and the neurons.
        groups: of heads that share K and V. heads: of the queries.
        attention_weights, mlp_weights: of the matrices of all layers together.
        gated: two maps lead into the neurons.
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

    @property
    def n_layers(self) -> int:
        return len(self.out)


def read_config(name: str, revision: str | None) -> PreTrainedConfig:
    """The configuration of a causal language model.

    Args:
        name: folder, hub id or .gguf file.
    Raises:
        UserError: nothing there, an unknown kind, one that writes no text from left to right, or no package gguf.
    """
    where, options = _located(name, revision)
    if looks_local(name) and not _exists(name):
        raise UserError(f"there is no model {name}; give a folder, a .gguf file or a hub id such as facebook/opt-125m")
    if name.endswith(GGUF):
        require_package("gguf", name, "gguf")
    try:
        config = AutoConfig.from_pretrained(where, **options)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise UserError(f"cannot read the config of {name}: {first_line(error)}") from None
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING or _encodes(config):
        raise UserError(f"{name} is of type {config.model_type}, which is no causal language model; {_CLASS}")
    for key in EXPERTS:
        if getattr(config, key, 0):
            raise UserError(f"{name} has {getattr(config, key)} experts ({key}), which choose already; {_CLASS}")
    return config


def load_model(name: str, revision: str | None, config: PreTrainedConfig) -> Any:
    """The dense model on the CPU, in evaluation mode and in the dtype that its weights are stored in.

    Weights of safetensors are mapped into memory, so a layer is read from the disk when it runs.

    Raises:
        UserError: weights that are missing or cannot be read.
    """
    where, options = _located(name, revision)
    if name.endswith(GGUF):
        options |= {"dtype": torch.float32}  # transformers makes floats of the codes, all in memory
    else:
        options |= {"dtype": "auto", "config": config, "use_safetensors": True}
    try:
        model, info = AutoModelForCausalLM.from_pretrained(where, output_loading_info=True, **options)
    except (OSError, ValueError, RuntimeError, KeyError, ImportError) as error:
        raise UserError(f"cannot load the weights of {name}: {first_line(error)}") from None
    if info["missing_keys"]:
        missing = sorted(info["missing_keys"])
        raise UserError(f"the weights of {name} lack {len(missing)} tensors of its config, first {missing[:1]}")
    return model.eval().requires_grad_(False)


def find_parts(name: str, config: PreTrainedConfig) -> DecoderParts:
    """The parts of a model of this configuration, found without weights.

    Raises:
        UserError: layers that a survey cannot read, by the class that stands in the way.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    text = config.get_text_config()
    d_model, heads = text.hidden_size, getattr(text, "num_attention_heads", 1)
    groups = getattr(text, "num_key_value_heads", None) or heads
    listed = [
        (path, module)
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == text.num_hidden_layers
    ]
    if not listed:
        raise UserError(f"{name} ({type(model).__name__}) has no list of {text.num_hidden_layers} layers; {_CLASS}")
    path, layers = listed[0]
    found = [_layer_parts(name, layer, d_model, heads) for layer in layers]
    if len({(width, gated) for *_, width, gated in found}) > 1:
        raise UserError(f"{name} has layers of several widths; {_CLASS}")
    width, gated = found[0][2:]
    counted = {"attention": 0, "mlp": 0}
    for layer in layers:
        for inner, weight in _maps(layer).items():
            counted["attention" if inner.startswith(_attention(layer)) else "mlp"] += weight.numel()
    if heads % groups:
        raise UserError(f"{name} has {heads} heads and {groups} K/V heads, which do not divide them; {_CLASS}")
    return DecoderParts(
        layers=path, out=tuple(each[0] for each in found), down=tuple(each[1] for each in found), d_model=d_model,
        d_ffn=width, heads=heads, groups=groups, attention_weights=counted["attention"], mlp_weights=counted["mlp"],
        head_weights=model.get_output_embeddings().weight.numel(), gated=gated,
    )  # fmt: skip


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


def _located(name: str, revision: str | None) -> tuple[str, dict[str, Any]]:
    if not name.endswith(GGUF):
        return name, {"revision": revision or "main"}
    folder, _, file = name.rpartition("/")
    return folder or ".", {"gguf_file": file}


def _exists(name: str) -> bool:
    from pathlib import Path

    return Path(name).exists()


def _maps(layer: nn.Module) -> dict[str, Tensor]:
    """By name the weights (out, in) of a layer's linear maps, in the order of registration."""
    return {path: rows_in(each) for path, each in layer.named_modules() if isinstance(each, (nn.Linear, Conv1D))}


def _attention(layer: nn.Module) -> str:
    """The name of a layer's attention, the outermost module whose class says so. Empty where there is none."""
    names = (path for path, each in layer.named_modules() if path and "Attention" in type(each).__name__)
    return next(names, "")


def _layer_parts(name: str, layer: nn.Module, d_model: int, heads: int) -> tuple[str, str, int, bool]:
    attention, maps = _attention(layer), _maps(layer)
    inner = [type(each).__name__ for each in layer.children()]
    odd = next((each for each in inner if any(part in each for part in ("MoE", "Moe", "Expert", "SparseMlp"))), None)
    if not attention or odd:
        stands = odd or next((each for each in inner if "Norm" not in each), type(layer).__name__)
        raise UserError(f"{name} has a {stands} in its layers; {_CLASS}")
    back = {path for path, weight in maps.items() if weight.shape[0] == d_model}
    outs = [path for path in back if path.startswith(attention) and maps[path].shape[1] % heads == 0]
    downs = [path for path in back if not path.startswith(attention)]
    order = list(maps)
    out, down = max(outs, key=order.index, default=None), max(downs, key=order.index, default=None)
    if out is None or down is None:
        raise UserError(f"{name} has a {type(layer).__name__} without {'MLP' if out else 'heads'}; {_CLASS}")
    width = maps[down].shape[1]
    for path, inside in layer.named_modules():
        weight = getattr(inside, "weight", None)
        if "Norm" in type(inside).__name__ and weight is not None and tuple(weight.shape) == (width,) != (d_model,):
            raise UserError(f"{name} norms all neurons ({path}), also those that would be skipped; {_CLASS}")
    into = sum(weight.shape[0] for path, weight in maps.items() if path != down and path not in outs
               and not path.startswith(attention))  # fmt: skip
    return out, down, width, into >= 2 * width
