"""Writes folders for vLLM: a model with its predictors for the plug-in dejavu-vllm, or 4-bit rows as GPTQ stores them.

    dejavu export --bundle FOLDER --vllm FOLDER
    dejavu export --model FOLDER --output FOLDER

The first has the weights as they are, and in ``predictors`` those of neurons, each of one stage with a threshold.
transformers reads it as well. What follows is about the second.

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

from dejavu_train.bundle.artifact import Bundle
from dejavu_train.bundle.folder import PREDICTORS_FOLDER
from dejavu_train.bundle.spec import CASCADE_PARTS
from dejavu_train.cli.parser import parse
from dejavu_train.families import Target, dims_of
from dejavu_train.ground.errors import UserError
from dejavu_train.ground.progress import Progress
from dejavu_train.models.config_values import INT4, VLLM, quant_method, read_values, refuse_unread
from dejavu_train.models.int4 import Int4Rows, Int8Rows, RowLayout, row_layouts
from dejavu_train.models.int4_sizes import head_kind, head_sizes, part_sizes
from dejavu_train.models.load import weight_hash
from dejavu_train.models.stored import HEAD, in_layer, layer_prefixes
from dejavu_train.quantize.check import check_output
from dejavu_train.quantize.folder import folder_aside
from dejavu_train.quantize.rounding import round_nearest
from dejavu_train.quantize.source import StoredTensors

TOGETHER = 16  # tensors of a file
GROUPS = (128, 64, 32)  # that vLLM has kernels for


@dataclasses.dataclass(frozen=True)
class ExportConfig:
    """A model and its predictors for vLLM, or a folder of 4-bit rows as a GPTQ checkpoint."""

    model: str = ""
    """Folder that python -m dejavu_train.quantize wrote, or with vllm the bundle's model: "" takes the one it names."""
    output: str = ""
    """Folder of a GPTQ checkpoint that is made. It must not exist."""
    v2: bool = False
    """Zero points as they are (checkpoint_format gptq_v2) instead of less one (gptq)."""
    bundle: str = ""
    """Predictors that vllm writes beside their model."""
    vllm: str = ""
    """Folder of a model with its predictors that is made. It must not exist."""

    def __post_init__(self) -> None:
        if bool(self.bundle and self.vllm) == bool(self.model and self.output):
            raise UserError("export takes --bundle and --vllm, or --model and --output; --help tells what they are")


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


def export_together(config: ExportConfig) -> Bundle:
    """Write a model with the predictors of its neurons. Returns these.

    Raises:
        UserError: a bundle of another model or without such predictors, an output that exists, weights in codes.
    """
    bundle = of_one_stage(Bundle.from_pretrained(config.bundle))
    model = config.model or bundle.model
    values = read_values(model)
    if (method := quant_method(values)) is not None:
        raise UserError(f"the weights of {model} are quantised by {method}; --vllm takes a model of 16 or 32 bits")
    bundle.check_model(model)
    check_output(config.vllm)
    source = StoredTensors(model)
    names = list(source)
    with folder_aside(config.vllm) as folder, Progress("exporting", len(names), "tensor") as progress:
        for first in range(0, len(names), TOGETHER):
            some = names[first : first + TOGETHER]
            folder.add({source.stored_name(name): source[name] for name in some})
            progress.update(len(some))
        made_of = {"model": model, "weight_hash": bundle.weight_hash}
        folder.finish(model, None, {**values, "quantization_config": {"quant_method": VLLM}}, {"made_of": made_of})
        placed = dataclasses.replace(bundle, model=str(folder.folder))
        placed.save_pretrained(folder.folder / PREDICTORS_FOLDER)
    return bundle


def of_one_stage(bundle: Bundle) -> Bundle:
    """The predictors of neurons alone, of one stage, that compare with a threshold.

    Raises:
        UserError: there are none, or they are of a class of its own or read another layer's input.
    """
    specs = {key: spec for key, spec in bundle.one_stage().specs.items() if key.target == Target.MLP}
    if not specs:
        raise UserError(f"{bundle!r} has no predictors of neurons, which vLLM asks; train some")
    for key, spec in specs.items():
        if spec.kind == "custom" or spec.reads != key.site:
            what = spec.class_path or f"one that reads {spec.site} of layer {spec.site_layer}"
            raise UserError(f"layer {key.layer} has {what}; vLLM asks low-rank predictors of the MLP's own input")
    kept = tuple(f".{Target.MLP}.{part}" for part in CASCADE_PARTS)
    tensors = {n: t for n, t in bundle.tensors.items() if f".{Target.MLP}." in n and not n.endswith(kept)}
    made = dataclasses.replace(bundle, specs=specs, tensors=tensors)
    return made.with_densities({key: s.density for key, s in specs.items() if s.top_k is not None}, top_k=False)


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
        "Write a folder that vLLM reads: a model with its predictors, or 4-bit rows as a GPTQ checkpoint, of which the"
        " last matrix of a layer is rounded anew."
    )
    config = parse(ExportConfig, sys.argv[1:] if argv is None else argv, "dejavu export", about)
    if config.vllm:
        made = export_together(config)
        print(f"{config.vllm}: {made!r}; vllm serve {config.vllm}")
        return
    for part, error in export(config).items():
        print(f"{part}: {'exact' if error == 0 else f'rounded anew, squared error {error:.2e} of the weights'}")


if __name__ == "__main__":
    from dejavu_train.ground.errors import NOTHING_KEPT, exit_on_user_error

    sys.exit(exit_on_user_error(main, after_signal=NOTHING_KEPT))
