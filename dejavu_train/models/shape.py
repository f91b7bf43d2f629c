"""The sizes of an OPT, read from its config.json without loading torch: what can be checked of a run at once."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dejavu_train.errors import UserError
from dejavu_train.models.hub import model_folder

TARGETS = ("mlp", "heads")
INT4 = "dejavu_int4"  # quant_method of a config.json whose weights lie as 4-bit rows, see int4.py
CONVERTED = ("gptq", "awq", "compressed-tensors", "bitsandbytes")  # quant_methods that `quantize` reads
OPT = "opt"
SPARSE_OPT = "dejavu_sparse_opt"  # model_type of an OPT with its bundle, saved together: no one takes it for the OPT

# What a config.json may leave out, as transformers' OPTConfig fills it in. word_embed_proj_dim: as hidden_size.
_DEFAULTS: dict[str, Any] = {
    "model_type": OPT,
    "vocab_size": 50272,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "ffn_dim": 3072,
    "max_position_embeddings": 2048,
    "do_layer_norm_before": True,
    "word_embed_proj_dim": None,
    "num_attention_heads": 12,
    "activation_function": "relu",
}

_SIZES = (
    "hidden_size", "ffn_dim", "num_hidden_layers", "num_attention_heads", "vocab_size", "max_position_embeddings"
)  # fmt: skip
_LARGEST = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class OPTShape:
    """The sizes of a pre-norm OPT."""

    d_model: int
    d_ffn: int
    n_layers: int
    n_heads: int
    vocab_size: int
    max_positions: int

    @property
    def head_dim(self) -> int:
        return self.d_model // self.n_heads

    def has_layers_of(self, other: "OPTShape") -> bool:
        """Whether layers are of the same number and sizes; vocabulary and positions may differ."""
        return all(getattr(self, n) == getattr(other, n) for n in ("d_model", "d_ffn", "n_layers", "n_heads"))

    @classmethod
    def from_config(cls, config: Any, name: str = "this model") -> "OPTShape":
        """Take the sizes from a Hugging Face config; raises as :meth:`from_values`."""
        return cls.from_values({key: getattr(config, key) for key in _DEFAULTS if hasattr(config, key)}, name)

    @classmethod
    def from_values(cls, given: Mapping[str, Any], name: str = "this model") -> "OPTShape":
        """Take the sizes from the values of a config.json.

        Raises:
            UserError: not an OPT, a post-norm OPT (such as facebook/opt-350m), or an activation other than ReLU.
        """
        values = {**_DEFAULTS, **given}
        if values["model_type"] not in (OPT, SPARSE_OPT):
            raise UserError(f"{name} is of type {values['model_type']}; only OPT models are supported")
        if not values["do_layer_norm_before"] or values["word_embed_proj_dim"] not in (None, values["hidden_size"]):
            raise UserError(
                f"{name} is a post-norm OPT (do_layer_norm_before false, or word_embed_proj_dim other than"
                " hidden_size, as facebook/opt-350m); use a pre-norm size such as facebook/opt-125m"
            )
        if values["activation_function"] != "relu":
            raise UserError(
                f"{name} uses the activation {values['activation_function']}; contextual sparsity here needs relu"
            )
        sizes = {key: values[key] for key in _SIZES}
        for key, size in sizes.items():
            if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size <= _LARGEST:
                raise UserError(f"{key} of {name} must be a whole number of at least 1, got {size!r}")
        if values["hidden_size"] % values["num_attention_heads"]:
            raise UserError(
                f"{name} has the hidden_size {values['hidden_size']}, which its {values['num_attention_heads']}"
                " num_attention_heads do not divide; give the config that belongs to the weights"
            )
        return cls(
            d_model=values["hidden_size"],
            d_ffn=values["ffn_dim"],
            n_layers=values["num_hidden_layers"],
            n_heads=values["num_attention_heads"],
            vocab_size=values["vocab_size"],
            max_positions=values["max_position_embeddings"],
        )

    def units(self, target: str) -> int:
        """How many units a predictor of ``target`` (``mlp`` or ``heads``) chooses from."""
        return self.d_ffn if target == "mlp" else self.n_heads


def read_shape(name: str, revision: str | None = None) -> OPTShape:
    """The sizes of the model ``name``, a folder or hub id.

    Raises:
        UserError: nothing there, or as :meth:`OPTShape.from_values`.
    """
    return OPTShape.from_values(read_values(name, revision), name)


def read_values(name: str, revision: str | None = None) -> dict[str, Any]:
    """What the config.json of the model ``name``, a folder or hub id, holds.

    Raises:
        UserError: nothing there, or no model type in it.
    """
    values = config_values(model_folder(name, revision=revision))
    if "model_type" not in values:
        raise UserError(f"the config.json of {name} names no model_type; only OPT models are supported")
    return values


def quant_method(values: Mapping[str, Any]) -> str | None:
    """By what method the weights of a config.json are quantised; None: they are not."""
    found = values.get("quantization_config")
    return str(found.get("quant_method", "unknown")) if isinstance(found, dict) else None


def refuse_foreign(values: Mapping[str, Any], name: str) -> None:
    """Raise :class:`UserError` for weights that were quantised by another method than this package's, or in a width of
    codes that it does not write."""
    method = quant_method(values)
    if method in CONVERTED:
        raise UserError(
            f"the weights of {name} are quantised by {method}; convert them first: python -m dejavu_train.quantize"
            f" --model {name} --output FOLDER --quantizer rtn"
        )
    refuse_unread(values, name)


def refuse_unread(values: Mapping[str, Any], name: str) -> None:
    """The same for weights that ``quantize`` does not convert either."""
    method = quant_method(values)
    if method not in (None, INT4, *CONVERTED):
        raise UserError(
            f"the weights of {name} are quantised by {method}, which is not read here; give the model that they were"
            f" made of, or one quantised by {', '.join(CONVERTED)}"
        )
    bits = values["quantization_config"].get("bits", 4) if method == INT4 else 4
    if bits != 4:
        raise UserError(
            f"config.json of {name} says {bits} bits under quantization_config, {INT4} has 4; take that file from where"
            " the weights are from"
        )


def config_values(folder: Path) -> dict[str, Any]:
    """What the config.json of a folder holds.

    Raises:
        UserError: it cannot be read, or is no mapping.
    """
    try:
        values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"cannot read the config of {folder}: {error}") from None
    if not isinstance(values, dict):
        raise UserError(f"cannot read the config of {folder}: config.json must hold keys and values")
    return values
