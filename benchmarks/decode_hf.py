"""Times decoding by Hugging Face transformers, with random weights of a true shape."""

from itertools import pairwise
from typing import Any

import torch
from transformers import ArceeConfig, AutoModelForCausalLM, BloomConfig, LlamaConfig, NemotronConfig, OPTConfig

from dejavu_train.evaluation.timing import Clock
from dejavu_train.families import ModelDims


def random_model(name: str, shape: ModelDims, device: str = "cuda", dtype: torch.dtype = torch.float16) -> Any:
    """A model with the weights that transformers gives a new one. name: of a shape, of which family it is."""
    sizes = {
        "vocab_size": shape.vocab_size, "hidden_size": shape.d_model, "num_hidden_layers": shape.n_layers,
        "num_attention_heads": shape.n_heads, "max_position_embeddings": shape.max_positions,
        "dtype": str(dtype).removeprefix("torch."),
    }  # fmt: skip
    more = {
        "intermediate_size": shape.d_ffn, "num_key_value_heads": shape.n_kv_heads, "head_dim": shape.head_dim,
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    }  # fmt: skip
    kind = name.split("-")[0]
    config: Any
    if kind == "afm":
        config = ArceeConfig(**sizes, **more)
    elif kind in ("minitron", "nemotron"):
        config = NemotronConfig(**sizes, **more, partial_rotary_factor=shape.rotary_share)
    elif kind == "prosparse":
        config = LlamaConfig(**sizes, **more, hidden_act="relu")
    elif kind == "bloom":
        config = BloomConfig(**sizes, n_layer=shape.n_layers, n_head=shape.n_heads)
    else:
        config = OPTConfig(
            **sizes, word_embed_proj_dim=shape.embedding_dim, ffn_dim=shape.d_ffn,
            do_layer_norm_before=not shape.post_norm,
        )  # fmt: skip
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return AutoModelForCausalLM.from_config(config).eval()
    finally:
        torch.set_default_dtype(torch.float32)


def hugging_face(name: str, shape: ModelDims, static: bool, prompt: int, batch: int, steps: int) -> list[float]:
    """Milliseconds between tokens of transformers' generate(): a growing cache, or a static one, which it compiles.

    The second call is timed, so that compiling and recording graphs are over. Its first tokens are left out.
    """
    model = random_model(name, shape)
    torch.manual_seed(0)
    ids = torch.randint(3, shape.vocab_size, (batch, prompt)).to(model.device)
    options: dict[str, Any] = {"cache_implementation": "static"} if static else {}
    for _ in range(2):
        clock = Clock()
        model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=steps + 10, min_new_tokens=steps + 10,
            do_sample=False, pad_token_id=1, streamer=clock if batch == 1 else None, **options,
        )  # fmt: skip
    return [1e3 * (b - a) for a, b in pairwise(clock.times)][10:]
