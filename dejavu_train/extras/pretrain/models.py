"""The models that pretraining makes: the values of their config.json, by family and sizes."""

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedModel

from dejavu_train.data.tokens import START_TOKEN
from dejavu_train.families.opt import OPT
from dejavu_train.ground.errors import UserError
from dejavu_train.models.load import random_model

L1 = 0.2  # of families whose activation gives zeros
_PAD = 1

# Type and activation of families whose keys are called as Llama's.
_AS_LLAMA = {"arcee": ("arcee", "relu2"), "llama-relu": ("llama", "relu"), "llama-drelu": ("llama", "drelu")}
_HYBRID = "M-M*-ME-"  # layers of a Nemotron-H, over and over


def default_l1(family: str) -> float:
    """The weight of the L1 penalty where none is given: none for GELU, which gives no zeros."""
    return 0.0 if family == "bloom" else L1


def random_of(family: str, sizes: Mapping[str, int]) -> PreTrainedModel:
    """A random model with embeddings tied to the LM head.

    Args:
        sizes: ``vocab_size``, ``d_model``, ``n_layers``, ``n_heads``, ``d_ffn`` and ``max_positions``.
    Raises:
        UserError: sizes that the family does not have.
    """
    return random_model(config_values(family, sizes))


def config_values(family: str, sizes: Mapping[str, int]) -> dict[str, Any]:
    """Values of config.json. Raises as :func:`random_of`."""
    d, n, heads = sizes["d_model"], sizes["d_ffn"], sizes["n_heads"]
    shared = {
        "vocab_size": sizes["vocab_size"], "hidden_size": d, "tie_word_embeddings": True,
        "bos_token_id": START_TOKEN, "eos_token_id": START_TOKEN, "pad_token_id": _PAD,
    }  # fmt: skip
    usual = {
        "num_hidden_layers": sizes["n_layers"], "num_attention_heads": heads,
        "max_position_embeddings": sizes["max_positions"],
    }  # fmt: skip
    if family == "opt":
        own = usual | {
            "model_type": OPT, "word_embed_proj_dim": d, "ffn_dim": n, "do_layer_norm_before": True,
            "activation_function": "relu", "dropout": 0.0, "init_std": 0.02,
        }  # fmt: skip
    elif family == "bloom":
        if n != 4 * d:
            raise UserError(f"a BLOOM has 4 x d_model = {4 * d} neurons, got --d_ffn {n}")
        own = {
            "model_type": "bloom", "n_layer": sizes["n_layers"], "n_head": heads,
            "seq_length": sizes["max_positions"], "initializer_range": 0.02,
        }  # fmt: skip
    elif family == "nemotron-h":  # a quarter of its experts' neurons are shared ones; its class ties nothing
        layers = (_HYBRID * sizes["n_layers"])[: sizes["n_layers"]]
        own = usual | {
            "model_type": "nemotron_h", "hybrid_override_pattern": layers, "tie_word_embeddings": False,
            "intermediate_size": n, "num_key_value_heads": heads, "head_dim": d // heads, "mamba_num_heads": 2 * heads,
            "mamba_head_dim": d // heads, "n_groups": 2, "ssm_state_size": 64, "chunk_size": 64, "n_routed_experts": 4,
            "moe_intermediate_size": n // 4, "moe_shared_expert_intermediate_size": n,
        }  # fmt: skip
    else:
        kind, activation = _AS_LLAMA[family]
        own = usual | {
            "model_type": kind, "hidden_act": activation, "intermediate_size": n, "num_key_value_heads": heads,
            "head_dim": d // heads, "initializer_range": 0.02,
        }  # fmt: skip
    return shared | own
