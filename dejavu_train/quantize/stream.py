"""Goes through a model's layers once: reads a layer from disk, quantises it, hands it on. One layer is in memory."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dejavu_train.data.stream import Stream
from dejavu_train.families import dims_of, family_of
from dejavu_train.families.block import positions_like
from dejavu_train.families.published import is_extra
from dejavu_train.models.int4 import Int4Rows, RowLayout
from dejavu_train.models.int4_quantizer import own_layouts
from dejavu_train.models.load import empty_model
from dejavu_train.models.stored import own_name
from dejavu_train.quantize.config import QuantizeConfig
from dejavu_train.quantize.foreign import MatrixReader
from dejavu_train.quantize.layer import LayerQuantizer, MatrixResult, StreamBatch
from dejavu_train.quantize.source import StoredTensors

PAD_TOKEN = 1


class Skeleton:
    """A model without weights, whose modules get those of a checkpoint in fp32 when they are needed.

    Args:
        values: of its config.json. source: its tensors. device: where modules with weights lie.
    Attributes:
        blocks: `BlockParts` of each layer.
    """

    def __init__(self, values: Mapping[str, Any], source: StoredTensors, device: torch.device) -> None:
        self.source, self.device = source, device
        self.model = empty_model({name: value for name, value in values.items() if name != "quantization_config"})
        for buffer in self.model.buffers():
            if not buffer.is_meta:
                buffer.data = buffer.data.to(device)
        self.family = family_of(self.model)
        self.blocks = self.family.blocks(self.model)
        self._names = {id(module): name for name, module in self.model.named_modules()}

    def fill(self, module: nn.Module) -> None:
        """Read the weights of a module that stands outside the layers, or of those in it."""
        for inner in module.modules():
            own = list(inner.named_parameters(recurse=False))
            for name, _ in own:
                tensor = self.source[own_name(f"{self._names[id(inner)]}.{name}")]
                setattr(inner, name, nn.Parameter(tensor.to(self.device).float(), requires_grad=False))

    def embed(self, ids: Tensor) -> Tensor:
        """(B, T, d) fp32, what the first layer reads, of ids (B, T)."""
        hidden = self.source[self.source.embedding][ids].float().to(self.device)
        hidden = hidden * getattr(self.family.embeddings(self.model)[0], "factor", 1)
        return self.family.embed(self.model, hidden, positions_like(ids).to(self.device))


@torch.no_grad()
def embed(
    skeleton: Skeleton, windows: Sequence[np.ndarray], batch_size: int, folder: Path, identity: Any
) -> list[StreamBatch]:
    """Token ids, each window (T,), as what the first layer reads, in a stream of ``folder``. One that was begun for the
    same ``identity`` goes on."""
    made, start = [], 0
    parts = list(_padded(windows, batch_size))
    rows = sum(ids.numel() for ids, _ in parts)
    stream = Stream(folder, identity, (rows, dims_of(skeleton.model.config).d_model), torch.float32)
    for module in skeleton.family.embeddings(skeleton.model)[1:]:
        skeleton.fill(module)
    for ids, real in parts:
        made.append(StreamBatch(stream, start, real.to(skeleton.device)))
        if stream.next == 0:
            stream.read(start, ids.numel()).copy_(skeleton.embed(ids).flatten(0, 1))
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
    skeleton: Skeleton,
    reader: MatrixReader,
    layouts: dict[str, RowLayout],
    config: QuantizeConfig,
    batches: list[StreamBatch],
    first: int = 0,
) -> Iterator[tuple[str, dict[str, Tensor], dict[str, MatrixResult]]]:
    """Layer by layer three things.

    Args:
        first: the first layer that was not done before, in front of which the batches stand.
    Returns: what names of its tensors begin with, its other tensors by their names in it, its matrices in 4 bits.
    """
    source, device, kind = skeleton.source, skeleton.device, skeleton.model.config.model_type
    for block in skeleton.blocks[first:]:
        prefix = own_name(f"{block.name}.")
        others, given, weights, own = {}, {}, {}, own_layouts(block.whole, layouts)
        for part in own:
            weights[f"{part}.weight"], rows = reader.read(prefix + part, layouts[part])
            if rows is not None:
                given[part] = Int4Rows(rows.words.to(device), rows.scales.to(device))
        for name in list(source):
            if name.startswith(prefix) and not reader.is_part(name):
                others[name.removeprefix(prefix)] = source[name]
        held = {name: each for name, each in others.items() if not is_extra(kind, prefix + name)}
        tensors = {name: tensor.to(device).float() for name, tensor in {**weights, **held}.items()}
        tensors = getattr(skeleton.family, "assembled", dict)(tensors)
        block.whole.load_state_dict(tensors, assign=True)
        block.whole.requires_grad_(False)
        made = LayerQuantizer(block, skeleton.family.matrices, own, config, given).run(batches)
        biases = {f"{part}.bias": block.whole.get_submodule(part).bias for part in own}
        changed = {name: bias.to(others[name]) for name, bias in biases.items() if name in others}
        block.whole.to("meta")
        yield prefix, {**others, **changed}, made
        if batches:
            batches[0].stream.advance()
