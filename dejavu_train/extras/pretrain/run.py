"""Reads text, writes a small model in Hugging Face format: ``python -m dejavu_train.extras.pretrain --help``.

Trains with an L1 penalty on what the neurons give. By itself a ReLU model trained for minutes is not as sparse as a
real OPT, and predictors studied on it would not carry over. Matrices are trained with Muon (Jordan 2024,
torch.optim.Muon), the rest with AdamW. Interrupted, the same command goes on from the last checkpoint. Under torchrun
each process takes its share of a step's sequences: torchrun --nproc-per-node 4 -m dejavu_train.extras.pretrain ...
"""

import dataclasses
import json
import logging
import math
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from dejavu_train.cli.parser import parse
from dejavu_train.data.paragraphs import PARAGRAPH_HASHES, hash_paragraphs, write_paragraph_hashes
from dejavu_train.extras.pretrain.forward import run_layer, training_loss
from dejavu_train.extras.pretrain.heldout import Heldout, bits_per_byte, heldout_texts
from dejavu_train.extras.pretrain.models import default_l1, random_of
from dejavu_train.extras.pretrain.ranks import Ranks, is_first, joined
from dejavu_train.extras.pretrain.stream import (
    RowSampler,
    is_stream,
    load_stream,
    read_text,
    token_stream,
    train_tokenizer,
)
from dejavu_train.families import blocks_of, dims_of
from dejavu_train.ground import signals
from dejavu_train.ground.errors import UserError
from dejavu_train.ground.files import replacing_files, write_json
from dejavu_train.ground.progress import Progress, set_up_logging
from dejavu_train.models.load import load_tokenizer, resolve_device
from dejavu_train.training.state import load_state, save_state

logger = logging.getLogger(__name__)

SHARD_SIZE = "14MB"
LOOK_STEPS = 5  # of a GPU between two looks at the clock


@dataclasses.dataclass(frozen=True)
class PretrainConfig:
    """Training from scratch: of what, on what, for how long."""

    output: str
    """Model folder to write."""
    text: tuple[str, ...]
    """Files, hub datasets, or installed-docs. A file NAME.tokens.xz holds token ids of the tokenizer in the output
    folder."""
    heldout: tuple[str, ...] = ()
    """Texts to score at the end, never trained on. The first one can stop the training, see patience."""
    family: Literal["opt", "arcee", "llama-relu", "llama-drelu", "bloom", "nemotron-h"] = "opt"
    """Kind of layer: OPT (ReLU), Arcee (squared ReLU), Llama with ReLU in its gate or with dReLU, BLOOM (GELU).
    Nemotron-H has Mamba layers, attention, mixtures and MLPs with squared ReLU."""
    vocab_size: int = 8192
    """Entries of the byte-level BPE."""
    d_model: int = 384
    """Model width."""
    n_layers: int = 6
    """Decoder layers."""
    n_heads: int = 12
    """Attention heads of a layer."""
    d_ffn: int = 1536
    """Neurons of a layer's MLP."""
    max_positions: int = 1024
    """Positions that the model has."""
    context: int = 1024
    """Tokens of a training sequence."""
    l1: float | None = None
    """Weight of the L1 penalty on what the neurons give. null: 0.2, and 0 for BLOOM, whose GELU gives no zeros."""
    learning_rate: float = 2e-3
    """Highest rate, after the warm-up."""
    optimizer: Literal["muon", "adamw"] = "muon"
    """Optimizer of the layers' matrices. The rest has AdamW."""
    weight_decay: float = 0.1
    """Weight decay of the matrices."""
    warmup_steps: int = 200
    """Steps in which the rate rises."""
    batch_rows: int = 64
    """Sequences of a step, of all processes together."""
    micro_rows: int | None = None
    """Sequences of one pass through the model. A step adds up as many passes as it needs. null: all at once."""
    steps: int | None = None
    """Stop after so many steps. This or seconds is needed."""
    seconds: float | None = None
    """Stop after so many seconds of training."""
    patience: int = 0
    """Stop after so many scores of the first heldout text without a better one. 0 never stops early."""
    validation_steps: int = 100
    """Steps between two such scores."""
    checkpoint_seconds: float = 60.0
    """Between two checkpoints."""
    heldout_window: int = 512
    """Tokens of a window while scoring."""
    seed: int = 0
    """Seed of the first values and the order of the text."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    compile: bool = False
    """torch.compile a layer. All layers share what is compiled."""


def make_model(config: PretrainConfig, vocab_size: int) -> PreTrainedModel:
    """A random model with embeddings tied to the LM head."""
    torch.manual_seed(config.seed)
    sizes = {name: getattr(config, name) for name in ("d_model", "n_layers", "n_heads", "d_ffn", "max_positions")}
    return random_of(config.family, sizes | {"vocab_size": vocab_size})


def make_optimizers(model: PreTrainedModel, config: PretrainConfig) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers (unless ``adamw``), AdamW for embeddings, biases and norms."""
    layers = tuple(f"{block.name}." for block in blocks_of(model))
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and n.startswith(layers)]
    inside = {id(parameter) for parameter in matrices}
    rest = [parameter for parameter in model.parameters() if id(parameter) not in inside]
    lr = config.learning_rate
    adam: dict[str, Any] = {"lr": lr, "betas": (0.9, 0.95), "fused": torch.cuda.is_available()}
    if config.optimizer == "adamw":
        groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": rest, "weight_decay": 0.0}]
        return [torch.optim.AdamW(groups, **adam)]
    # match_rms_adamw: updates have the size of AdamW's, so that one learning rate serves both.
    muon = torch.optim.Muon(
        matrices, lr=lr, weight_decay=config.weight_decay, momentum=0.95, adjust_lr_fn="match_rms_adamw"
    )
    return [muon, torch.optim.AdamW(rest, weight_decay=0.0, **adam)]


