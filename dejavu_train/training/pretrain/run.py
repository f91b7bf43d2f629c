"""Reads text, writes a small model in Hugging Face format: ``python -m dejavu_train.training.pretrain --help``.

Trains with an L1 penalty on what the neurons give. By itself a ReLU model trained for minutes is not as sparse as a
real OPT, and predictors studied on it would not carry over. Matrices are trained with Muon (Jordan 2024,
torch.optim.Muon), the rest with AdamW. Interrupted, the same command goes on from the last checkpoint.
"""

import dataclasses
import json
import logging
import math
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from dejavu_train import signals
from dejavu_train.data.paragraphs import PARAGRAPH_HASHES, hash_paragraphs, write_paragraph_hashes
from dejavu_train.data.text import (
    START_TOKEN,
    TextSource,
    load_documents,
    split_of,
    windows,
)
from dejavu_train.errors import UserError
from dejavu_train.families import BlockParts, blocks_of, dims_of, family_of
from dejavu_train.families.base import logits_of
from dejavu_train.families.block import active_neurons, causal, forward_block, positions_like
from dejavu_train.families.dims import Activation
from dejavu_train.files import write_json
from dejavu_train.models.opt import load_tokenizer, resolve_device
from dejavu_train.parser import parse
from dejavu_train.progress import Progress, progress
from dejavu_train.training.pretrain.models import default_l1, random_of
from dejavu_train.training.state import load_state, save_state

logger = logging.getLogger(__name__)

SPECIAL_TOKENS = ["<s>", "<pad>", "</s>", "<unk>"]  # ids 0 to 3, as in OPT
SHARD_SIZE = "14MB"
_LEAST_SQUARE = 1e-10  # the slope of a root has no end at zero


