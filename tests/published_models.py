"""Tiny random checkpoints in exactly the form in which they are published, and their own code spelled out in torch.

Keys of configurations, names of tensors and what the code computes are facts of ``families/published.py``'s sources.
Nothing of this package is used to write or compute them.
"""

import json
import math
from pathlib import Path

import torch
from conftest import save_tiny_tokenizer
from safetensors.torch import save_file
from torch.nn import functional as F

_SIZES = {
    "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 6, "vocab_size": 320,
    "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.02,
    "torch_dtype": "float32", "use_cache": True,
}  # fmt: skip


def _remote(config: str, model: str, file: str) -> dict:
    return {
        "auto_map": {
            "AutoConfig": f"configuration_{file}.{config}",
            "AutoModel": f"modeling_{file}.{model.replace('ForCausalLM', 'Model')}",
            "AutoModelForCausalLM": f"modeling_{file}.{model}",
        },
        "architectures": [model],
    }


CONFIGS = {
    "prosparse": {
        **_SIZES, **_remote("SparseLlamaConfig", "SparseLlamaForCausalLM", "sparsellama"),
        "model_type": "sparsellama", "hidden_act": "fatrelu", "hidden_act_param": 0.01, "num_key_value_heads": 6,
        "attention_bias": False, "attention_dropout": 0.0, "pretraining_tp": 1, "rms_norm_eps": 1e-5,
        "rope_scaling": None, "rope_theta": 10000.0, "tie_word_embeddings": False, "pad_token_id": 0,
    },
    "sparselm": {
        **_SIZES, **_remote("SparseLlamaConfig", "SparseLlamaForCausalLM", "sparse"),
        "model_type": "llama_sparse_relu", "hidden_act": "silu", "num_key_value_heads": 6, "head_dim": 8,
        "attention_bias": False, "attention_dropout": 0.0, "is_llama_config": True, "mlp_bias": False,
        "pretraining_tp": 1, "rms_norm_eps": 1e-5, "rope_interleaved": False, "rope_scaling": None,
        "rope_theta": 100000, "tie_word_embeddings": True, "sparsity_gated_mlp": True, "sparsity_l1_coeff": 3e-4,
        "sparsity_new_intermediate_size": 96, "sparsity_reinitialize": True, "sparsity_tokens_until_dead": None,
        "sparsity_mlp_execution_logic": "training", "sparsity_do_track": True, "sparsity_use_hybrid_kernel": False,
    },
    "bamboo": {
        **_SIZES, **_remote("BambooConfig", "BambooForCausalLM", "bamboo"),
        "model_type": "bamboo", "hidden_act": "relu", "num_key_value_heads": 2, "attention_dropout": 0.0,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "sliding_window": 256, "tie_word_embeddings": False,
    },
    "minicpm": {
        **_SIZES, **_remote("MiniCPMConfig", "MiniCPMForCausalLM", "minicpm"),
        "model_type": "minicpm", "hidden_act": "fatrelu", "hidden_act_param": 0.03, "num_key_value_heads": 3,
        "rms_norm_eps": 1e-5, "rope_scaling": None, "scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 16,
    },
}  # fmt: skip
CONFIGS["minicpm untied"] = {**CONFIGS["minicpm"], "tie_word_embeddings": False}
EXTRA = {
    "sparselm": {"tracker.last_activated": (3, 96), "metrics_accumulator.counts": (4,)},
    "bamboo": {
        f"model.layers.{layer}.mlp.predictor.{name}.weight": size
        for layer in range(3)
        for name, size in (("fc1", (12, 48)), ("fc2", (96, 12)))
    },
}


