"""The models that pretraining makes: the values of their config.json, by family and sizes."""

from collections.abc import Callable
from typing import Any

from transformers import PreTrainedModel

from dejavu_train.data.tokens import START_TOKEN
from dejavu_train.families.opt import OPT
from dejavu_train.ground.errors import UserError
from dejavu_train.models.load import random_model

L1 = 0.2  # of families whose activation gives zeros
_PAD = 1

Sizes = dict[str, int]
"""``vocab_size``, ``d_model``, ``n_layers``, ``n_heads``, ``d_ffn`` and ``max_positions``."""


def _opt(sizes: Sizes) -> dict[str, Any]:
    return {
        "model_type": OPT,
        "hidden_size": sizes["d_model"],
        "word_embed_proj_dim": sizes["d_model"],
        "ffn_dim": sizes["d_ffn"],
        "num_hidden_layers": sizes["n_layers"],
        "num_attention_heads": sizes["n_heads"],
        "max_position_embeddings": sizes["max_positions"],
        "do_layer_norm_before": True,
        "activation_function": "relu",
        "dropout": 0.0,
        "init_std": 0.02,
    }


def _standard(model_type: str, activation: str) -> Callable[[Sizes], dict[str, Any]]:
    """Families whose keys are called as Llama's."""

    def values(sizes: Sizes) -> dict[str, Any]:
        return {
            "model_type": model_type,
            "hidden_act": activation,
            "hidden_size": sizes["d_model"],
            "intermediate_size": sizes["d_ffn"],
            "num_hidden_layers": sizes["n_layers"],
            "num_attention_heads": sizes["n_heads"],
            "num_key_value_heads": sizes["n_heads"],
            "head_dim": sizes["d_model"] // sizes["n_heads"],
            "max_position_embeddings": sizes["max_positions"],
            "initializer_range": 0.02,
        }

    return values


def _bloom(sizes: Sizes) -> dict[str, Any]:
    if sizes["d_ffn"] != 4 * sizes["d_model"]:
        raise UserError(f"a BLOOM has 4 x d_model = {4 * sizes['d_model']} neurons, got --d_ffn {sizes['d_ffn']}")
    return {
        "model_type": "bloom",
        "hidden_size": sizes["d_model"],
        "n_layer": sizes["n_layers"],
        "n_head": sizes["n_heads"],
        "seq_length": sizes["max_positions"],
        "initializer_range": 0.02,
    }


_VALUES: dict[str, Callable[[Sizes], dict[str, Any]]] = {
    "opt": _opt,
    "arcee": _standard("arcee", "relu2"),
    "llama-relu": _standard("llama", "relu"),
    "llama-drelu": _standard("llama", "drelu"),
    "bloom": _bloom,
}


def default_l1(family: str) -> float:
    """The weight of the L1 penalty where none is given: none for GELU, which gives no zeros."""
    return 0.0 if family == "bloom" else L1


def random_of(family: str, sizes: Sizes) -> PreTrainedModel:
    """A random model with embeddings tied to the LM head.

    Raises:
        UserError: sizes that the family does not have.
    """
    ids = {"bos_token_id": START_TOKEN, "eos_token_id": START_TOKEN, "pad_token_id": _PAD}
    values = _VALUES[family](sizes)
    return random_model({"vocab_size": sizes["vocab_size"], "tie_word_embeddings": True, **ids, **values})
