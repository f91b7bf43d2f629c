"""Reads the matrices (n outputs, m inputs) of a layer however a checkpoint stores them: in floating point, or quantised
by another package.

    gptq                 qweight (m / 8, n) and qzeros int32, scales (groups, n), g_idx (m); format gptq (v1) holds a
                         zero point less one, gptq_v2 the zero point itself; of a symmetric matrix it is 8 either way
    awq                  qweight (m, n / 8) and qzeros int32, nibbles in the order 0 2 4 6 1 3 5 7; scales (groups, n)
    compressed-tensors   weight_packed (n, m / 8) int32, weight_scale (n, groups); pack-quantized, symmetric, int
    bitsandbytes         NF4: weight uint8 in blocks of 64, or the same bytes as numbers of 16 or 32 bits; absmax in 8
                         bits with scales of its own or in fp32

Parts that contradict the config, or each other, are refused.

Codes are taken over as they are where their groups are such as our rows can have. They lie around a zero point of 8, or
mirrored around 7. Every other matrix is dequantised, to be quantised anew.  A matrix that was left out is read as it
is. Nothing of these packages is imported.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dejavu_train.families import dims_of
from dejavu_train.families.base import family_named, map_shapes
from dejavu_train.ground.errors import UserError
from dejavu_train.models.config_values import quant_method
from dejavu_train.models.int4 import Int4Rows, RowLayout
from dejavu_train.models.stored import in_layer
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
class DecodedMatrix:
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
        ends = {f".{name}.weight": size for name, size in maps.items()}
        expected = (name for name in family.stored_tensors(values) if name.endswith(tuple(ends)))
        self._sizes = {
            name.removesuffix(".weight"): next(size for end, size in ends.items() if name.endswith(end))
            for name in expected
        }
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
        self._parts: set[str] = set()
        for prefix in self._sizes:
            held = {name.removeprefix(f"{prefix}."): name for name in source if name.startswith(f"{prefix}.")}
            held.pop("bias", None)
            self._parts |= {*held.values()}
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
        return name in self._parts

    def read(self, prefix: str, layout: RowLayout) -> tuple[Tensor, Int4Rows | None]:
        """The matrix (n, m) of the module ``prefix``, and its rows where the checkpoint holds them exactly.

        Raises:
            UserError: a matrix of another size, or one that is no floating point where it is not in codes.
        """
        parts = {part: self.source[name] for part, name in self._held[prefix].items()}
        alone = parts.keys() == {WEIGHT}
        try:
            decoded = DecodedMatrix(parts[WEIGHT]) if self._decode is None or alone else self._decode(parts)
        except UserError as error:
            raise UserError(f"{prefix} of {self.source.model}: {error}") from None
        size = self._sizes[prefix]
        if tuple(decoded.weight.shape) != size or not decoded.weight.is_floating_point():
            how = "stored as" if alone else f"by {self.method} with 4 bits"
            raise UserError(
                f"{prefix} of {self.source.model} is {how} {_described(decoded.weight)}, where its config.json"
                f" asks for numbers {list(size)}; give the config that belongs to these weights"
            )
        return decoded.weight, exact_rows(decoded, layout)


def exact_rows(decoded: DecodedMatrix, layout: RowLayout) -> Int4Rows | None:
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
    _fit(words.dtype == torch.int32 and words.ndim == 2, f"codes are {_described(words)}, not int32 in rows")
    shifts = torch.tensor([4 * order.index(place) for place in range(8)])
    return (words.long()[..., None] >> shifts & 15).flatten(-2)


def _around_zero(stored: Tensor, zeros: Tensor, scales: Tensor) -> DecodedMatrix:
    """(stored - zeros) * scales, all (n, m). Around a zero of 7 lie our codes mirrored, with a negative scale."""
    codes, scales = stored - zeros, scales.float()
    symmetric = bool(((zeros == 8) | (zeros == 7)).all())
    codes, scales = torch.where(zeros == 7, -codes, codes), torch.where(zeros == 7, -scales, scales)
    return DecodedMatrix(codes * scales, *((codes.to(torch.int8), scales) if symmetric else ()))


def _require(condition: bool, method: str, what: str) -> None:
    if not condition:
        raise UserError(
            f"of {method} checkpoints {what} is not read; quantise the model in 16 bits from which it was made"
        )


def _fit(condition: bool, what: str) -> None:
    """Raise :class:`UserError` for parts of a matrix that contradict each other or the config."""
    if not condition:
        raise UserError(f"{what}; fetch the checkpoint again, or quantise the model in 16 bits from which it was made")


def _described(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _group_of(m: int, groups: int, size: Any, given: Tensor | None) -> Tensor:
    """(m,) the group of each input.

    Args:
        groups: how many scales an output has.
        size: inputs of a group as the config says: -1 for all in one, None where it does not say. The last group is
            shorter where they do not divide m.
        given: (m,) the groups as the checkpoint has them, None or empty where it has none.
    """
    given = None if given is None or given.numel() == 0 else given
    whole = size is None or (type(size) is int and (size == -1 or size > 0))
    _fit(whole, f"group_size must be -1 or a count of inputs, got {size!r}")
    wide = m if size in (None, -1) else size
    if size is None:
        _fit(groups == 1 or given is not None, f"{groups} scales for {m} inputs, and the config says no group_size")
    else:
        _fit(groups == math.ceil(m / wide), f"{groups} scales for {m} inputs in groups of {wide}")
    if given is None:
        return torch.arange(m) // wide
    index = given.long()
    _fit(tuple(index.shape) == (m,), f"g_idx is {_described(given)} for {m} inputs")
    counts = torch.bincount(index, minlength=groups) if bool((index >= 0).all()) else torch.tensor([])
    _fit(len(counts) == groups and int(counts.max()) <= wide, f"g_idx does not sort {m} inputs into groups of {wide}")
    return index


def _check_scales(scales: Tensor, size: tuple[int, ...]) -> None:
    _fit(scales.is_floating_point() and tuple(scales.shape) == size, f"scales are {_described(scales)}, not {[*size]}")
    _fit(bool(scales.isfinite().all()), "a scale is not finite")


def _gptq_zeros(stored: Tensor, config: Mapping[str, Any]) -> Tensor:
    """The zero points of what is stored, by the name of the format.

    Around a zero point of 8 lie all codes of a symmetric matrix. Some packages store that 8 under the name of v1, which
    holds a zero point less one, and 7 under that of v2. So the data decide there.
    """
    symmetric = config.get("sym", None)
    if symmetric is not False and bool((stored == stored[0, 0]).all()) and int(stored[0, 0]) in (7, 8):
        return torch.full_like(stored, 8)
    _fit(symmetric is not True, "the config says sym, and zero points differ, or are no 7 or 8")
    return stored + (0 if config.get("checkpoint_format") == "gptq_v2" else 1) & 15


def _gptq(config: Mapping[str, Any]) -> Callable[[Parts], DecodedMatrix]:
    _require(config.get("bits") == 4, "gptq", f"{config.get('bits')} bits a weight")
    form = config.get("checkpoint_format") or "gptq"
    form = "marlin" if config.get("is_marlin_format") else form
    _require(form in ("gptq", "gptq_v2"), "gptq", f"the format {form}")

    def decode(parts: Parts) -> DecodedMatrix:
        stored = _nibbles(parts["qweight"].T)  # packed along inputs
        zeros = _nibbles(parts["qzeros"])
        (n, m), groups = stored.shape, len(parts["scales"])
        _check_scales(parts["scales"], (groups, n))
        _fit(tuple(zeros.shape) == (groups, n), f"qzeros are {_described(parts['qzeros'])} for {groups} x {n} scales")
        index = parts.get("g_idx")
        _fit(not config.get("desc_act") or (index is not None and index.numel() > 0), "desc_act without g_idx")
        group_of = _group_of(m, groups, config.get("group_size"), index)
        return _around_zero(stored, _gptq_zeros(zeros, config)[group_of].T, parts["scales"][group_of].T)

    return decode


def _awq(config: Mapping[str, Any]) -> Callable[[Parts], DecodedMatrix]:
    _require(config.get("bits", config.get("w_bit")) == 4, "awq", "another width than 4 bits")
    version = str(config.get("version") or "gemm").lower()
    _require(version == "gemm", "awq", f"the version {version}")

    def decode(parts: Parts) -> DecodedMatrix:
        stored, zeros = (_nibbles(parts[name], AWQ_ORDER) for name in ("qweight", "qzeros"))
        (m, n), groups = stored.shape, len(zeros)
        _check_scales(parts["scales"], (groups, n))
        _fit(zeros.shape[1] == n, f"qzeros are {_described(parts['qzeros'])} for {groups} x {n} scales")
        group_of = _group_of(m, groups, config.get("group_size", config.get("q_group_size")), None)
        return _around_zero(stored.T, zeros[group_of].T, parts["scales"][group_of].T)

    return decode


def _compressed_tensors(config: Mapping[str, Any]) -> Callable[[Parts], DecodedMatrix]:
    name = "compressed-tensors"
    _require(config.get("format") == "pack-quantized", name, f"the format {config.get('format')}")
    sizes: set[Any] = set()
    listed = config.get("config_groups") or {}
    _require(isinstance(listed, dict), name, f"config_groups {listed!r}")
    for group in listed.values():
        weights = group.get("weights") or {} if isinstance(group, dict) else {}
        _require(isinstance(weights, dict), name, f"weights {weights!r}")
        four = weights.get("num_bits") == 4 and weights.get("type", "int") == "int"
        _require(four and bool(weights.get("symmetric", True)), name, "anything but symmetric integers of 4 bits")
        strategy = weights.get("strategy") or "group"
        _require(strategy in ("group", "channel", "tensor"), name, f"the strategy {strategy}")
        sizes.add(weights.get("group_size") if strategy == "group" else -1)

    def decode(parts: Parts) -> DecodedMatrix:
        stored, shape = _nibbles(parts["weight_packed"]), parts["weight_shape"].tolist()
        n, width = stored.shape
        _fit(len(shape) == 2 and shape[0] == n and 0 <= width - shape[1] < 8, f"codes of {n} x {width}, shape {shape}")
        m, scales = shape[1], parts["weight_scale"]
        _fit(scales.numel() > 0, f"scales are {_described(scales)}")
        scales = scales.expand(n, 1) if scales.numel() == 1 else scales.reshape(len(scales), -1)
        groups = scales.shape[1]
        _check_scales(scales, (n, groups))
        zeros = parts.get("weight_zero_point")
        neutral = zeros is None or not bool((_nibbles(zeros) - 8 if zeros.dtype == torch.int32 else zeros).any())
        _fit(neutral, "zero points beside codes that the config calls symmetric")
        fitting = {
            size for size in sizes if isinstance(size, int) and groups == math.ceil(m / (size if size > 0 else m))
        }
        _fit(len(fitting) <= 1, f"{groups} scales for {m} inputs, in groups of {sorted(fitting)}")
        size = next(iter(fitting or sizes), None)
        group_of = _group_of(m, groups, size, parts.get("weight_g_idx"))
        return _around_zero(stored[:, :m], torch.full((n, m), 8), scales[:, group_of])

    return decode


def _nf4(config: Mapping[str, Any]) -> Callable[[Parts], DecodedMatrix]:
    four = bool(config.get("load_in_4bit")) and config.get("bnb_4bit_quant_type") == "nf4"
    _require(four, "bitsandbytes", "anything but NF4")

    def decode(parts: Parts) -> DecodedMatrix:
        try:
            state = json.loads(bytes(parts["weight.quant_state.bitsandbytes__nf4"].tolist()))
            n, m = (int(length) for length in state["shape"])
            sizes = [int(state[name]) for name in ("blocksize", *(["nested_blocksize"] if _nested(parts) else []))]
            offset = float(state["nested_offset"]) if _nested(parts) else 0.0
        except (ValueError, KeyError, TypeError, RecursionError):
            raise UserError("its quant_state is damaged; fetch the checkpoint again") from None
        stored, table = parts["weight"].contiguous().flatten(), parts["weight.quant_map"]
        _fit(stored.is_floating_point() or stored.element_size() == 1, f"codes are {_described(stored)}")
        packed = stored.view(torch.uint8)  # stored in bytes, or seen as other numbers
        _fit(min(n, m, *sizes) > 0 and packed.numel() == -(-n * m // 2), f"{packed.numel()} bytes for {n} x {m} codes")
        _fit(table.shape == (16,) and table.is_floating_point(), f"quant_map is {_described(table)}, not 16 numbers")
        absmax, blocks = parts["weight.absmax"].flatten(), math.ceil(n * m / sizes[0])
        _fit(absmax.numel() == blocks, f"{absmax.numel()} scales for {blocks} blocks of {sizes[0]}")
        if _nested(parts):
            nested, codes = parts["weight.nested_absmax"].flatten(), parts.get("weight.nested_quant_map")
            _fit(codes is not None, "nested scales without nested_quant_map")
            assert codes is not None
            _check_scales(codes, (256,))
            _check_scales(nested, (math.ceil(blocks / sizes[1]),))
            _fit(absmax.dtype == torch.uint8, f"nested scales are {_described(absmax)}")
            absmax = codes.float()[absmax.long()] * nested.float().repeat_interleave(sizes[1])[:blocks] + offset
        _check_scales(absmax, (blocks,))
        values = table.float()[torch.stack([packed >> 4, packed & 15], dim=1).flatten().long()][: n * m]
        return DecodedMatrix((values * absmax.float().repeat_interleave(sizes[0])[: n * m]).view(n, m))

    return decode


def _nested(parts: Parts) -> bool:
    """Whether the scales of blocks are in codes of 8 bits themselves."""
    return "weight.nested_absmax" in parts


DECODERS: dict[str, Callable[[Mapping[str, Any]], Callable[[Parts], DecodedMatrix]]] = {
    "gptq": _gptq,
    "awq": _awq,
    "compressed-tensors": _compressed_tensors,
    "bitsandbytes": _nf4,
}
