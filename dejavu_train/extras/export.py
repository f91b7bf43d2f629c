"""python -m dejavu_train.extras.export --model FOLDER --output FOLDER: 4-bit rows as GPTQ stores them, for vLLM.

Letters: n outputs, m inputs, g inputs of a group.

    weight[i, o] = (stored[i, o] - zero[i // g, o]) * scale[i // g, o],    stored in 0..15

    qweight (m / 8, n) int32   stored, packed along inputs     scales (m / g, n) fp16, positive
    qzeros  (m / g, n / 8) int32   zero, packed along outputs; less one in format gptq (v1)      g_idx (m,) int32

A matrix whose scales are the same for g inputs that follow one another comes over exactly. Those are q, k, v, up, and
the output projection where groups of g divide a head's width. The groups of down lie along outputs, which GPTQ has no
place for: it is rounded anew, to nearest.

Our scales may be negative, theirs are not: code * scale is then -code * |scale|, and -(-8) does not fit around a zero
of 8. It does around 7: stored = 7 - code. So groups have a zero of 8 or 7, and the folder says ``sym: false``. An LM
head in codes becomes numbers in the embeddings' dtype.
"""

import dataclasses
import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from dejavu_train.cli.parser import parse
from dejavu_train.families import dims_of
from dejavu_train.ground.errors import UserError
from dejavu_train.ground.progress import Progress
from dejavu_train.models.config_values import INT4, quant_method, read_values, refuse_unread
from dejavu_train.models.int4 import Int4Rows, Int8Rows, RowLayout, row_layouts
from dejavu_train.models.int4_sizes import head_kind, head_sizes, part_sizes
from dejavu_train.models.load import weight_hash
from dejavu_train.models.stored import HEAD, in_layer, layer_prefixes
from dejavu_train.quantize.check import check_output
from dejavu_train.quantize.folder import folder_aside
from dejavu_train.quantize.rounding import round_nearest
from dejavu_train.quantize.source import StoredTensors

GROUPS = (128, 64, 32)  # that vLLM has kernels for


@dataclasses.dataclass(frozen=True)
class ExportConfig:
    """A folder of 4-bit rows as a GPTQ checkpoint."""

    model: str
    """Folder that python -m dejavu_train.quantize wrote."""
    output: str
    """Folder that is made. It must not exist."""
    v2: bool = False
    """Zero points as they are (checkpoint_format gptq_v2) instead of less one (gptq)."""


def export(config: ExportConfig) -> dict[str, float]:
    """Write the folder.

    Returns:
        by matrix the squared error of its weights over their square, mean over the layers. 0 where they are exact.
    Raises:
        UserError: a model that is not in 4-bit rows, an output that exists.
    """
    values = read_values(config.model)
    refuse_unread(values, config.model)
    if quant_method(values) != INT4:
        raise UserError(f"{config.model} is not in 4-bit rows; python -m dejavu_train.quantize writes such a folder")
    check_output(config.output)
    shape = dims_of(values, config.model)
    layouts, source = row_layouts(values["model_type"], shape, config.model), StoredTensors(config.model)
    own = part_sizes(shape)["up"].group
    head = head_sizes(shape, head_kind(values), config.model)
    coded = () if head is None else (HEAD, "lm_head.scales")
    group = next(g for g in GROUPS if own % g == 0 and (shape.head_dim % g == 0 or g == 32))
    if shape.head_dim % group:  # output projections are rounded anew in any case, in groups of the other matrices
        group = own
    for columns, what in ((shape.d_ffn, "neurons a layer"), (shape.n_heads * shape.head_dim, "columns of heads")):
        if columns % group:
            raise UserError(
                f"{config.model} has {columns} {what}, which GPTQ groups of {group} do not divide;"
                " a GPTQ checkpoint of it cannot be written"
            )
    if shape.pattern:
        raise UserError(f"{config.model} has layers without an MLP; a GPTQ checkpoint of it cannot be written")
    errors: dict[str, list[float]] = {part: [] for part in layouts}
    with folder_aside(config.output) as folder, Progress("exporting", shape.n_layers, "layer") as progress:
        layers = in_layer(values)
        kept = [name for name in source if not layers.search(name) and name not in coded]
        folder.add({source.stored_name(name): source[name] for name in kept})
        if head is not None:
            rows = (Int4Rows if head.bits == 4 else Int8Rows)(*(source[name] for name in coded))
            folder.add({HEAD: rows.dense().to(source[source.embedding].dtype)})
        for prefix in layer_prefixes(values):
            names = {name.removeprefix(prefix): name for name in source if name.startswith(prefix)}
            tensors: dict[str, Tensor] = {}
            for part, layout in layouts.items():
                rows = Int4Rows(source[names.pop(f"{part}.weight")], source[names.pop(f"{part}.scales")])
                made, error = gptq_tensors(rows, layout, group, config.v2)
                stored = source.stored_name(f"{prefix}{part}.weight").removesuffix("weight")
                tensors |= {f"{stored}{name}": tensor for name, tensor in made.items()}
                errors[part].append(error)
            folder.add(tensors | {source.stored_name(name): source[name] for name in names.values()})
            progress.update()
        means = {part: sum(found) / len(found) for part, found in errors.items()}
        form = {
            "quant_method": "gptq", "bits": 4, "group_size": group, "desc_act": False, "sym": False, "lm_head": False,
            "checkpoint_format": "gptq_v2" if config.v2 else "gptq",
        }  # fmt: skip
        report = {"made_of": {"model": config.model, "weight_hash": weight_hash(config.model)}, "weight_errors": means}
        folder.finish(config.model, None, {**values, "quantization_config": form}, {**form, **report})
    return means


