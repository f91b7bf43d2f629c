"""Reads text and a dense model, writes activation shards: what the predictors learn from.

Windows of text go through the unchanged model in batches. Hooks hand over each layer's hidden states while the next
layer computes, and one thread writes them. So neither a layer nor a shard is ever held in memory. A run that was killed
makes the same plan again, keeps the shards that are complete and redoes the one that is not.
"""

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from dejavu_train.data.config import CollectConfig
from dejavu_train.data.shard_reader import write_statistics
from dejavu_train.data.shards import (
    MANIFEST,
    SETS,
    STATISTICS,
    ActivationManifest,
    LayerWeights,
    ShardEntry,
    ShardWriter,
    file_digests,
    layer_folder,
    pack_bits,
    shard_path,
)
from dejavu_train.data.text import Document, TextManifest, TextSource, load_sets, require_one_sequence, shared_ngrams
from dejavu_train.data.untrained import warn_if_untrained
from dejavu_train.data.windows import Window, plan_shards, plan_windows
from dejavu_train.errors import UserError
from dejavu_train.families import ModelDims, Target, blocks_of, dims_of
from dejavu_train.families.block import active_neurons
from dejavu_train.families.dims import SMOOTH
from dejavu_train.files import require_disk
from dejavu_train.locks import locked
from dejavu_train.models.config_values import read_dims
from dejavu_train.models.hooks import head_contribution, output_gram, record
from dejavu_train.models.opt import load_opt, load_tokenizer, resolve_device, weight_hash
from dejavu_train.models.tokenizer_hash import hash_of
from dejavu_train.progress import Progress

logger = logging.getLogger(__name__)

LoadSets = Callable[[], tuple[dict[str, list[Document]], TextManifest]]
PAD_TOKEN = 1
MOST_WAITING = 4  # layers of a batch that are not written yet
SPARE_DISK = 50_000_000  # checkpoints, logs and the bundle need room as well


def collect(
    model_name: str,
    text: TextSource,
    config: CollectConfig,
    activations: str | Path,
    seed: int = 0,
    revision: str | None = None,
    full_hash: bool = False,
    load: LoadSets | None = None,
) -> ActivationManifest:
    """Make the activations folder complete: nothing if it is, else what is missing.

    With ``full_hash`` the model is named by a hash over every byte of its weights rather than over samples.
    ``load`` gives the documents when they are needed. None reads ``text``.

    Raises:
        UserError: the model, the text, too little disk, or a folder that holds something else.
    """
    activations = Path(activations)
    with locked(activations / ".holders", f"another process is collecting into {activations}; waiting for it"):
        digest = weight_hash(model_name, full_hash, revision)
        load = load or (lambda: load_sets(text, model_name))
        return _collect(model_name, digest, text, load, config, activations, seed, revision)


def _collect(
    model_name: str,
    digest: str,
    text: TextSource,
    load: LoadSets,
    config: CollectConfig,
    activations: Path,
    seed: int,
    revision: str | None,
) -> ActivationManifest:
    shape = read_dims(model_name, revision)
    request = config.request(seed)
    tokenizer = load_tokenizer(model_name, revision)
    cut_by = hash_of(tokenizer)
    existing = ActivationManifest.load(activations) if (activations / "manifest.json").is_file() else None
    if existing is not None:
        _check_same_request(existing, digest, cut_by, request, text, activations)
        if not existing.missing(activations) and file_digests(activations):
            return existing

    sets, text_manifest = load()
    text_metadata = text_manifest.to_json()
    if "test" in sets:  # a model's own text is never reported on
        # Near-duplicates are common in documentation; how common belongs beside every figure measured on it.
        share = shared_ngrams(sets["test"], sets["train"])
        logger.info("%.1f %% of the 8-grams of the test documents also occur in the train documents", 100 * share)
        text_metadata |= {"report_8grams_in_train": round(share, 5)}
    shards: list[tuple[ShardEntry, list[Window]]] = []
    for number, set_name in enumerate(SETS):
        planned = plan_windows(sets[set_name], tokenizer, config, config.budget(set_name), seed + number)
        _say_shortfall(set_name, sum(len(window.ids) for window in planned), config.budget(set_name))
        if set_name == "train":
            require_one_sequence(sum(len(window.ids) for window in planned), config.window, text.key)
        for windows_of_shard in plan_shards(planned, config.shard_tokens):
            tokens = sum(len(window.ids) for window in windows_of_shard)
            shards.append((ShardEntry(len(shards), set_name, tokens), windows_of_shard))
    manifest = ActivationManifest(
        model_name, digest, shape, config.storage, request, text_metadata, tuple(entry for entry, _ in shards), cut_by
    )
    if existing is not None and existing.shards != manifest.shards:
        raise UserError(
            f"the text behind the shards in {activations} has changed since they were begun (other files, or other"
            " package versions for installed-docs); restore it, or delete the folder"
        )
    missing = set(manifest.missing(activations))
    tokens = sum(entry.tokens for entry in missing)
    rows = round(shape.rows_of(Target.MLP) - 1) * shape.units(Target.MLP)  # of the maps into the neurons
    weights_bytes = shape.n_layers * rows * shape.d_model * (4 if config.dtype == "float32" else 2)
    need = tokens * manifest.row_bytes() * shape.n_layers + weights_bytes
    logger.info("collecting %d tokens x %d layers: %.2f GB in %s", tokens, shape.n_layers, need / 1e9, activations)
    require_disk(activations, need + SPARE_DISK, f"collecting {tokens} tokens of {shape.n_layers} layers")

    for leftover in activations.glob("layer_*/.tmp-*"):  # of a killed run; the lock says nobody else is writing
        leftover.unlink()
    model = load_opt(model_name, config.dtype, resolve_device(config.device), config.device_map, revision)
    known = file_digests(activations)
    rewritten = [str(shard_path("", layer, entry.index)) for layer in range(shape.n_layers) for entry in missing]
    known = {name: sha256 for name, sha256 in known.items() if name != MANIFEST and name not in rewritten}
    (activations / STATISTICS).unlink(missing_ok=True)
    manifest.save(activations)
    if (
        len(missing) == len(shards)
        or not (layer_folder(activations, shape.n_layers - 1) / "weights.safetensors").exists()
    ):
        first = [window for _, planned in shards for window in planned]
        warn_if_untrained(model, [window.ids for window in first if len(window.ids) > 1])
        _save_layer_weights(model, manifest, activations, _head_means(model, shape, first, config))
    means = [LayerWeights.load(activations, layer, digest).head_mean for layer in range(shape.n_layers)]
    with Progress("collecting", tokens, "token") as progress:
        for entry, shard_windows in shards:
            if entry in missing:
                with ShardWriter(activations, manifest, entry) as writer:
                    _fill_shard(model, means, shard_windows, config, writer, progress)
    write_statistics(activations, manifest, known)
    return manifest


