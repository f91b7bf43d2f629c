"""Writes a random OPT of a real model's shape in fp16 shards, a file for each layer, made on a GPU where there is one.

    python -m benchmarks.random_opt --shape 6.7b --output FOLDER

Matrices are normal with deviation 0.02; by its bias a neuron is active for about a fifth of the tokens. The tokenizer
is that of --tokenizer, whose entries are fewer than the vocabulary's; text that the model writes is known by its ids.
"""

import argparse
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import OPTConfig

from dejavu_train.models.shape import OPTShape
from dejavu_train.models.stored import INDEX

SHAPES = {
    "tiny": OPTShape(64, 256, 2, 2, 9000, 600),
    "1.3b": OPTShape(2048, 8192, 24, 32, 50272, 2048),
    "6.7b": OPTShape(4096, 16384, 32, 32, 50272, 2048),
    "30b": OPTShape(7168, 28672, 48, 56, 50272, 2048),
}


def layer_tensors(shape: OPTShape, device: str) -> dict[str, Tensor]:
    """Of one decoder layer, by their names within it."""
    d, n = shape.d_model, shape.d_ffn
    linear = {f"self_attn.{name}_proj": (d, d) for name in ("q", "k", "v", "out")} | {"fc1": (n, d), "fc2": (d, n)}
    made = {}
    for name, size in linear.items():
        made[f"{name}.weight"] = torch.randn(size, dtype=torch.float16, device=device) * 0.02
        made[f"{name}.bias"] = torch.full((size[0],), -0.84 * 0.02 * d**0.5 if name == "fc1" else 0.0).half()
    for norm in ("self_attn_layer_norm", "final_layer_norm"):
        made |= {f"{norm}.weight": torch.ones(d).half(), f"{norm}.bias": torch.zeros(d).half()}
    return made


def write(shape: OPTShape, folder: Path, tokenizer: Path, device: str) -> None:
    folder.mkdir(parents=True)
    where: dict[str, str] = {}

    def save(tensors: dict[str, Tensor], name: str) -> None:
        save_file({key: tensor.cpu() for key, tensor in tensors.items()}, folder / name, metadata={"format": "pt"})
        where.update(dict.fromkeys(tensors, name))

    d = shape.d_model
    sizes = {"embed_tokens": shape.vocab_size, "embed_positions": shape.max_positions + 2}
    ends = {f"{name}.weight": torch.randn(rows, d, dtype=torch.float16) * 0.02 for name, rows in sizes.items()}
    ends |= {"final_layer_norm.weight": torch.ones(d).half(), "final_layer_norm.bias": torch.zeros(d).half()}
    save({f"model.decoder.{name}": tensor for name, tensor in ends.items()}, "model-ends.safetensors")
    for layer in range(shape.n_layers):
        tensors = layer_tensors(shape, device)
        prefix = f"model.decoder.layers.{layer}."
        save({prefix + name: tensor for name, tensor in tensors.items()}, f"model-{layer:05d}.safetensors")
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))
    config = OPTConfig(
        vocab_size=shape.vocab_size, hidden_size=d, word_embed_proj_dim=d, ffn_dim=shape.d_ffn,
        num_hidden_layers=shape.n_layers, num_attention_heads=shape.n_heads,
        max_position_embeddings=shape.max_positions, architectures=["OPTForCausalLM"], dtype="float16",
    )  # fmt: skip
    config.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, folder)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="6.7b")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, default=Path("checkpoints/opt-mini"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(argv)
    torch.manual_seed(0)
    write(SHAPES[options.shape], options.output, options.tokenizer, options.device)


if __name__ == "__main__":
    main()
