"""Reads text and a dense OPT, writes activation shards: what the predictors learn from.

Windows of text go through the unchanged model in batches; hooks hand over each layer's hidden states while the next
layer computes, and one thread writes them, so neither a layer nor a shard is ever held in memory. The plan (which
windows make which shard) follows from text, seed and budgets alone: a run that was killed makes the same plan, keeps
the shards that are complete and redoes the one that is not.
"""

import dataclasses
import logging
import queue
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from dejavu_train.errors import UserError
from dejavu_train.files import locked, require_disk
from dejavu_train.opt_model import OPTShape, load_opt, load_tokenizer, read_shape, resolve_device, weight_hash
from dejavu_train.shards import (
    SETS,
    ActivationManifest,
    LayerWeights,
    ShardEntry,
    ShardWriter,
    Storage,
    pack_bits,
    write_statistics,
)
from dejavu_train.sites import decoder_layers, head_contribution, output_gram, record
from dejavu_train.text import Document, TextSource, load_sets, require_one_sequence, windows

logger = logging.getLogger(__name__)

PAD_TOKEN = 1
SPARE_DISK = 50_000_000  # checkpoints, logs and the bundle need room as well


@dataclasses.dataclass(frozen=True)
class CollectConfig:
    """How much text is recorded, and how the dense model runs."""

    window: int = 512
    """Tokens of a sequence, the leading </s> included."""
    train_tokens: int | None = 160_000
    """Tokens recorded for training; null takes all (then text.documents is the budget)."""
    choose_tokens: int | None = 20_000
    """Tokens recorded for early stopping and choices."""
    calibrate_tokens: int | None = 40_000
    """Tokens recorded for thresholds."""
    windows_per_document: int | None = None
    """At most so many windows of a document, drawn at random: a budget then sees more documents. null takes all."""
    generated_share: float = 0.0
    """Share of the windows whose text the model writes itself, from a prompt of prompt_tokens."""
    prompt_tokens: int = 32
    """Length of that prompt."""
    shard_tokens: int = 32_768
    """Tokens of a shard; a killed run redoes at most one."""
    batch_size: int = 8
    """Windows per forward pass."""
    dtype: str = "float32"
    """The model runs in float32, float16 or bfloat16."""
    storage: Storage = "float16"
    """Hidden states are stored as float16 or bfloat16."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    device_map: str | None = None
    """As in transformers (for instance auto) for a model larger than one GPU; needs accelerate."""

    def __post_init__(self) -> None:
        for name in ("window", "shard_tokens", "batch_size", "prompt_tokens"):
            if getattr(self, name) < 2 - (name == "batch_size"):
                raise UserError(f"collect.{name} is too small: {getattr(self, name)}")
        for name in ("train_tokens", "choose_tokens", "calibrate_tokens", "windows_per_document"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"collect.{name} must be positive or null, got {value}")
        if not 0.0 <= self.generated_share <= 1.0:
            raise UserError(f"collect.generated_share must lie between 0 and 1, got {self.generated_share}")

    def budget(self, set_name: str) -> int | None:
        return getattr(self, f"{set_name}_tokens")

    def request(self, seed: int) -> dict[str, Any]:
        """What decides which rows are recorded; how the model runs (batch, dtype, device) is left out."""
        values = dataclasses.asdict(self)
        for name in ("batch_size", "dtype", "device", "device_map"):
            values.pop(name)
        return {**values, "seed": seed}


@dataclasses.dataclass(frozen=True)
class Window:
    """One sequence of token ids; ``prompt`` < len(ids) where the model is to write the rest itself."""

    document: int
    ids: np.ndarray
    prompt: int


def plan_windows(
    documents: Sequence[Document], tokenizer: Any, config: CollectConfig, budget: int | None, seed: int
) -> list[Window]:
    """Draw documents in random order and take their windows until ``budget`` tokens (exactly) are planned."""
    generator = np.random.default_rng(seed)
    planned: list[Window] = []
    total = 0
    for number in generator.permutation(len(documents)):
        ids = windows(tokenizer, documents[number].text, config.window)
        if config.windows_per_document is not None and len(ids) > config.windows_per_document:
            ids = [ids[i] for i in sorted(generator.permutation(len(ids))[: config.windows_per_document])]
        for window_ids in ids:
            if budget is not None and total + len(window_ids) > budget:
                window_ids = window_ids[: budget - total]
            if len(window_ids) < 2:
                continue
            written = generator.random() < config.generated_share
            prompt = min(config.prompt_tokens, len(window_ids)) if written else len(window_ids)
            planned.append(Window(int(number), np.array(window_ids, np.int32), prompt))
            total += len(window_ids)
        if budget is not None and total >= budget - 1:
            break
    return planned


def plan_shards(planned: Sequence[Window], shard_tokens: int) -> list[list[Window]]:
    """Cut into runs of whole windows, each of at least ``shard_tokens`` (the last may be smaller).

    Within a shard windows stand by length, so that a batch has little padding.
    """
    shards: list[list[Window]] = []
    room = 0
    for window in planned:
        if room <= 0:
            shards.append([])
            room = shard_tokens
        shards[-1].append(window)
        room -= len(window.ids)
    return [sorted(shard, key=lambda window: -len(window.ids)) for shard in shards]


def collect(
    model_name: str,
    text: TextSource,
    config: CollectConfig,
    activations: str | Path,
    seed: int = 0,
    revision: str | None = None,
) -> ActivationManifest:
    """Make the activations folder complete: nothing if it is, else what is missing.

    Raises:
        UserError: the model, the text, too little disk, or a folder that holds something else.
    """
    activations = Path(activations)
    with locked(activations / ".lock", f"another process is collecting into {activations}; waiting for it"):
        return _collect(model_name, text, config, activations, seed, revision)


def _collect(
    model_name: str, text: TextSource, config: CollectConfig, activations: Path, seed: int, revision: str | None
) -> ActivationManifest:
    shape = read_shape(model_name, revision)
    if config.window > shape.max_positions:
        raise UserError(
            f"collect.window is {config.window}, but {model_name} has {shape.max_positions} positions; choose less"
        )
    digest = weight_hash(model_name, revision=revision)
    request = config.request(seed)
    existing = ActivationManifest.load(activations) if (activations / "manifest.json").is_file() else None
    if existing is not None:
        _check_same_request(existing, digest, request, text.key, activations)
        if not existing.missing(activations) and (activations / "statistics.json").is_file():
            return existing

    sets, text_manifest = load_sets(text, model_name)
    tokenizer = load_tokenizer(model_name, revision)
    shards: list[tuple[ShardEntry, list[Window]]] = []
    for number, set_name in enumerate(SETS):
        planned = plan_windows(sets[set_name], tokenizer, config, config.budget(set_name), seed + number)
        if set_name == "train":
            require_one_sequence(sum(len(window.ids) for window in planned), config.window, text.key)
        for windows_of_shard in plan_shards(planned, config.shard_tokens):
            tokens = sum(len(window.ids) for window in windows_of_shard)
            shards.append((ShardEntry(len(shards), set_name, tokens), windows_of_shard))
    manifest = ActivationManifest(
        model_name, digest, shape, config.storage, request, text_manifest.to_json(), tuple(entry for entry, _ in shards)
    )
    if existing is not None and existing.shards != manifest.shards:
        raise UserError(
            f"the text behind the shards in {activations} has changed since they were begun (other files, or other"
            " package versions for installed-docs); restore it, or delete the folder"
        )
    missing = set(manifest.missing(activations))
    tokens = sum(entry.tokens for entry in missing)
    fc1_bytes = shape.n_layers * shape.d_ffn * shape.d_model * (4 if config.dtype == "float32" else 2)
    need = tokens * manifest.row_bytes() * shape.n_layers + fc1_bytes
    logger.info("collecting %d tokens x %d layers: %.2f GB in %s", tokens, shape.n_layers, need / 1e9, activations)
    require_disk(activations, need + SPARE_DISK, f"collecting {tokens} tokens of {shape.n_layers} layers")

    for leftover in activations.glob("layer_*/.tmp-*"):  # of a killed run; the lock says nobody else is writing
        leftover.unlink()
    model = load_opt(model_name, config.dtype, resolve_device(config.device), config.device_map, revision)
    manifest.save(activations)
    _save_layer_weights(model, manifest, activations)
    with tqdm(total=tokens, desc="collecting", unit="tok", unit_scale=True, disable=None) as progress:
        for entry, shard_windows in shards:
            if entry in missing:
                with ShardWriter(activations, manifest, entry) as writer:
                    _fill_shard(model, shape, shard_windows, config, writer, seed + entry.index, progress)
    write_statistics(activations, manifest)
    return manifest


def _check_same_request(
    existing: ActivationManifest, digest: str, request: dict[str, Any], source: str, activations: Path
) -> None:
    if existing.weight_hash != digest:
        raise UserError(
            f"the activation shards in {activations} are of another model, {existing.model} with other weights;"
            " choose another output folder or delete this one"
        )
    if existing.request != request or existing.text.get("source") != source:
        found, asked = {**existing.request, "source": existing.text.get("source")}, {**request, "source": source}
        key = next(key for key in asked if asked[key] != found.get(key))
        raise UserError(
            f"the activation shards in {activations} were collected with {key} = {found.get(key)}, not {asked[key]};"
            " choose another output folder or delete this one"
        )


def _save_layer_weights(model: Any, manifest: ActivationManifest, activations: Path) -> None:
    for layer, block in enumerate(decoder_layers(model)):
        parts: Any = block
        weights = LayerWeights(
            parts.fc1.weight.detach().cpu(),
            parts.fc1.bias.detach().float().cpu(),
            torch.linalg.vector_norm(parts.fc2.weight.detach().float(), dim=0).cpu(),
        )
        weights.save(activations, layer, manifest.weight_hash, parts.fc1.weight.dtype)


class _WriterThread:
    """Runs ``writer.write`` in one thread, so that writing overlaps the forward pass; a short queue keeps memory flat.

    An error in the thread is raised in the caller at its next call.
    """

    def __init__(self, writer: ShardWriter) -> None:
        self._writer = writer
        self._jobs: queue.Queue[tuple[int, int, dict[str, np.ndarray], int] | None] = queue.Queue(maxsize=4)
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="shard-writer", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            if self._error is None:  # after an error go on emptying the queue, so that put never blocks
                try:
                    self._writer.write(*job)
                except BaseException as error:
                    self._error = error

    def put(self, layer: int, start: int, rows: dict[str, np.ndarray], active: int) -> None:
        if self._error is not None:
            raise self._error
        self._jobs.put((layer, start, rows, active))

    def finish(self, failed: bool) -> None:
        self._jobs.put(None)
        self._thread.join()
        if self._error is not None and not failed:
            raise self._error


def _fill_shard(
    model: Any,
    shape: OPTShape,
    shard_windows: Sequence[Window],
    config: CollectConfig,
    writer: ShardWriter,
    seed: int,
    progress: Any,
) -> None:
    """Send all windows of a shard through the model, batch by batch, into ``writer``."""
    grams = [output_gram(block.self_attn.out_proj.weight.detach(), shape.n_heads) for block in decoder_layers(model)]  # type: ignore[union-attr, arg-type]
    thread = _WriterThread(writer)
    failed = True
    try:
        start = 0
        for first in range(0, len(shard_windows), config.batch_size):
            batch = shard_windows[first : first + config.batch_size]
            rows = _forward(model, batch, config, grams, thread, start, seed + first)
            start += rows
            progress.update(rows)
        failed = False
    finally:
        thread.finish(failed)


@torch.inference_mode()
def _forward(
    model: Any,
    batch: Sequence[Window],
    config: CollectConfig,
    grams: Sequence[Tensor],
    thread: _WriterThread,
    start: int,
    seed: int,
) -> int:
    """One forward pass; returns the number of rows (tokens, without padding) handed to the writer."""
    longest = max(len(window.ids) for window in batch)
    ids = torch.full((len(batch), longest), PAD_TOKEN)
    for row, window in enumerate(batch):
        ids[row, : len(window.ids)] = torch.from_numpy(_own_text(model, window, seed + row).astype(np.int64))
    lengths = torch.tensor([len(window.ids) for window in batch])
    real = torch.arange(longest) < lengths[:, None]  # (B, T); padding stands on the right and is never recorded
    positions = torch.arange(longest).expand(len(batch), -1)
    facts = {
        "token": ids[real].numpy().astype(np.int32),
        "document": np.repeat([window.document for window in batch], lengths.numpy()).astype(np.int32),
        "position": positions[real].numpy().astype(np.int32),
        "generated": (positions >= torch.tensor([window.prompt for window in batch])[:, None])[real].numpy(),
    }
    dtype = torch.float16 if config.storage == "float16" else torch.bfloat16

    def hidden(tensor: Tensor, kept: Tensor, layer: int, name: str) -> np.ndarray:
        rows = tensor[kept].to(dtype).cpu()
        if not bool(torch.isfinite(rows).all()):
            raise UserError(
                f"{name} of layer {layer} is not finite in {config.storage}; collect with --collect.storage bfloat16"
                " or --collect.dtype float32"
            )
        return (rows if dtype is torch.float16 else rows.view(torch.uint16)).numpy()

    def on_layer(layer: int, tensors: dict[str, Tensor]) -> None:
        kept = real.to(tensors["mlp_in"].device)
        active = tensors["activation"][kept] > 0
        out_proj = decoder_layers(model)[layer].self_attn.out_proj.weight
        heads = head_contribution(tensors["head_out"][kept], out_proj, grams[layer])
        rows = {
            **facts,
            "attn_in": hidden(tensors["attn_in"], kept, layer, "attn_in"),
            "mlp_in": hidden(tensors["mlp_in"], kept, layer, "mlp_in"),
            "mlp_active": pack_bits(active).cpu().numpy(),
            "head_norm": heads.clamp_max(65504).half().cpu().numpy(),
        }
        thread.put(layer, start, rows, int(active.sum()))

    with record(model, {"attn_in", "mlp_in", "activation", "head_out"}, on_layer=on_layer):
        device = model.get_input_embeddings().weight.device
        # The decoder alone: the logits over the vocabulary are of no use here.
        model.model(input_ids=ids.to(device), attention_mask=real.long().to(device), use_cache=False)
    return int(lengths.sum())


def _own_text(model: Any, window: Window, seed: int) -> np.ndarray:
    """The window's ids, with what follows the prompt sampled from the model itself."""
    new = len(window.ids) - window.prompt
    if new <= 0:
        return window.ids
    device = model.get_input_embeddings().weight.device
    prompt = torch.from_numpy(window.ids[: window.prompt].astype(np.int64))[None].to(device)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        written = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=True,
            min_new_tokens=new,
            max_new_tokens=new,
            pad_token_id=PAD_TOKEN,
        )
    return written[0].cpu().numpy().astype(np.int32)
