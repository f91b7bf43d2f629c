"""Tiny random models of every family, with norms and biases of random numbers."""

from pathlib import Path

import torch
from conftest import save_tiny_tokenizer
from transformers import (
    ArceeConfig,
    BloomConfig,
    Cosmos3EdgeTextConfig,
    Jais2Config,
    LlamaConfig,
    MistralConfig,
    NanoChatConfig,
    NemotronConfig,
    NemotronHConfig,
    OPTConfig,
    PersimmonConfig,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from dejavu_train.families.published_classes import BambooConfig, MiniCPMConfig
from dejavu_train.models.load import load_model
from dejavu_train.sparse.model import SparseCausalLM

SIZES = {
    "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 6, "vocab_size": 320,
    "max_position_embeddings": 256, "initializer_range": 0.15, "bos_token_id": 2, "eos_token_id": 2, "pad_token_id": 1,
}  # fmt: skip
OPT_SIZES = {
    "hidden_size": 48, "ffn_dim": 96, "num_hidden_layers": 2, "num_attention_heads": 6, "vocab_size": 320,
    "max_position_embeddings": 256, "init_std": 0.15, "dropout": 0.0,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
CASES = {
    "llama": LlamaConfig(**SIZES, num_key_value_heads=2, hidden_act="relu", attention_bias=True, mlp_bias=True),
    "fatrelu": LlamaConfig(**SIZES, num_key_value_heads=3, hidden_act="fatrelu", hidden_act_param=0.2),
    "drelu": MistralConfig(**SIZES, num_key_value_heads=2, hidden_act="drelu", sliding_window=None),
    # AFM's positions. The class's defaults are other ones.
    "arcee": ArceeConfig(**SIZES, num_key_value_heads=2, rope_parameters=YARN),
    # Heads times their width, 6 x 16, are not the model's width.
    "nemotron": NemotronConfig(**SIZES, num_key_value_heads=2, head_dim=16, tie_word_embeddings=True),
    "jais2": Jais2Config(**SIZES, num_key_value_heads=6),
    "persimmon": PersimmonConfig(**SIZES),
    "nanochat": NanoChatConfig(**SIZES, num_key_value_heads=3, final_logit_softcapping=2.0),
    "cosmos": Cosmos3EdgeTextConfig(
        **SIZES, num_key_value_heads=2, head_dim=16,
        rope_parameters={"rope_type": "default", "rope_theta": 1e5, "mrope_section": [4, 2, 2]},
    ),
    "350m": OPTConfig(**OPT_SIZES, do_layer_norm_before=False, word_embed_proj_dim=24),
    "galactica": OPTConfig(
        **OPT_SIZES, word_embed_proj_dim=48, activation_function="gelu", enable_bias=False,
        layer_norm_elementwise_affine=False,
    ),
    "bamboo": BambooConfig(**SIZES, num_key_value_heads=2, hidden_act="relu", sliding_window=None),
    "minicpm": MiniCPMConfig(
        **SIZES, num_key_value_heads=2, hidden_act="fatrelu", hidden_act_param=0.2, scale_emb=12, scale_depth=1.4,
        dim_model_base=16,
    ),
    # Six heads: slopes of a number that is no power of two, as in BLOOM-176B, which has 112.
    "bloom": BloomConfig(
        vocab_size=320, hidden_size=48, n_layer=2, n_head=6, bos_token_id=2, eos_token_id=2, pad_token_id=1,
        seq_length=256, initializer_range=0.15,
    ),
}  # fmt: skip

# Least time steps near zero: transformers keeps them over a prompt alone, so that a text's tokens one by one differ.
HYBRIDS = {
    "nemotron_h": NemotronHConfig(
        vocab_size=320, hidden_size=48, hybrid_override_pattern="M-M*-ME-", num_attention_heads=6,
        num_key_value_heads=2, head_dim=8, intermediate_size=96, max_position_embeddings=256, ssm_state_size=16,
        mamba_num_heads=8, mamba_head_dim=12, n_groups=2, chunk_size=16, n_routed_experts=4, moe_intermediate_size=40,
        moe_shared_expert_intermediate_size=96, initializer_range=0.15, time_step_min=1e-7, time_step_floor=1e-7,
        bos_token_id=2, eos_token_id=2, pad_token_id=1,
    )
}  # fmt: skip
"""Families that have layers without a target. No engine runs them."""


def random_family(name: str, **overrides):
    """A model of a name of ``CASES`` or ``HYBRIDS``. overrides: of its configuration, those that it has."""
    config = {**CASES, **HYBRIDS}[name]
    known = config.to_dict()
    config = type(config).from_dict({**known, **{key: value for key, value in overrides.items() if key in known}})
    torch.manual_seed(0)
    model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config).eval()
    with torch.no_grad():  # whatever is ones or zeros at first would hide what is left out
        for part, parameter in model.named_parameters():
            if "norm" in part or "bias" in part or "ln_f" in part:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def save_family(name: str, folder: Path, **overrides) -> Path:
    """Saves that model, with a tokenizer."""
    save_tiny_tokenizer(folder)
    random_family(name, **overrides).save_pretrained(folder)
    return folder


def sparse(folder: Path, bundle, backend: str, sparse_from=0, **options):
    """The model of a folder through a backend. The engine triton takes reference operations."""
    ops = {"ops": "reference"} if backend == "triton" else {}
    model = load_model(str(folder))
    return SparseCausalLM.from_model(model, bundle, backend, sparse_from=sparse_from, **ops, **options)


def padded(columns=12, seed=0):
    """Two rows, the first with padding on the left."""
    ids = torch.randint(3, 300, (2, columns), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    ids[0, :5], mask[0, :5] = 1, 0
    return {"input_ids": ids, "attention_mask": mask}
