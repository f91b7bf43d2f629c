"""Reads text and a dense model, writes activation shards: what the predictors learn from.

Windows of text go through the unchanged model in batches. Hooks hand over each layer's hidden states while the next
layer computes, and one thread writes them. So neither a layer nor a shard is ever held in memory. A run that was killed
makes the same plan again, keeps the shards that are complete and redoes the one that is not. A model that is
larger than its device runs by layers (collect_layers.py).
"""

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from dejavu_train.data.collect_layers import collect_by_layers, save_layer_weights, stream_bytes
from dejavu_train.data.config import CollectConfig
from dejavu_train.data.ngrams import shared_ngrams
from dejavu_train.data.parts import remove_parts, write_parts
from dejavu_train.data.recording import (
    HeadReference,
    MeanHeads,
    Recording,
    WriterThread,
    batches,
    record_batch,
    windows_of_means,
)
from dejavu_train.data.shard_reader import write_statistics
from dejavu_train.data.shards import (
    MANIFEST,
    SETS,
    STATISTICS,
    WEIGHTS,
    ActivationManifest,
    RecordedWeights,
    ShardEntry,
    ShardWriter,
    file_digests,
    layer_folder,
    shard_path,
)
from dejavu_train.data.text import Document, TextManifest, TextSource, load_sets
from dejavu_train.data.tokens import require_one_sequence
from dejavu_train.data.untrained import warn_if_untrained
from dejavu_train.data.windows import Window, plan_shards, plan_windows
from dejavu_train.families import Target, blocks_of
from dejavu_train.ground.errors import UserError
from dejavu_train.ground.files import remove_leftovers, require_disk
from dejavu_train.ground.locks import locked
from dejavu_train.ground.progress import Progress
from dejavu_train.models.config_values import read_dims
from dejavu_train.models.layer_walk import LayerWalk
from dejavu_train.models.load import load_model, load_tokenizer, resolve_device, weight_hash
from dejavu_train.models.tokenizer_hash import hash_of

logger = logging.getLogger(__name__)

LoadSets = Callable[[], tuple[dict[str, list[Document]], TextManifest]]
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
    share: Callable[[], None] | None = None,
) -> ActivationManifest:
    """Make the activations folder complete: nothing if it is, else what is missing.

    With ``full_hash`` the model is named by a hash over every byte of its weights rather than over samples.
    ``load`` gives the documents when they are needed. None reads ``text``. By layers, ``share`` has other processes
    record their parts (parts.py), and what they leave is recorded here.

    Raises:
        UserError: the model, the text, too little disk, or a folder that holds something else.
    """
    activations = Path(activations)
    with locked(activations / ".holders", f"another process is collecting into {activations}; waiting for it"):
        digest = weight_hash(model_name, full_hash, revision)
        load = load or (lambda: load_sets(text, model_name))
        return _collect(model_name, digest, text, load, config, activations, seed, revision, share)


def _collect(
    model_name: str,
    digest: str,
    text: TextSource,
    load: LoadSets,
    config: CollectConfig,
    activations: Path,
    seed: int,
    revision: str | None,
    share: Callable[[], None] | None,
) -> ActivationManifest:
    shape = read_dims(model_name, revision)
    config = config.settled(shape)
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
        known_share = shared_ngrams(sets["test"], sets["train"])
        logger.info("%.1f %% of the 8-grams of the test documents also occur in the train documents", 100 * known_share)
        text_metadata |= {"report_8grams_in_train": round(known_share, 5)}
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
    weights_bytes = len(shape.layers_of(Target.MLP)) * rows * shape.d_model * (4 if config.dtype == "float32" else 2)
    need = tokens * manifest.row_bytes() + weights_bytes
    if config.by_layers:
        need += stream_bytes(manifest, tokens, config)
    layers = shape.layers_of()
    logger.info("collecting %d tokens x %d layers: %.2f GB in %s", tokens, len(layers), need / 1e9, activations)
    require_disk(activations, need + SPARE_DISK, f"collecting {tokens} tokens of {len(layers)} layers")

    for folder in activations.glob("layer_*"):
        remove_leftovers(folder)  # the lock says nobody else is writing
    device = resolve_device(config.device)

    def load_dense() -> Any:
        if config.by_layers:
            return LayerWalk(model_name, device, config.dtype, revision)
        return load_model(model_name, config.dtype, device, config.device_map, revision)

    shared = config.by_layers and share is not None
    model = None if shared else load_dense()
    known = file_digests(activations)
    rewritten = [str(shard_path("", layer, entry.index)) for layer in layers for entry in missing]
    known = {name: sha256 for name, sha256 in known.items() if name != MANIFEST and name not in rewritten}
    (activations / STATISTICS).unlink(missing_ok=True)
    manifest.save(activations)
    recording = Recording(manifest, shards, missing, config, activations)
    if shared:
        write_parts(recording, model_name, revision)
        assert share is not None
        share()
        recording = dataclasses.replace(recording, missing=set(manifest.missing(activations)))
    if recording.missing:
        (collect_by_layers if config.by_layers else _collect_whole)(model or load_dense(), recording)
    remove_parts(activations)
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


def _collect_whole(model: Any, recording: Recording) -> None:
    """Record the missing shards of all layers, batch by batch, with the whole model in memory."""
    manifest, config, activations = recording.manifest, recording.config, recording.activations
    layers = manifest.shape.layers_of()
    last = layer_folder(activations, layers[-1])
    if len(recording.missing) == len(recording.planned) or not (last / WEIGHTS).exists():
        planned = recording.windows
        warn_if_untrained(model, [window.ids for window in planned if len(window.ids) > 1])
        _save_layer_weights(model, manifest, activations, windows_of_means(planned))
    heads, blocks = {}, blocks_of(model)
    for layer in layers:
        mean = RecordedWeights.load(activations, layer, manifest.weight_hash).head_mean
        heads[layer] = HeadReference.of(blocks[layer], mean)
    with Progress("collecting", sum(entry.tokens for entry in recording.missing), "token") as progress:
        for entry, windows in recording.open_shards:
            with ShardWriter(activations, manifest, entry) as writer, WriterThread(writer) as thread:
                start = 0
                for batch in batches(windows, config.batch_size):
                    record_batch(model, batch, config, heads, thread, start)
                    start += batch.rows
                    progress.update(batch.rows)


@torch.no_grad()
def _save_layer_weights(model: Any, manifest: ActivationManifest, activations: Path, windows: Sequence[Window]) -> None:
    """Save what losses need of each layer, with its mean head outputs over ``windows``."""
    means, device = MeanHeads(manifest.shape, manifest.shape.layers_of()), model.get_input_embeddings().weight.device
    with means.watching(model):
        for batch in batches(windows, 1):
            model.base_model(input_ids=batch.ids.to(device), use_cache=False)
            means.tokens += batch.rows
    for layer, mean in means.means().items():
        save_layer_weights(activations, manifest, layer, blocks_of(model)[layer], mean)
