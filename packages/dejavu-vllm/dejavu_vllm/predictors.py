"""Reads a bundle that lies beside a model's weights, and gives each rank of a layer its part of a predictor."""

import functools
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from dejavu_train.bundle.artifact import Bundle
from dejavu_train.bundle.folder import METADATA, PREDICTORS_FOLDER
from dejavu_train.families import Target, UnitKey
from dejavu_train.ground.errors import UserError

COMMAND = "dejavu export --bundle BUNDLE --vllm FOLDER writes such a folder"


@dataclass(frozen=True)
class Part:
    """A predictor of the neurons of one rank: down (r, d), up (n, r), offset (n), all in fp32."""

    down: Tensor
    up: Tensor
    offset: Tensor
    relu: bool
    cut: float


@functools.cache
def read_bundle(folder: str) -> Bundle:
    """The bundle beside a model.

    Raises:
        UserError: no bundle there, or as :meth:`Bundle.from_pretrained`. Predictors that vLLM cannot ask.
    """
    where = Path(folder) / PREDICTORS_FOLDER
    if not (where / METADATA).is_file():
        raise UserError(f"there is no {where / METADATA}, which --quantization dejavu reads; {COMMAND}")
    bundle = Bundle.from_pretrained(where)
    for key, spec in bundle.specs.items():
        if key.target == Target.MLP and (
            spec.kind != "low_rank" or spec.top_k is not None or spec.reads != spec.key.site
        ):
            raise UserError(
                f"the predictor of layer {key.layer} in {where} is none of one stage with a threshold that reads its"
                f" own layer's input, as vLLM asks for; {COMMAND}"
            )
    if Target.MLP not in bundle.targets:
        raise UserError(f"the bundle {where} has no predictors of neurons; {COMMAND}")
    return bundle


def check_bundle(folder: str) -> None:
    """Refuse a folder whose bundle is not of its weights. Raises as :func:`read_bundle`, and for another hash."""
    if not Path(folder).is_dir():
        raise UserError(f"--quantization dejavu reads a folder of this machine, got {folder}; {COMMAND}")
    read_bundle(folder).check_model(folder)


def has_predictor(folder: str, layer: int) -> bool:
    """Whether a layer's neurons are chosen. Some layers are dense."""
    spec = read_bundle(folder).specs.get(UnitKey(layer, Target.MLP))
    return spec is not None and not spec.dense


def part_of(folder: str, layer: int, rank: int, ranks: int) -> Part:
    """The part of a layer's predictor that a rank of several asks: scores of its own neurons."""
    spec = read_bundle(folder).specs[UnitKey(layer, Target.MLP)]
    made: nn.Module = read_bundle(folder).predictor(layer, Target.MLP)
    own = slice(spec.n_out // ranks * rank, spec.n_out // ranks * (rank + 1))
    up = made.up[own]  # type: ignore[index]
    offset = up.new_zeros(len(up)) if made.bias is None else made.bias[own]  # type: ignore[index]
    assert spec.threshold is not None
    return Part(made.down.detach(), up, offset, spec.nonlinearity == "relu", spec.threshold)  # type: ignore[operator, arg-type]