def learning_rate_factor(progress: float, step: int, warmup_steps: int) -> float:
    """Linear warm-up by step, then a cosine to a fiftieth by progress, which runs from 0 to 1."""
    warm = min(1.0, (step + 1) / max(1, warmup_steps))
    return warm * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(1.0, progress))))


def _train(
    model: PreTrainedModel, sampler: RowSampler, config: PretrainConfig, ranks: Ranks, heldout: Heldout | None
) -> dict[str, Any]:
    optimizers, device = make_optimizers(model, config), ranks.device
    state_path = Path(config.output) / "pretraining.ckpt"
    step, elapsed = 0, 0.0
    state = load_state(state_path, device)
    if state is not None:
        _check_same_run(state.get("keys"), _decisive(config), state_path)
        model.load_state_dict(state["model"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        step, elapsed = state["step"], state["elapsed"]
        logger.info("going on from step %d (%.0f s trained)", step, elapsed)

    def save() -> None:
        if ranks.first:
            made = {"model": model.state_dict(), "optimizers": [optimizer.state_dict() for optimizer in optimizers]}
            save_state(state_path, made | {"step": step, "elapsed": elapsed, "keys": _decisive(config)})

    blocks, kind, l1 = blocks_of(model), dims_of(model.config).activation, config.l1 or 0.0
    layer = run_layer
    if config.compile:
        limits: Any = torch._dynamo.config  # where layers cannot share a graph, each has its own, and none goes without
        limits.recompile_limit = max(limits.recompile_limit, 2 * len(blocks))
        layer = torch.compile(run_layer)
    autocast = partial(torch.autocast, device.type, torch.bfloat16, enabled=device.type == "cuda")

    def add_gradients(rows: Tensor) -> Tensor:
        """Add gradients of a part of the step's rows. Returns its share of the mean cross-entropy."""
        with autocast():
            loss, entropy = training_loss(model, blocks, kind, rows, l1, layer)
        share = len(rows) / config.batch_rows
        (loss * share).backward()
        return entropy * share

    def score_of(rows: Tensor) -> tuple[Tensor, Tensor]:
        with autocast():
            return training_loss(model, blocks, kind, rows, 0.0)  # not compiled: that would be another graph

    model.train()
    first, began, saved_at, offset = step, time.monotonic(), time.monotonic(), elapsed
    looks = 1 if device.type == "cpu" else LOOK_STEPS  # a look keeps the queue of kernels short, so the clock is true
    with Progress("pretraining", config.steps, "step", step) as shown:
        while True:
            progress = max(
                step / config.steps if config.steps else 0.0, elapsed / config.seconds if config.seconds else 0.0
            )
            if progress >= 1:
                break
            factor = learning_rate_factor(progress, step, config.warmup_steps)
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = config.learning_rate * factor
            parts = ranks.own(sampler(step)).split(config.micro_rows or config.batch_rows)
            entropy = torch.stack([add_gradients(rows) for rows in parts]).sum()
            ranks.sum([parameter.grad for parameter in model.parameters() if parameter.grad is not None])
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            step += 1
            if step == first + 1:
                began = time.monotonic()  # the first step compiles; it is not training time
            if step % looks == 0:
                if not math.isfinite(entropy.item()):
                    raise UserError(
                        f"the loss is not finite at step {step}; lower --learning_rate and remove {state_path}"
                    )
                now = time.monotonic()
                elapsed, stops, saves = ranks.largest(
                    offset + now - began, signals.pending(), now - saved_at >= config.checkpoint_seconds
                )
                shown.describe("pretraining", f"{ranks.count * entropy.item():.4f} nats a token, {elapsed:.0f} s")
                if stops or saves:
                    save()
                    signals.stop_if_pending()
                    saved_at = time.monotonic()
            shown.update()
            if heldout is not None and step % config.validation_steps == 0:
                logger.info("step %d: %.4f nats a token of %s", step, heldout.score(score_of), config.heldout[0])
                if heldout.exhausted:
                    logger.info("stopped early: %d scores were worse than the best", config.patience)
                    break
    made = {"steps": step, "seconds": round(elapsed, 1), "tokens": step * config.batch_rows * config.context}
    return made | ({} if heldout is None else {"heldout_nats": [round(nats, 4) for nats in heldout.nats]})


def _decisive(config: PretrainConfig) -> dict[str, Any]:
    """The keys without which a state cannot go on to the same model: all but where and for how long it is trained."""
    free = (
        "output", "heldout", "heldout_window", "steps", "seconds", "checkpoint_seconds", "device", "compile",
        "micro_rows", "patience", "validation_steps",
    )  # fmt: skip
    return json.loads(json.dumps({k: v for k, v in dataclasses.asdict(config).items() if k not in free}))


def _check_same_run(before: Any, now: dict[str, Any], path: Path) -> None:
    if not isinstance(before, dict):
        raise UserError(f"{path} was begun by an older version; delete it to start anew")
    before = {"family": "opt"} | before  # an older version knew no other
    changed = next((key for key in now if before.get(key) != now[key]), None)
    if changed is not None:
        raise UserError(
            f"{path} was begun with {changed} {before.get(changed)}, not {now[changed]}; go on with that, choose"
            " another --output, or delete it to start anew"
        )


def pretrain(config: PretrainConfig) -> Path:
    """Train and write the model folder ``config.output``. Returns it. Of several processes the first one writes.

    Raises:
        UserError: no text, no end (neither steps nor seconds), a loss that is not finite.
    """
    if config.steps is None and config.seconds is None:
        raise UserError("say how long to train: --steps N or --seconds S")
    if config.patience and not config.heldout:
        raise UserError("--patience stops by the first of --heldout; name a text there")
    if config.l1 is None:
        config = dataclasses.replace(config, l1=default_l1(config.family))
    Path(config.output).mkdir(parents=True, exist_ok=True)
    with joined(resolve_device(config.device), config.batch_rows) as ranks:
        if not ranks.first:
            logging.getLogger("dejavu_train").setLevel(logging.WARNING)  # one of them is enough to listen to
        texts = [text for _, text in read_text([name for name in config.text if not is_stream(name)])]
        with ranks.in_turn():
            tokenizer = _tokenizer(config, texts)
        # int32: CUDA has no indexing of uint16.
        stream = torch.from_numpy(load_stream(config.text, tokenizer, texts).astype(np.int32)).to(ranks.device)
        logger.info("%d tokens of text", len(stream))
        if ranks.device.type == "cuda":
            torch.set_float32_matmul_precision("high")
        model = make_model(config, len(tokenizer)).to(ranks.device)
        heldout = None
        if config.patience:
            ids = token_stream(tokenizer, heldout_texts(config.heldout[0])).astype(np.int32)
            micro_rows = config.micro_rows or config.batch_rows
            heldout = Heldout(
                torch.from_numpy(ids).to(ranks.device), config.context, micro_rows, config.patience, ranks
            )
        sampler = RowSampler(stream, config.context, config.batch_rows, config.seed)
        with signals.deferred():
            metadata = _train(model, sampler, config, ranks, heldout)
    if ranks.first:
        _write(config, model, tokenizer, texts, metadata | {"processes": ranks.count, "stream_tokens": len(stream)})
    return Path(config.output)


def _tokenizer(config: PretrainConfig, texts: Sequence[str]) -> Any:
    """The tokenizer in the output folder, or one that is trained on the texts and put there."""
    output = Path(config.output)
    if (output / "tokenizer.json").is_file():
        return (
            load_tokenizer(config.output)
            if (output / "config.json").is_file()
            else PreTrainedTokenizerFast.from_pretrained(output)
        )
    if any(map(is_stream, config.text)):
        raise UserError(f"{output} has no tokenizer.json, and token ids were made by one; put it there")
    tokenizer = train_tokenizer(texts, config.vocab_size)
    with replacing_files(output, last="tokenizer.json") as aside:
        tokenizer.save_pretrained(aside)
    return tokenizer


def _write(
    config: PretrainConfig, model: PreTrainedModel, tokenizer: Any, texts: Sequence[str], metadata: dict[str, Any]
) -> None:
    """Score the heldout texts, and write the model's folder."""
    output, device = Path(config.output), next(model.parameters()).device
    model.eval()
    # What is shipped is fp16, so what is measured is the fp16 weights (computed in fp32).
    model.half().float()
    heldout = {
        Path(name).name: bits_per_byte(
            model, tokenizer, heldout_texts(name), min(config.heldout_window, config.max_positions)
        )
        for name in config.heldout
    }
    for name, metrics in heldout.items():
        logger.info("%s: %s", name, metrics)
    model.half()
    with replacing_files(output, last="config.json") as aside:
        model.save_pretrained(aside, max_shard_size=SHARD_SIZE)
    if texts:
        write_paragraph_hashes(output / PARAGRAPH_HASHES, hash_paragraphs(texts))
    # Names without folders: the file travels with the model.
    names = {"output": output.name, "text": _names(config.text), "heldout": _names(config.heldout)}
    metadata |= {
        "torch": torch.__version__,
        "device": _device_name(device),
        "config": dataclasses.asdict(config) | names,
    }
    write_json(output / "pretraining.json", metadata | {"heldout": heldout})
    (output / "pretraining.ckpt").unlink(missing_ok=True)


def _names(paths: Sequence[str]) -> list[str]:
    return [Path(path).name for path in paths]


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the flags (one per field of :class:`PretrainConfig`) and train."""
    config = parse(PretrainConfig, argv, "dejavu pretrain", (__doc__ or "").split("\n\n")[1])
    set_up_logging()
    output = pretrain(config)
    if is_first():
        print(output)
