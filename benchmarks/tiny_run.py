"""A run of train.py that takes seconds, for the benchmarks that disturb it: its model, its text, its flags."""

import multiprocessing
import os
import random
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dejavu_train.extras.pretrain.run import PretrainConfig, make_model, train_tokenizer

WORDS = "the model reads a token and each layer keeps those rows that matter for it while memory traffic falls".split()


def make_inputs(folder: Path) -> tuple[Path, Path]:
    """A random OPT of two layers with a tokenizer, and 250 KB of text."""
    draw = random.Random(0)
    paragraphs = [" ".join(draw.choices(WORDS, k=60)) + "." for _ in range(800)]
    text, model = folder / "text.txt", folder / "model"
    text.write_text("\n\n".join(paragraphs))
    tokenizer = train_tokenizer(paragraphs[:100], vocab_size=320)
    tokenizer.save_pretrained(model)
    config = PretrainConfig(str(model), (), d_model=32, n_layers=2, n_heads=4, d_ffn=64, max_positions=256)
    network = make_model(config, len(tokenizer))
    for parameter in network.parameters():
        parameter.data.mul_(6)
    network.save_pretrained(model)
    return model, text


def flags(model: Path, text: Path, output: Path, *further: str) -> list[str]:
    values: dict[str, Any] = {
        "model": model, "output": output, "text.source": text, "collect.window": 64, "collect.train_tokens": 8000,
        "collect.val_tokens": 1000, "collect.calibration_tokens": 1000, "collect.shard_tokens": 2048,
        "collect.device": "cpu", "collect.batch_size": 4, "data.batch_size": 512, "mlp.rank": 8, "mlp.steps": 60,
        "mlp.validations": 3, "heads.rank": 4, "heads.steps": 60, "heads.validations": 3, "mlp.density": 0.4,
        "heads.density": 0.75, "calibrate.mlp_density": 0.4, "calibrate.head_density": 0.75,
        "calibrate.sensitivity_tokens": 300, "tune.steps": 12, "tune.tokens": 128, "tune.batch_tokens": 128,
        "trainer.accelerator": "cpu",
    }  # fmt: skip
    return [f"--{name}={value}" for name, value in values.items()] + list(further)


def _run(argv: Sequence[str], log: str) -> None:
    import torch

    from dejavu_train.ground.errors import GOES_ON, exit_on_user_error
    from dejavu_train.run.command import main
    from dejavu_train.training import finetune, job

    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the benchmark runs in the background
    job.SAVE_SECONDS = finetune.SAVE_SECONDS = 0.2  # a fit of a second is saved some times, as one of an hour is
    with open(log, "a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.exit(exit_on_user_error(main, argv, GOES_ON))


def start(argv: Sequence[str], log: Path) -> Any:
    """train.py's main in a process of its own, which starts at once: its server has imported everything."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["dejavu_train.run.pipeline", "transformers.models.opt.modeling_opt"])
    process = context.Process(target=_run, args=(list(argv), str(log)))
    process.start()
    return process


def bundle_bytes(output: Path) -> tuple[bytes, bytes]:
    return (output / "bundle/bundle.json").read_bytes(), (output / "bundle/predictors.safetensors").read_bytes()