def gptq_tensors(rows: Int4Rows, layout: RowLayout, group: int, v2: bool) -> tuple[dict[str, Tensor], float]:
    """A matrix by the names that GPTQ has for its parts, and the squared error of its weights over their square."""
    codes = layout.from_rows(rows.codes.float())
    each = layout.from_rows(rows.scales.float().repeat_interleave(rows.group, 1))
    grouped, error = each.unflatten(1, (-1, group)), 0.0
    scales = grouped[..., 0]
    if bool((grouped != scales[..., None]).any()):
        weight = codes * each
        rounded, half = round_nearest(weight.contiguous(), group)
        codes, scales = rounded.float(), half.float()
        lost = codes * scales.repeat_interleave(group, 1) - weight
        error = float(lost.square().sum() / weight.square().sum().clamp_min(1e-30))
    negative = scales < 0
    zeros = torch.where(negative, 7, 8)
    stored = torch.where(negative.repeat_interleave(group, 1), 7 - codes, codes + 8)
    made = {
        "qweight": _packed(stored).T.contiguous(),
        "qzeros": _packed(zeros.T - (0 if v2 else 1)),
        "scales": scales.abs().half().T.contiguous(),
        "g_idx": (torch.arange(codes.shape[1]) // group).int(),
    }
    return made, error


def _packed(nibbles: Tensor) -> Tensor:
    """(a, 8 b) in 0..15 -> (a, b) int32, the first of eight in the lowest bits."""
    words = (nibbles.to(torch.int32).unflatten(-1, (-1, 8)) << torch.arange(0, 32, 4, dtype=torch.int32)).sum(-1)
    return words.to(torch.int32)


def main(argv: Sequence[str] | None = None) -> None:
    """Export, and say which matrices lost what. Raises :class:`UserError` for what the user can mend."""
    about = (
        "Write a model's 4-bit rows as a GPTQ checkpoint, which vLLM reads. The last matrix of a layer is rounded anew."
    )
    config = parse(ExportConfig, sys.argv[1:] if argv is None else argv, "python -m dejavu_train.extras.export", about)
    for part, error in export(config).items():
        print(f"{part}: {'exact' if error == 0 else f'rounded anew, squared error {error:.2e} of the weights'}")


if __name__ == "__main__":
    from dejavu_train.ground.errors import NOTHING_KEPT, exit_on_user_error

    sys.exit(exit_on_user_error(main, after_signal=NOTHING_KEPT))
