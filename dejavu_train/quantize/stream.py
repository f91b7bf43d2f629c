"""Goes through a model's layers once: reads a layer from disk, quantises it, hands it on. One layer is in memory."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import OPTConfig
from transformers.models.opt.modeling_opt import OPTDecoderLayer

from dejavu_train.data.stream import Stream
from dejavu_train.families import dims_of
from dejavu_train.families.opt import EMBEDDING, POSITIONS_OFFSET, layer_prefix
from dejavu_train.models.int4 import Int4Rows, RowLayout
from dejavu_train.quantize.config import QuantizeConfig
from dejavu_train.quantize.foreign import MatrixReader
from dejavu_train.quantize.layer import Batch, LayerQuantizer, MatrixResult
from dejavu_train.quantize.source import StoredTensors

PAD_TOKEN = 1


def embed(
    source: StoredTensors,
    windows: Sequence[np.ndarray],
    batch_size: int,
    device: torch.device,
    folder: Path,
    identity: Any,
) -> list[Batch]:
    """Token ids, each window (T,), as what the first layer reads, in a stream of ``folder``. One that was begun for the
    same ``identity`` goes on."""
    made, start = [], 0
    parts = list(_padded(windows, batch_size))
    table, positions = source[EMBEDDING], source["decoder.embed_positions.weight"]
    rows = sum(ids.numel() for ids, _ in parts)
    stream = Stream(folder, identity, (rows, table.shape[1]), torch.float32)
    for ids, real in parts:
        made.append(Batch(stream, start, real.to(device)))
        if stream.next == 0:
            hidden = table[ids].float() + positions[POSITIONS_OFFSET : POSITIONS_OFFSET + ids.shape[1]]
            stream.read(start, ids.numel()).copy_(hidden.flatten(0, 1))
        start += ids.numel()
    return made


def _padded(windows: Sequence[np.ndarray], batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of the longest windows first: ids (B, T), and which of them are real (B, T)."""
    ordered = sorted(windows, key=len, reverse=True)
    for start in range(0, len(ordered), batch_size):
        part = ordered[start : start + batch_size]
        ids = torch.full((len(part), len(part[0])), PAD_TOKEN)
        for row, window in zip(ids, part, strict=True):
            row[: len(window)] = torch.from_numpy(window.astype(np.int64))
        yield ids, torch.arange(ids.shape[1]) < torch.tensor([len(window) for window in part])[:, None]


def quantised_layers(
    source: StoredTensors,
    reader: MatrixReader,
    opt: OPTConfig,
    layouts: dict[str, RowLayout],
    config: QuantizeConfig,
    batches: list[Batch],
    device: torch.device,
    first: int = 0,
) -> Iterator[tuple[dict[str, Tensor], dict[str, MatrixResult]]]:
    """Layer by layer: its other tensors by their names within the layer, as stored, and its matrices in 4 bits.

    Args:
        first: the first layer that was not done before, in front of which the batches stand.
    """
    for layer in range(first, dims_of(opt).n_layers):
        prefix = layer_prefix(layer)
        others, given, weights = {}, {}, {}
        for part in layouts:
            weights[f"{part}.weight"], rows = reader.read(prefix + part, layouts[part])
            if rows is not None:
                given[part] = Int4Rows(rows.words.to(device), rows.scales.to(device))
        for name in list(source):
            if name.startswith(prefix) and not reader.is_part(name):
                others[name.removeprefix(prefix)] = source[name]
        block = load_block(opt, {**weights, **others}, device)
        quantizer = LayerQuantizer(block, layouts, config, given)
        made = quantizer.run(batches)
        biases = {f"{part}.bias": block.get_submodule(part).bias for part in layouts}
        changed = {name: bias.to(others[name]) for name, bias in biases.items() if name in others}
        yield {**others, **changed}, made
        if batches:
            batches[0].stream.advance()


def load_block(config: OPTConfig, tensors: dict[str, Tensor], device: torch.device) -> Any:
    """A decoder layer of transformers in fp32, with these tensors by their names within it."""
    with torch.device("meta"):
        block = OPTDecoderLayer(config, layer_idx=0)
    block.load_state_dict({name: tensor.to(device).float() for name, tensor in tensors.items()}, assign=True)
    return block.requires_grad_(False).eval()
