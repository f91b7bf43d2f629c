"""llama.cpp beside our engines: a Llama of random weights with about as many bytes, in Q8_0, by packages with wheels.

    pip install --target FOLDER xllamacpp gguf        and PYTHONPATH=FOLDER for `benchmarks.cpu_decode --rivals llama`

Q8_0 holds 32 codes of 8 bits and an fp16 scale. A Llama has three matrices a feed-forward block where OPT has two, so
its blocks are narrower: 8/3 of d_model instead of 4. Times are llama.cpp's own, of tokens behind a cached prompt.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from dejavu_train.models.opt import OPTShape

BLOCK = 32  # columns of Q8_0 that share a scale
BLOCK_BYTES = BLOCK + 2
TOKENS = 6  # of one call


def feed_forward(shape: OPTShape) -> int:
    """The width of the Llama's feed-forward block, in whole blocks."""
    return -(-2 * shape.d_ffn // 3 // BLOCK) * BLOCK


def bytes_per_token(shape: OPTShape) -> int:
    """Bytes of all matrices that a token needs."""
    d = shape.d_model
    weights = shape.n_layers * (4 * d * d + 3 * d * feed_forward(shape)) + shape.vocab_size * d
    return weights // BLOCK * BLOCK_BYTES


def write_llama(path: Path, shape: OPTShape, seed: int = 0) -> None:
    """A Llama of random codes as a GGUF file; its tokens are words without meaning."""
    import gguf

    d, width, vocab = shape.d_model, feed_forward(shape), shape.vocab_size
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(shape.max_positions)
    writer.add_embedding_length(d)
    writer.add_block_count(shape.n_layers)
    writer.add_feed_forward_length(width)
    writer.add_head_count(shape.n_heads)
    writer.add_head_count_kv(shape.n_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(d // shape.n_heads)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([b"<unk>", b"<s>", b"</s>", *(f"w{i}".encode() for i in range(3, vocab))])
    writer.add_token_scores([0.0] * vocab)
    writer.add_token_types(
        [gguf.TokenType.UNKNOWN] + [gguf.TokenType.CONTROL] * 2 + [gguf.TokenType.NORMAL] * (vocab - 3)
    )
    generator = np.random.default_rng(seed)

    def add(name: str, n: int, columns: int) -> None:
        blocks = generator.integers(0, 256, (n, columns // BLOCK, BLOCK_BYTES), dtype=np.uint8)
        blocks[..., :2] = np.frombuffer(np.float16(0.02 / 64).tobytes(), np.uint8)
        writer.add_tensor(name, blocks.reshape(n, -1), raw_dtype=gguf.GGMLQuantizationType.Q8_0)

    add("token_embd.weight", vocab, d)
    add("output.weight", vocab, d)
    writer.add_tensor("output_norm.weight", np.ones(d, np.float32))
    for layer in range(shape.n_layers):
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.ones(d, np.float32))
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            add(f"blk.{layer}.{name}.weight", d, d)
        for name, rows, columns in (("gate", width, d), ("up", width, d), ("down", d, width)):
            add(f"blk.{layer}.ffn_{name}.weight", rows, columns)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def llama_step(shape: OPTShape, prompt: list[int], threads: int) -> Callable[[], float]:
    """A function that decodes TOKENS tokens and returns the seconds of one. The file is removed once it is read."""
    import xllamacpp

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "llama.gguf"
        write_llama(path, shape)
        parameters: Any = xllamacpp.CommonParams()
        parameters.model.path, parameters.n_ctx, parameters.n_parallel = str(path), 2 * len(prompt), 1
        parameters.cpuparams.n_threads, parameters.warmup, parameters.verbosity = threads, False, 0
        parameters.load_mode = xllamacpp.llama_load_mode.LLAMA_LOAD_MODE_NONE  # a copy, not a map of the file
        server = xllamacpp.Server(parameters)

    def step() -> float:
        asked = {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "cache_prompt": True}
        told = server.handle_completions(asked)["timings"]
        return 1e-3 * told["predicted_ms"] / (told["predicted_n"] - 1)  # the first is the prompt's

    return step
