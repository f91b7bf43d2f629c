"""Times decoding by Hugging Face transformers, with random weights of a true shape."""

import time
from typing import Any

import torch
from transformers import OPTConfig, OPTForCausalLM
from transformers.generation.streamers import BaseStreamer

from dejavu_train.families import ModelDims


class Clock(BaseStreamer):
    """A streamer that notes when each token came."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass

    def between(self) -> list[float]:
        """Milliseconds between tokens."""
        return [1e3 * (b - a) for a, b in zip(self.times, self.times[1:], strict=False)]


def random_opt(shape: ModelDims, device: str = "cuda", dtype: torch.dtype = torch.float16) -> OPTForCausalLM:
    """A model with the weights that transformers gives a new one."""
    config = OPTConfig(
        vocab_size=shape.vocab_size, hidden_size=shape.d_model, word_embed_proj_dim=shape.d_model,
        ffn_dim=shape.d_ffn, num_hidden_layers=shape.n_layers, num_attention_heads=shape.n_heads,
        max_position_embeddings=shape.max_positions, do_layer_norm_before=True,
        dtype=str(dtype).removeprefix("torch."),
    )  # fmt: skip
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return OPTForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(torch.float32)


def hugging_face(shape: ModelDims, static: bool, prompt: int, batch: int, steps: int) -> list[float]:
    """Milliseconds between tokens of transformers' generate(): a growing cache, or a static one, which it compiles.

    The second call is timed, so that compiling and recording graphs are over. Its first tokens are left out.
    """
    model = random_opt(shape)
    ids = torch.randint(3, shape.vocab_size, (batch, prompt), device="cuda")
    options: dict[str, Any] = {"cache_implementation": "static"} if static else {}
    for _ in range(2):
        clock = Clock()
        model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=steps + 10, min_new_tokens=steps + 10,
            do_sample=False, pad_token_id=1, streamer=clock if batch == 1 else None, **options,
        )  # fmt: skip
    return clock.between()[10:]