@dataclasses.dataclass(frozen=True)
class PretrainConfig:
    """What is trained, on what, for how long."""

    output: str
    """Model folder to write."""
    text: tuple[str, ...]
    """Files, hub datasets, or installed-docs."""
    heldout: tuple[str, ...] = ()
    """Texts to score at the end, never trained on."""
    family: Literal["opt", "arcee", "llama-relu", "llama-drelu", "bloom"] = "opt"
    """What a layer is: OPT (ReLU), Arcee (squared ReLU), Llama with ReLU in its gate or with dReLU, BLOOM (GELU)."""
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
    """Of the layers' matrices. The rest has AdamW."""
    weight_decay: float = 0.1
    """Of the matrices."""
    warmup_steps: int = 200
    """Steps in which the rate rises."""
    batch_rows: int = 64
    """Sequences of a step."""
    steps: int | None = None
    """Stop after so many steps. This or seconds is needed."""
    seconds: float | None = None
    """Stop after so many seconds of training."""
    checkpoint_seconds: float = 60.0
    """Between two checkpoints."""
    heldout_window: int = 512
    """Tokens of a window while scoring."""
    seed: int = 0
    """Of the first values and the order of the text."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    compile: bool = False
    """torch.compile the training step."""


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE with OPT's special ids (``<s>`` 0, ``<pad>`` 1, ``</s>`` 2, ``<unk>`` 3).

    As OPT's own, it puts ``</s>`` before a text when special tokens are asked for.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="</s> $A", pair="</s> $A $B", special_tokens=[("</s>", START_TOKEN)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="</s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>"
    )


def make_model(config: PretrainConfig, vocab_size: int) -> PreTrainedModel:
    """A random model with embeddings tied to the LM head."""
    torch.manual_seed(config.seed)
    sizes = {name: getattr(config, name) for name in ("d_model", "n_layers", "n_heads", "d_ffn", "max_positions")}
    return random_of(config.family, sizes | {"vocab_size": vocab_size})


def forward_with_activations(
    model: PreTrainedModel, ids: Tensor, blocks: Sequence[BlockParts] | None = None
) -> tuple[Tensor, list[Tensor]]:
    """The forward pass on unpadded rows, from the model's own modules.

    A plain function compiles into one graph, needs no mask and hands out what the neurons give.

    Args:
        ids: (B, T) int64. blocks: the layers' parts, which a compiler need not find.

    Returns:
        Final hidden states (B, T, d_model) and per layer the activations (B, T, d_ffn).
    """
    family, activations = family_of(model), []
    positions = positions_like(ids)
    hidden = family.embed(model, ids, positions)
    for block in blocks or family.blocks(model):
        hidden, neurons = forward_block(block, hidden, causal(block), positions)
        activations.append(neurons)
    norm = family.final_norm(model)
    return hidden if norm is None else norm(hidden), activations


def penalised(kind: Activation, neurons: Tensor) -> Tensor:
    """Of what neurons give, (..., n), that whose mean is the L1 penalty: its size, of squares that of the root.

    The mean of squares would hardly push a small value to zero.
    """
    return neurons.clamp_min(_LEAST_SQUARE).sqrt() if kind == Activation.RELU2 else neurons.abs()


def training_loss(
    model: PreTrainedModel, blocks: Sequence[BlockParts], kind: Activation, rows: Tensor, l1: float
) -> tuple[Tensor, Tensor]:
    """Cross-entropy (nats a token) plus ``l1`` times the summed mean activations, and the cross-entropy alone.

    Args:
        blocks: the layers' parts. kind: their activation.
        rows: (B, T + 1) int64, inputs and targets shifted by one.
    """
    hidden, activations = forward_with_activations(model, rows[:, :-1], blocks)
    logits = logits_of(model, hidden).float()
    entropy = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
    if l1 == 0:
        return entropy, entropy.detach()
    penalty = torch.stack([penalised(kind, activation.float()).mean() for activation in activations]).sum()
    return entropy + l1 * penalty, entropy.detach()


def read_text(names: Sequence[str]) -> list[tuple[str, str]]:
    """Pairs (source, text) of all documents that may be trained on.

    Each name is a file, a hub dataset or ``installed-docs``. A JSONL file whose name starts with installed-docs and
    ``installed-docs`` itself give their ``train`` documents only. The other sets stay unseen.
    """
    texts = []
    for name in names:
        source = TextSource(source=name)
        documents, _ = load_documents(source)
        is_docs = Path(name).name.startswith("installed-docs")
        key = "installed-docs" if is_docs else source.key
        kept = [document for document in documents if not is_docs or split_of(key, document.name) == "train"]
        logger.info("%s: %d of %d documents", name, len(kept), len(documents))
        texts += [(key, document.text) for document in kept]
    return texts


def token_stream(tokenizer: Any, texts: Sequence[str]) -> np.ndarray:
    """All texts as one row of token ids (uint16 where they fit), each started by ``</s>``."""
    pieces = []
    dtype = np.uint16 if len(tokenizer) <= 1 << 16 else np.uint32
    starts = range(0, len(texts), 64)
    for start in progress(starts, "tokenising", len(starts), "batch"):
        batch = tokenizer(list(texts[start : start + 64]), add_special_tokens=True, verbose=False)["input_ids"]
        pieces += [np.asarray(ids, dtype=dtype) for ids in batch]
    return np.concatenate(pieces)


class RowSampler:
    """Rows of ``</s>`` and ``context`` tokens from random places: the same rows for the same step, also after a resume.

    Every epoch cuts the stream at another phase and shuffles the pieces.
    """

    def __init__(self, stream: Tensor, context: int, rows: int, seed: int) -> None:
        self.stream, self.context, self.rows, self.seed = stream, context, rows, seed
        self.pieces = (len(stream) - context) // context
        if self.pieces < 1:
            raise UserError(f"the text has {len(stream)} tokens, fewer than one sequence of {context}; give more text")
        self._epoch, self._starts = -1, torch.empty(0)

    def __call__(self, step: int) -> Tensor:
        """The (rows, context + 1) int64 batch of a step."""
        indices = range(step * self.rows, (step + 1) * self.rows)
        starts = torch.stack([self._start(index) for index in indices])
        offsets = torch.arange(self.context, device=self.stream.device)
        rows = self.stream[starts.to(self.stream.device)[:, None] + offsets].long()
        return F.pad(rows, (1, 0), value=START_TOKEN)

    def _start(self, index: int) -> Tensor:
        epoch, place = divmod(index, self.pieces)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            phase = torch.randint(self.context, (1,), generator=generator)
            self._starts = torch.randperm(self.pieces, generator=generator) * self.context + phase
            self._epoch = epoch
        return self._starts[place]


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


@torch.no_grad()
def bits_per_byte(model: PreTrainedModel, tokenizer: Any, texts: Sequence[str], window: int) -> dict[str, Any]:
    """Score whole texts with the model as it is (fp32 sums): bits per byte, perplexity, tokens, density per layer."""
    device = next(model.parameters()).device
    nats, tokens, n_bytes = 0.0, 0, 0
    kind, blocks = dims_of(model.config).activation, blocks_of(model)
    norms = [torch.linalg.vector_norm(block.down.weight.float(), dim=0) for block in blocks]
    active = torch.zeros(len(blocks), dtype=torch.float64)
    pad = 1
    for text in texts:
        n_bytes += len(text.encode())
        rows = windows(tokenizer, text, window)
        for start in range(0, len(rows), 16):
            part = rows[start : start + 16]
            width = max(map(len, part))
            ids = torch.tensor([row + [pad] * (width - len(row)) for row in part], device=device)
            hidden, activations = forward_with_activations(model, ids)
            logits = logits_of(model, hidden).float()[:, :-1]
            real = ids[:, 1:] != pad
            losses = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
            nats += losses[real.flatten()].double().sum().item()
            tokens += int(real.sum())
            for layer, activation in enumerate(activations):
                needed = active_neurons(kind, activation[:, 1:][real], norms[layer])
                active[layer] += needed.float().mean(dim=1).double().sum().cpu()
    return {
        "bits_per_byte": nats / math.log(2) / n_bytes,
        "perplexity": math.exp(nats / tokens),
        "tokens": tokens,
        "bytes": n_bytes,
        "density": [round(value, 5) for value in (active / tokens).tolist()],
    }


def _heldout_texts(name: str) -> list[str]:
    documents, _ = load_documents(TextSource(source=name))
    if Path(name).name.startswith("installed-docs"):
        documents = [document for document in documents if split_of("installed-docs", document.name) == "test"]
    return [document.text for document in documents]


def _train(model: PreTrainedModel, sampler: RowSampler, config: PretrainConfig, device: torch.device) -> dict[str, Any]:
    optimizers = make_optimizers(model, config)
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
        made = {"model": model.state_dict(), "optimizers": [optimizer.state_dict() for optimizer in optimizers]}
        save_state(state_path, made | {"step": step, "elapsed": elapsed, "keys": _decisive(config)})

    blocks, kind = blocks_of(model), dims_of(model.config).activation

    def loss_of(rows: Tensor) -> tuple[Tensor, Tensor]:
        return training_loss(model, blocks, kind, rows, config.l1 or 0.0)

    loss_function = torch.compile(loss_of) if config.compile else loss_of
    model.train()
    shown = Progress("pretraining", config.steps, "step", step)
    first, began, saved_at, offset = step, time.monotonic(), time.monotonic(), elapsed
    entropy = torch.zeros(())
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
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss, entropy = loss_function(sampler(step))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        step += 1
        if step == first + 1:
            began = time.monotonic()  # the first step compiles; it is not training time
        if step % 20 == 0 or device.type == "cpu":
            if not math.isfinite(entropy.item()):  # also keeps the queue of kernels short, so that the clock is true
                raise UserError(f"the loss is not finite at step {step}; lower --learning_rate and remove {state_path}")
            elapsed = offset + time.monotonic() - began
            shown.describe("pretraining", f"{entropy.item():.4f} nats a token, {elapsed:.0f} s")
        shown.update()
        if signals.pending() or time.monotonic() - saved_at >= config.checkpoint_seconds:
            save()
            signals.stop_if_pending()
            saved_at = time.monotonic()
    shown.close()
    return {"steps": step, "seconds": round(elapsed, 1), "tokens": step * config.batch_rows * config.context}


def _decisive(config: PretrainConfig) -> dict[str, Any]:
    """The keys without which a state cannot go on to the same model: all but where and for how long it is trained."""
    free = ("output", "heldout", "heldout_window", "steps", "seconds", "checkpoint_seconds", "device", "compile")
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
    """Train and write the model folder ``config.output``. Returns it.

    Raises:
        UserError: no text, no end (neither steps nor seconds), a loss that is not finite.
    """
    if config.steps is None and config.seconds is None:
        raise UserError("say how long to train: --steps N or --seconds S")
    if config.l1 is None:
        config = dataclasses.replace(config, l1=default_l1(config.family))
    output = Path(config.output)
    output.mkdir(parents=True, exist_ok=True)
    device = resolve_device(config.device)
    pairs = read_text(config.text)
    if (output / "tokenizer.json").is_file():
        tokenizer = (
            load_tokenizer(str(output))
            if (output / "config.json").is_file()
            else PreTrainedTokenizerFast.from_pretrained(output)
        )
    else:
        tokenizer = train_tokenizer((text for _, text in pairs), config.vocab_size)
        tokenizer.save_pretrained(output)
    # int32: CUDA has no indexing of uint16.
    stream = torch.from_numpy(token_stream(tokenizer, [text for _, text in pairs]).astype(np.int32)).to(device)
    logger.info("%d tokens of text", len(stream))
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    model = make_model(config, len(tokenizer)).to(device)
    with signals.deferred():
        metadata = _train(model, RowSampler(stream, config.context, config.batch_rows, config.seed), config, device)

    model.eval()
    # What is shipped is fp16, so what is measured is the fp16 weights (computed in fp32).
    model.half().float()
    heldout = {
        Path(name).name: bits_per_byte(
            model, tokenizer, _heldout_texts(name), min(config.heldout_window, config.max_positions)
        )
        for name in config.heldout
    }
    for name, metrics in heldout.items():
        logger.info("%s: %s", name, metrics)
    model.half()
    model.save_pretrained(output, max_shard_size=SHARD_SIZE)
    write_paragraph_hashes(output / PARAGRAPH_HASHES, hash_paragraphs(text for _, text in pairs))
    # Names without folders: the file travels with the model.
    names = {"output": output.name, "text": _names(config.text), "heldout": _names(config.heldout)}
    metadata |= {
        "torch": torch.__version__,
        "device": _device_name(device),
        "config": dataclasses.asdict(config) | names,
    }
    write_json(output / "pretraining.json", metadata | {"stream_tokens": len(stream), "heldout": heldout})
    (output / "pretraining.ckpt").unlink(missing_ok=True)
    return output


def _names(paths: Sequence[str]) -> list[str]:
    return [Path(path).name for path in paths]


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the flags (one per field of :class:`PretrainConfig`) and train."""
    config = parse(PretrainConfig, argv, "python -m dejavu_train.training.pretrain", (__doc__ or "").split("\n\n")[1])
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    print(pretrain(config))