def _say_shortfall(set_name: str, tokens: int, asked: int | None) -> None:
    """Say where a text is shorter than what was asked for. A window that does not fit whole is no shortfall."""
    if asked is not None and tokens < 0.95 * asked:
        logger.info(
            "the set %s has %d tokens, of the %d that collect.%s_tokens asks for: the text has no more",
            set_name,
            tokens,
            asked,
            set_name,
        )


def _check_same_request(
    existing: ActivationManifest, digest: str, cut_by: str, request: dict[str, Any], text: TextSource, activations: Path
) -> None:
    source = text.key
    if existing.weight_hash != digest:
        raise UserError(
            f"the activation shards in {activations} are of another model, {existing.model} with other weights;"
            " choose another output folder or delete this one"
        )
    if existing.tokenizer_hash not in (None, cut_by):
        raise UserError(
            f"the activation shards in {activations} were collected with another tokenizer (hash"
            f" {existing.tokenizer_hash[:12]}, that of the model is {cut_by[:12]}); put back the tokenizer, choose"
            " another output folder or delete this one"
        )
    if existing.request != request or existing.text.get("source") != source:
        found, asked = {**existing.request, "source": existing.text.get("source")}, {**request, "source": source}
        others = "; ".join(
            f"{key} = {found.get(key)}, not {asked[key]}" for key in asked if asked[key] != found.get(key)
        )
        raise UserError(
            f"the activation shards in {activations} were collected with {others};"
            " choose another output folder or delete this one"
        )
    check_same_text(existing.text, text, f"the activation shards in {activations} were collected")


def check_same_text(collected: Mapping[str, Any], text: TextSource, since: str) -> None:
    """Compare a file of text with the one that a manifest of text names.

    Raises:
        UserError: it is not there, or was changed.
    """
    read, now = collected.get("file_sha256"), text.file_sha256()
    if read is not None and now != read:
        raise UserError(
            f"the text {text.file} has changed since {since} (its SHA-256 was {read[:12]} and is {now and now[:12]});"
            " restore it, or choose another output folder"
        )


@torch.no_grad()
def _head_means(model: Any, shape: ModelDims, planned: Sequence[Window], config: CollectConfig) -> list[Tensor]:
    """Each layer's mean head outputs (n_heads, head_dim) over the first windows. Zeros where heads are dropped."""
    totals = [torch.zeros(shape.n_kv_heads, shape.group_dim, dtype=torch.float64) for _ in range(shape.n_layers)]
    seen = 0
    if config.head_criterion == "norm":
        return totals

    def on_layer(layer: int, tensors: dict[str, Tensor]) -> None:
        totals[layer] += tensors["head_out"].double().sum((0, 1)).cpu()

    with record(model, {"head_out"}, on_layer=on_layer):
        device = model.get_input_embeddings().weight.device
        for window in planned:
            ids = torch.from_numpy(window.ids.astype(np.int64))[None].to(device)
            model.base_model(input_ids=ids, use_cache=False)
            seen += ids.numel()
            if seen >= config.mean_tokens:
                break
    return [total / seen for total in totals]


