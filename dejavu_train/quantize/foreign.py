"""Reads the matrices of a layer however a checkpoint stores them: in floating point, or quantised by another package.

    gptq                 qweight (m / 8, n) and qzeros int32, scales (groups, n), g_idx (m); format gptq (v1) holds a
                         zero point less one, gptq_v2 the zero point itself
    awq                  qweight (m, n / 8) and qzeros int32, nibbles in the order 0 2 4 6 1 3 5 7; scales (groups, n)
    compressed-tensors   weight_packed (n, m / 8) int32, weight_scale (n, groups); pack-quantized, symmetric, int
    bitsandbytes         NF4: weight uint8 in blocks of 64, absmax in 8 bits with scales of its own or in fp32

Codes are taken over as they are where their groups are such as our rows can have. They lie around a zero point of 8, or
mirrored around 7. Every other matrix is dequantised, to be quantised anew. A matrix that was left out of the
quantisation is a weight alone, and is read as it is. Nothing of these packages is imported.

Letters: n outputs, m inputs.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dejavu_train.errors import UserError
from dejavu_train.families import dims_of
from dejavu_train.families.base import family_named, map_shapes
from dejavu_train.models.config_values import quant_method
from dejavu_train.models.int4 import Int4Rows, RowLayout
from dejavu_train.models.stored import in_layer, layer_prefixes
from dejavu_train.quantize.check import check_readable
from dejavu_train.quantize.source import StoredTensors

WEIGHT = "weight"
STORED: dict[str, tuple[str, ...]] = {  # what a method stores of every matrix, by the last parts of the names
    "gptq": ("qweight", "qzeros", "scales"),
    "awq": ("qweight", "qzeros", "scales"),
    "compressed-tensors": ("weight_packed", "weight_scale", "weight_shape"),
    "bitsandbytes": (WEIGHT, "weight.absmax", "weight.quant_map", "weight.quant_state.bitsandbytes__nf4"),
}
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
Parts = Mapping[str, Tensor]


@dataclass(frozen=True)
class Decoded:
    """A matrix (n, m) fp32, and where it is symmetric its codes int8 in -8..7 and a scale for each weight."""

    weight: Tensor
    codes: Tensor | None = None
    scales: Tensor | None = None


class MatrixReader:
    """Reads matrices of one checkpoint.

    Args:
        source: its tensors.
        values: its config.json.
    Raises:
        UserError: a method, or a form of one, that is not read. Anything but a layer's matrices in its codes.
    """

    def __init__(self, source: StoredTensors, values: Mapping[str, Any]) -> None:
        check_readable(values, source.model)
        self.source, self.method = source, quant_method(values)
        family = family_named(values["model_type"], source.model)
        maps = map_shapes(dims_of(values, source.model), family.matrices)
        self._sizes = {prefix + name: size for prefix in layer_prefixes(values) for name, size in maps.items()}
        self._decode = None if self.method is None else DECODERS[self.method](values["quantization_config"])
        self._stored = STORED.get(self.method or "", (WEIGHT,))
        codes = {part for part in self._stored if part != WEIGHT}
        within = in_layer(values)
        for name in source:
            if not within.search(name) and any(name.endswith(f".{part}") for part in codes):
                raise UserError(
                    f"{source.model} holds {name}: of {self.method} checkpoints only the layers' matrices are read in"
                    " codes; quantise it with the others left out"
                )
        self._held: dict[str, dict[str, str]] = {}
        for prefix in self._sizes:
            held = {name.removeprefix(f"{prefix}."): name for name in source if name.startswith(f"{prefix}.")}
            held.pop("bias", None)
            alone = WEIGHT in held and not codes & held.keys()  # left out of the quantisation
            missing = [] if alone else [part for part in self._stored if part not in held]
            if missing:
                stores = "" if self.method is None else f", which {self.method} stores"
                raise UserError(
                    f"the weights of {source.model} lack the tensor {prefix}.{missing[0]}{stores}; fetch or quantise"
                    " the model again"
                )
            self._held[prefix] = {WEIGHT: held[WEIGHT]} if alone else held

    def is_part(self, name: str) -> bool:
        """Whether a tensor of a layer belongs to one of its matrices."""
        return "norm" not in name and not name.endswith(".bias")

    def read(self, prefix: str, layout: RowLayout) -> tuple[Tensor, Int4Rows | None]:
        """The matrix (n, m) of the module ``prefix``, and its rows where the checkpoint holds them exactly.

        Raises:
            UserError: a matrix of another size, or one that is no floating point where it is not in codes.
        """
        parts = {part: self.source[name] for part, name in self._held[prefix].items()}
        alone = parts.keys() == {WEIGHT}
        decoded = Decoded(parts[WEIGHT]) if self._decode is None or alone else self._decode(parts)
        size = self._sizes[prefix]
        if tuple(decoded.weight.shape) != size or not decoded.weight.is_floating_point():
            how = "stored as" if alone else f"by {self.method} with 4 bits"
            described = f"{str(decoded.weight.dtype).removeprefix('torch.')} {list(decoded.weight.shape)}"
            raise UserError(
                f"{prefix} of {self.source.model} is {how} {described}, where its config.json asks for numbers"
                f" {list(size)}; give the config that belongs to these weights"
            )
        return decoded.weight, exact_rows(decoded, layout)


def exact_rows(decoded: Decoded, layout: RowLayout) -> Int4Rows | None:
    """The same weights as our rows, where every group of ours has one scale, an fp16 number, else None."""
    if decoded.codes is None or decoded.scales is None:
        return None
    grouped = layout.to_rows(decoded.scales).unflatten(1, (-1, layout.sizes.group))
    scales = grouped[..., 0]
    if bool((grouped != scales[..., None]).any()) or bool((scales.half().float() != scales).any()):
        return None
    return Int4Rows.of(layout.to_rows(decoded.codes).contiguous(), scales)


def _nibbles(words: Tensor, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """(..., w) int32 -> (..., 8 w) int64 in 0..15, the nibble of lowest bits first, or in ``order``."""
    shifts = torch.tensor([4 * order.index(place) for place in range(8)])
    return (words.long()[..., None] >> shifts & 15).flatten(-2)


def _around_zero(stored: Tensor, zeros: Tensor, scales: Tensor) -> Decoded:
    """(stored - zeros) * scales, all (n, m). Around a zero of 7 lie our codes mirrored, with a negative scale."""
    codes, scales = stored - zeros, scales.float()
    symmetric = bool(((zeros == 8) | (zeros == 7)).all())
    codes, scales = torch.where(zeros == 7, -codes, codes), torch.where(zeros == 7, -scales, scales)
    return Decoded(codes * scales, *((codes.to(torch.int8), scales) if symmetric else ()))


def _require(condition: bool, method: str, what: str) -> None:
    if not condition:
        raise UserError(
            f"of {method} checkpoints {what} is not read; quantise the model in 16 bits from which it was made"
        )


def _gptq(config: Mapping[str, Any]) -> Callable[[Parts], Decoded]:
    _require(config.get("bits") == 4, "gptq", f"{config.get('bits')} bits a weight")
    shift = 0 if config.get("checkpoint_format", "gptq") == "gptq_v2" else 1

    def decode(parts: Parts) -> Decoded:
        stored = _nibbles(parts["qweight"].T)  # packed along inputs
        m, groups = stored.shape[1], len(parts["scales"])
        group_of = parts["g_idx"].long() if "g_idx" in parts else torch.arange(m) // math.ceil(m / groups)
        zeros = _nibbles(parts["qzeros"]) + shift & 15
        return _around_zero(stored, zeros[group_of].T, parts["scales"][group_of].T)

    return decode


def _awq(config: Mapping[str, Any]) -> Callable[[Parts], Decoded]:
    _require(config.get("bits", config.get("w_bit")) == 4, "awq", "another width than 4 bits")
    version = str(config.get("version", "gemm")).lower()
    _require(version == "gemm", "awq", f"the version {version}")

    def decode(parts: Parts) -> Decoded:
        stored, zeros = (_nibbles(parts[name], AWQ_ORDER) for name in ("qweight", "qzeros"))
        times = len(stored) // len(zeros)
        return _around_zero(
            stored.T, zeros.repeat_interleave(times, 0).T, parts["scales"].repeat_interleave(times, 0).T
        )

    return decode


def _compressed_tensors(config: Mapping[str, Any]) -> Callable[[Parts], Decoded]:
    name = "compressed-tensors"
    _require(config.get("format") == "pack-quantized", name, f"the format {config.get('format')}")
    for group in (config.get("config_groups") or {}).values():
        weights = group.get("weights") or {}
        four = weights.get("num_bits") == 4 and weights.get("type", "int") == "int"
        _require(four and bool(weights.get("symmetric", True)), name, "anything but symmetric integers of 4 bits")

    def decode(parts: Parts) -> Decoded:
        n, m = parts["weight_shape"].tolist()
        stored = _nibbles(parts["weight_packed"])[:, :m]
        scales = parts["weight_scale"].view(n, -1)
        group_of = torch.arange(m) // math.ceil(m / scales.shape[1])
        group_of = parts["weight_g_idx"].long() if "weight_g_idx" in parts else group_of
        return _around_zero(stored, torch.full_like(stored, 8), scales[:, group_of])

    return decode


def _nf4(config: Mapping[str, Any]) -> Callable[[Parts], Decoded]:
    four = bool(config.get("load_in_4bit")) and config.get("bnb_4bit_quant_type") == "nf4"
    _require(four, "bitsandbytes", "anything but NF4")

    def decode(parts: Parts) -> Decoded:
        state = json.loads(bytes(parts["weight.quant_state.bitsandbytes__nf4"].tolist()))
        packed = parts["weight"].flatten()
        values = parts["weight.quant_map"][torch.stack([packed >> 4, packed & 15], dim=1).flatten().long()]
        absmax = parts["weight.absmax"]
        if "weight.nested_absmax" in parts:
            blocks = parts["weight.nested_absmax"].repeat_interleave(state["nested_blocksize"])[: len(absmax)]
            absmax = parts["weight.nested_quant_map"][absmax.long()] * blocks + state["nested_offset"]
        scales = absmax.float().repeat_interleave(state["blocksize"])[: len(values)]
        return Decoded((values.float() * scales).view(state["shape"]))

    return decode


DECODERS: dict[str, Callable[[Mapping[str, Any]], Callable[[Parts], Decoded]]] = {
    "gptq": _gptq,
    "awq": _awq,
    "compressed-tensors": _compressed_tensors,
    "bitsandbytes": _nf4,
}
