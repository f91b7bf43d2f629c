"""llama.cpp beside our engines: a child process that decodes a model of the same matrices, a token a line.

    python -m venv build/llama && build/llama/bin/pip install llama-cpp-python gguf     builds it, minutes
    python -m benchmarks.cpu_decode --shape 1.3b --stored int8 int4 --llama build/llama/bin/python
    python -m benchmarks.first_token --models 1.3b --formats int4 --llama build/llama/bin/python

The model is random and of an architecture that llama.cpp has: Llama's where MLPs are gated, else Arcee's, with squared
ReLU. It has OPT's matrices, and neither its biases nor its table of positions. Files are made once, in ``--folder``, by
llama.cpp's own quantisation.

    PYTHON benchmarks/beside_llama.py FILE THREADS CONTEXT    the child, which answers `prompt N` and `step` with a line
    PYTHON benchmarks/beside_llama.py FILE FORMAT SIZES       writes FILE
"""

import subprocess
import sys
from pathlib import Path
from typing import Any

FORMATS = {"q8_0": 7, "q4_0": 2, "q4_k_m": 15}  # numbers of llama.cpp's llama_ftype
HALF = 1  # that of fp16
SIZES = ("d_model", "d_ffn", "n_layers", "n_heads", "n_kv_heads", "head_dim", "vocab_size", "gated")


def add_options(parser: Any) -> None:
    """The options that name an interpreter, formats, and where llama.cpp's files lie."""
    parser.add_argument("--llama", help="an interpreter that has llama-cpp-python and gguf")
    parser.add_argument("--llama-formats", nargs="+", default=["q4_0"], choices=list(FORMATS))
    parser.add_argument("--folder", type=Path, default=Path("build/llama/models"), help="of llama.cpp's files")


class Llama:
    """A child that runs llama.cpp on a file of random weights of a shape, made first where it is not there."""

    def __init__(self, python: str, shape: Any, form: str, threads: int, context: int, folder: Path) -> None:
        numbers = ["x".join(str(int(getattr(shape, name))) for name in SIZES)]
        self.file = folder / f"{numbers[0]}-{form}.gguf"
        folder.mkdir(parents=True, exist_ok=True)
        if not self.file.exists():
            made = subprocess.run([python, __file__, str(self.file), form, *numbers], capture_output=True, text=True)
            if made.returncode:
                raise RuntimeError(made.stderr[-400:])
        command = [python, __file__, str(self.file), str(threads), str(context)]
        self.child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self.ask("ready")

    def ask(self, what: str) -> str:
        """One line there, one back."""
        assert self.child.stdin is not None and self.child.stdout is not None
        print(what, file=self.child.stdin, flush=True)
        answer = self.child.stdout.readline()
        if not answer:
            raise RuntimeError(f"llama.cpp ended at {what}")
        return answer

    def step(self) -> None:
        """One token behind those before."""
        self.ask("step")

    def prompt(self, n: int) -> None:
        """A new text of n tokens, as far as the token behind it."""
        self.ask(f"prompt {n}")


def write(file: Path, form: str, sizes: list[int]) -> None:
    """Write a file of random weights, in fp16 first, which is removed."""
    import gguf
    import llama_cpp
    import numpy as np

    d, f, layers, heads, kv, e, vocab, gated = sizes
    name, half, rng = "llama" if gated else "arcee", file.with_suffix(".f16"), np.random.default_rng(0)
    out = gguf.GGUFWriter(half, name, use_temp_file=True)
    out.add_context_length(4096), out.add_embedding_length(d), out.add_block_count(layers), out.add_vocab_size(vocab)
    out.add_feed_forward_length(f), out.add_head_count(heads), out.add_head_count_kv(kv), out.add_file_type(HALF)
    out.add_layer_norm_rms_eps(1e-5), out.add_rope_dimension_count(e), out.add_key_length(e), out.add_value_length(e)
    out.add_tokenizer_model("none")

    def matrix(tensor: str, *shape: int) -> None:
        out.add_tensor(f"{tensor}.weight", (0.02 * rng.standard_normal(shape, np.float32)).astype(np.float16))

    def norm(tensor: str) -> None:
        out.add_tensor(f"{tensor}.weight", np.ones(d, np.float32))

    matrix("token_embd", vocab, d)
    matrix("output", vocab, d)
    norm("output_norm")
    for i in range(layers):
        norm(f"blk.{i}.attn_norm")
        norm(f"blk.{i}.ffn_norm")
        for part, rows, columns in (
            ("attn_q", heads * e, d), ("attn_k", kv * e, d), ("attn_v", kv * e, d), ("attn_output", d, heads * e),
            ("ffn_up", f, d), ("ffn_down", d, f), *([("ffn_gate", f, d)] if gated else []),
        ):  # fmt: skip
            matrix(f"blk.{i}.{part}", rows, columns)
    out.write_header_to_file(), out.write_kv_data_to_file(), out.write_tensors_to_file(), out.close()
    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype = FORMATS[form]
    failed = llama_cpp.llama_model_quantize(str(half).encode(), str(file).encode(), options)
    half.unlink()
    if failed:
        raise SystemExit(f"llama.cpp does not write {form}")


def serve(file: Path, threads: int, context: int) -> None:
    """Answer lines of standard input."""
    import llama_cpp

    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(str(file).encode(), llama_cpp.llama_model_default_params())
    settings = llama_cpp.llama_context_default_params()
    settings.n_ctx, settings.n_threads, settings.n_threads_batch, settings.n_batch = context, threads, threads, context
    run, held = llama_cpp.llama_init_from_model(model, settings), [0]
    ids = (llama_cpp.llama_token * context)(*(7 + 31 * i % 20000 for i in range(context)))
    vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))

    def decode(n: int) -> None:
        at = llama_cpp.llama_batch_get_one(ids, n)
        if llama_cpp.llama_decode(run, at):
            raise SystemExit("llama_decode failed")
        logits = llama_cpp.llama_get_logits_ith(run, -1)
        held[0] = max(range(0, vocab, 997), key=lambda i: logits[i])

    for line in sys.stdin:
        what, *rest = line.split()
        if what == "prompt":
            llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(run), True)
            decode(int(rest[0]))
        elif what == "step":
            decode(1)
        print("done", flush=True)


if __name__ == "__main__":
    if sys.argv[2] in FORMATS:
        write(Path(sys.argv[1]), sys.argv[2], [int(number) for number in sys.argv[3].split("x")])
    else:
        serve(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