def _save_layer_weights(
    model: Any, manifest: ActivationManifest, activations: Path, head_means: Sequence[Tensor]
) -> None:
    for layer, block in enumerate(blocks_of(model)):
        weights = LayerWeights.of(block, manifest.shape, head_means[layer])
        weights.save(activations, layer, manifest.weight_hash, block.up.weight.dtype)


class _WriterThread:
    """Runs ``writer.write`` in one thread, so that writing overlaps the forward pass. Few jobs wait, so memory is flat.

    An error in the thread is raised in the caller at a later call.
    """

    def __init__(self, writer: ShardWriter) -> None:
        self._writer = writer
        self._pool = ThreadPoolExecutor(1, "shard-writer")
        self._jobs: deque[Future[None]] = deque()

    def put(self, layer: int, start: int, rows: dict[str, np.ndarray], active: int) -> None:
        self._jobs.append(self._pool.submit(self._writer.write, layer, start, rows, active))
        if len(self._jobs) > MOST_WAITING:
            self._jobs.popleft().result()

    def finish(self, failed: bool) -> None:
        try:
            while self._jobs and not failed:
                self._jobs.popleft().result()
        finally:
            self._pool.shutdown(cancel_futures=True)


def _fill_shard(
    model: Any,
    means: Sequence[Tensor],
    shard_windows: Sequence[Window],
    config: CollectConfig,
    writer: ShardWriter,
    progress: Progress,
) -> None:
    """Send all windows of a shard through the model, batch by batch, into ``writer``."""
    outs = [block.out.weight.detach() for block in blocks_of(model)]
    grams = [output_gram(weight, len(means[0])) for weight in outs]
    means = [mean.to(weight.device) for mean, weight in zip(means, outs, strict=True)]
    thread = _WriterThread(writer)
    failed = True
    try:
        start = 0
        for first in range(0, len(shard_windows), config.batch_size):
            batch = shard_windows[first : first + config.batch_size]
            rows = record_batch(model, batch, config, means, grams, thread, start)
            start += rows
            progress.update(rows)
        failed = False
    finally:
        thread.finish(failed)


def _refuse_not_finite(name: str, layer: int, dtype: str) -> NoReturn:
    raise UserError(
        f"{name} of layer {layer} is not finite in {dtype}; check the model's weights, or collect with"
        " --collect.dtype float32"
    )


@torch.inference_mode()
def record_batch(
    model: Any,
    batch: Sequence[Window],
    config: CollectConfig,
    means: Sequence[Tensor],
    grams: Sequence[Tensor],
    writer: Any,
    start: int,
) -> int:
    """One forward pass. Returns the number of rows (tokens, without padding) handed to ``writer.put``."""
    blocks, kind = blocks_of(model), dims_of(model.config).activation
    norms = [torch.linalg.vector_norm(b.down.weight.float(), dim=0) for b in blocks] if kind in SMOOTH else []
    longest = max(len(window.ids) for window in batch)
    ids = torch.full((len(batch), longest), PAD_TOKEN)
    for row, window in enumerate(batch):
        ids[row, : len(window.ids)] = torch.from_numpy(window.ids.astype(np.int64))
    lengths = torch.tensor([len(window.ids) for window in batch])
    real = torch.arange(longest) < lengths[:, None]  # (B, T); padding stands on the right and is never recorded
    positions = torch.arange(longest).expand(len(batch), -1)
    metadata = {
        "token": ids[real].numpy().astype(np.int32),
        "document": np.repeat([window.document for window in batch], lengths.numpy()).astype(np.int32),
        "position": positions[real].numpy().astype(np.int32),
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
        activation = tensors["activation"][kept]
        if not bool(torch.isfinite(activation.sum())):  # a NaN would pass for an active neuron
            _refuse_not_finite("the MLP's activation", layer, config.dtype)
        active = active_neurons(kind, activation, norms[layer]) if kind in SMOOTH else activation != 0
        heads = head_contribution(tensors["head_out"][kept], blocks[layer].out.weight, grams[layer], means[layer])
        if not bool(torch.isfinite(heads).all()):
            _refuse_not_finite("the heads' contribution", layer, config.dtype)
        rows = {
            **metadata,
            "attn_in": hidden(tensors["attn_in"], kept, layer, "attn_in"),
            "mlp_in": hidden(tensors["mlp_in"], kept, layer, "mlp_in"),
            "mlp_active": pack_bits(active).cpu().numpy(),
            "head_norm": heads.clamp_max(65504).half().cpu().numpy(),
        }
        writer.put(layer, start, rows, int(active.sum()))

    with record(model, {"attn_in", "mlp_in", "activation", "head_out"}, on_layer=on_layer):
        device = model.get_input_embeddings().weight.device
        # The decoder alone: the logits over the vocabulary are of no use here.
        model.base_model(input_ids=ids.to(device), attention_mask=real.long().to(device), use_cache=False)
    return int(lengths.sum())