def published_tensors(name: str, **sizes: int) -> dict[str, torch.Tensor]:
    """By the names in its files random tensors of one of ``CONFIGS``."""
    config = {**CONFIGS[name], **sizes}
    d, n = config["hidden_size"], config["intermediate_size"]
    kv = d // config["num_attention_heads"] * config["num_key_value_heads"]
    generator = torch.Generator().manual_seed(0)
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], d), "model.norm.weight": (d,)}
    for layer in range(config["num_hidden_layers"]):
        own = {f"self_attn.{part}_proj": (d, d) for part in "qo"} | {f"self_attn.{part}_proj": (kv, d) for part in "kv"}
        own |= {"mlp.gate_proj": (n, d), "mlp.up_proj": (n, d), "mlp.down_proj": (d, n)}
        own |= dict.fromkeys(("input_layernorm", "post_attention_layernorm"), (d,))
        shapes |= {f"model.layers.{layer}.{part}.weight": size for part, size in own.items()}
    if not config.get("tie_word_embeddings", config["model_type"] == "minicpm"):
        shapes["lm_head.weight"] = (config["vocab_size"], d)
    made = {part: 0.15 * torch.randn(size, generator=generator) for part, size in shapes.items()}
    made |= {part: 1 + 2 * each for part, each in made.items() if "norm" in part}
    return made | {part: torch.randn(size, generator=generator) for part, size in EXTRA.get(name, {}).items()}


def save_published(name: str, folder: Path, files: int = 2, **sizes: int) -> Path:
    """Writes such a checkpoint with a tokenizer, its weights in so many files."""
    folder.mkdir(parents=True, exist_ok=True)
    save_tiny_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps({**CONFIGS[name], **sizes}))
    tensors = published_tensors(name, **sizes)
    where = {part: f"model-{i % files + 1:05d}-of-{files:05d}.safetensors" for i, part in enumerate(tensors)}
    for file in set(where.values()):
        save_file({part: tensors[part] for part in tensors if where[part] == file}, folder / file, {"format": "pt"})
    index = {"metadata": {"total_size": sum(each.nbytes for each in tensors.values())}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def published_logits(name: str, ids: torch.Tensor, tensors: dict[str, torch.Tensor] | None = None) -> torch.Tensor:
    """(B, T, V), what its own code gives for ids (B, T), with no padding. Bamboo's without its own predictors."""
    config, tensors = CONFIGS[name], published_tensors(name) if tensors is None else tensors
    kind, heads, d = config["model_type"], config["num_attention_heads"], config["hidden_size"]
    width, length = d // heads, ids.shape[1]
    inverse = 1.0 / config.get("rope_theta", 10000.0) ** (torch.arange(0, width, 2) / width)
    angles = torch.outer(torch.arange(length).float(), inverse).repeat(1, 2)
    causal = torch.full((length, length), -math.inf).triu(1)

    def norm(x, part):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + config["rms_norm_eps"]) * tensors[f"{part}.weight"]

    def split(x):
        return x.unflatten(-1, (-1, width)).transpose(1, 2)

    def turn(x):
        half = torch.cat([-x[..., width // 2 :], x[..., : width // 2]], -1)
        return x * angles.cos() + half * angles.sin()

    def gate(x, up):
        if kind == "bamboo":
            return F.relu(x) * F.relu(up)
        return (F.relu(x) if kind == "llama_sparse_relu" else F.threshold(x, config["hidden_act_param"], 0.0)) * up

    added = config["scale_depth"] / math.sqrt(config["num_hidden_layers"]) if kind == "minicpm" else 1.0
    hidden = tensors["model.embed_tokens.weight"][ids] * config.get("scale_emb", 1)
    for layer in range(config["num_hidden_layers"]):
        own = f"model.layers.{layer}"
        x = norm(hidden, f"{own}.input_layernorm")
        q, k, v = (split(x @ tensors[f"{own}.self_attn.{part}_proj.weight"].T) for part in "qkv")
        q, k, v = turn(q), *(each.repeat_interleave(heads // each.shape[1], 1) for each in (turn(k), v))
        mixed = ((q @ k.transpose(-1, -2) / math.sqrt(width) + causal).softmax(-1) @ v).transpose(1, 2).flatten(2)
        hidden = hidden + mixed @ tensors[f"{own}.self_attn.o_proj.weight"].T * added
        x = norm(hidden, f"{own}.post_attention_layernorm")
        neurons = gate(*(x @ tensors[f"{own}.mlp.{part}_proj.weight"].T for part in ("gate", "up")))
        hidden = hidden + neurons @ tensors[f"{own}.mlp.down_proj.weight"].T * added
    hidden = norm(hidden, "model.norm")
    if kind == "minicpm":
        hidden = hidden / (d / config["dim_model_base"])
    return hidden @ tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"]).T
