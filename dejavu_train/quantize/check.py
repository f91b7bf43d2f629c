"""Mistakes of a configuration that can be told without torch, and what would be made."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dejavu_train.data.text import SELF
from dejavu_train.data.text_check import check_source
from dejavu_train.families import ModelDims, dims_of
from dejavu_train.families.dims import Positions
from dejavu_train.ground.errors import UserError
from dejavu_train.ground.files import probe_folder, require_disk, require_name
from dejavu_train.ground.machine import check_device_name
from dejavu_train.models.config_values import INT4, quant_method, read_values, refuse_unread
from dejavu_train.models.int4_sizes import head_sizes, part_sizes
from dejavu_train.models.stored import HEAD, check_folder, embedding_name, loaded_files, own_name, read_header
from dejavu_train.models.weight_format import CODES4
from dejavu_train.quantize.config import QuantizeConfig


def check_readable(values: Mapping[str, Any], model: str) -> None:
    """Raise :class:`UserError` for a config.json whose matrices are not read here."""
    refuse_unread(values, model)
    if quant_method(values) == INT4:
        raise UserError(f"{model} is in 4 bits already; give the model that it was made from")


def check_output(output: str) -> None:
    """Raise :class:`UserError` where the output exists, :class:`OSError` where nothing can be written there."""
    require_name(output)
    folder = Path(output).resolve()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"the output {output} exists; choose another folder, or delete it")
    probe_folder(folder.parent)


def check(config: QuantizeConfig) -> ModelDims:
    """Compare the configuration with the model, the text and the output.

    Returns:
        The sizes of the model.

    Raises:
        UserError: the first mistake, by name.
        OSError: the output cannot be written.
    """
    check_device_name(config.device, "device")
    values = read_values(config.model, config.revision)
    shape = dims_of(values, config.model)
    config.check(shape)
    part_sizes(shape, config.model)
    check_readable(values, config.model)
    method = quant_method(values)
    if method is None:
        check_folder(config.model, shape)
    elif config.gptq and config.text.source == SELF:
        raise UserError(
            f"{config.model} is quantised by {method} and cannot write its own text here; give --text FILE, or"
            " --quantizer rtn"
        )
    check_source(config.text)
    check_output(config.output)
    return shape


def plan(config: QuantizeConfig, shape: ModelDims) -> str:
    """Plan of the work, in a line or two: bytes on disk, tokens, and the memory of the largest layer's work."""
    coded, disk = coded_bytes(shape), written_bytes(config, shape)
    weights = shape.weights - shape.other_weights - shape.outer_weights
    tokens = config.calibration_tokens(shape)
    states = 8 * tokens * shape.d_model if config.gptq else 0
    require_disk(config.output, disk + states, f"the quantised {config.model}")
    lines = [
        f"{config.output}: {disk / 1e9:.2f} GB, of which layers {coded / 1e9:.2f} GB"
        f" ({8 * coded / weights:.2f} bits a weight)"
    ]
    if config.gptq:
        held = gptq_bytes(config, shape)
        lines.append(
            f"gptq on {tokens:,} tokens of {config.text.key}: up to {held / 1e9:.1f} GB of memory beside torch, and"
            f" {states / 1e9:.1f} GB on the disk until it is done"
        )
        if config.text.source == SELF and not (Path(config.model) / "samples.json").is_file():
            lines.append(
                f"the model writes its own text as a whole, {2 * shape.weights / 1e9:.1f} GB of weights in 16 bits,"
                " unless it wrote it before; --text FILE reads a layer at a time alone"
            )
    return "\n".join(lines)


def written_bytes(config: QuantizeConfig, shape: ModelDims) -> int:
    """Bytes of all matrices: of the layers in codes, of the rest as they are stored, and of the LM head in either."""
    head, width = head_sizes(shape, config.lm_head), outer_width(config.model)
    rest = width * shape.outer_weights if head is None else width * shape.embedding_weights + head.nbytes
    return coded_bytes(shape) + width * shape.other_weights + rest


def coded_bytes(shape: ModelDims) -> int:
    """Bytes of the matrices of all layers in codes."""
    unit = CODES4.unit_bytes(shape)
    return round(sum(unit.dense(shape, key.target) for key in shape.keys))


def outer_width(model: str) -> int:
    """Bytes that a folder has for a number of its embedding. Of a hub id, whose files are not here yet: two."""
    if not Path(model).is_dir():
        return 2
    tensors = {own_name(name): each for file in loaded_files(Path(model)) for name, each in read_header(file).items()}
    found = tensors.get(embedding_name(tensors)) or tensors[HEAD]
    return (found.end - found.begin) // math.prod(found.shape)


def gptq_bytes(config: QuantizeConfig, shape: ModelDims) -> int:
    """Bytes of GPTQ at most, beside torch. A layer is there twice, as stored and in fp32.

    With it are seven matrices of moments and four copies of weights, or the moments and a batch. At last comes a head
    in codes: five matrices of its size.
    """
    rows, inputs = config.batch_size * config.window, max(shape.d_model, shape.d_ffn)
    widest = max(9 * shape.d_model, (5 if shape.gated else 4) * shape.d_ffn)
    solving, running = 7 * inputs**2 + 4 * shape.layer_weights, inputs**2 + rows * widest
    if shape.positions is Positions.ALIBI:
        running += 3 * rows * config.window * shape.n_heads
    positions = shape.max_positions * shape.d_model if shape.positions is Positions.LEARNED else 0
    layer = 2 * shape.layer_weights + max(solving, running)
    head = 0 if config.lm_head == "fp16" else 5 * shape.vocab_size * shape.embedding_dim + 7 * shape.d_model**2
    return 4 * (positions + max(layer, head))


def check_device(config: QuantizeConfig) -> None:
    """Raise :class:`UserError` for a GPU that is not there, for which torch is asked."""
    if config.device.startswith("cuda"):
        from dejavu_train.models.load import resolve_device

        resolve_device(config.device)
