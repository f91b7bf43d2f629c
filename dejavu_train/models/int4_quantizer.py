"""Tells transformers how folders of 4-bit rows and those for vLLM are loaded. Importing this module registers it.

``import dejavu_train`` has it imported as soon as transformers loads its quantizers, see ``register.py``.
"""

from collections.abc import Mapping
from typing import Any

from torch import nn
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from dejavu_train.families import dims_of
from dejavu_train.models.config_values import INT4, VLLM
from dejavu_train.models.int4 import CodedLinear, RowLayout, head_layout, row_layouts
from dejavu_train.models.int4_sizes import head_sizes


@register_quantization_config(INT4)
class Int4Config(QuantizationConfigMixin):
    """``quantization_config`` of a config.json: how the codes were made, kept as it stands there."""

    def __init__(self, quant_method: str = INT4, **made: Any) -> None:
        if made.get("bits", 4) != 4:
            raise ValueError(f"quantization_config says {made['bits']} bits, {INT4} has 4")
        self.quant_method = quant_method  # type: ignore[assignment]
        for name, value in made.items():
            setattr(self, name, value)


@register_quantization_config(VLLM)
class VllmConfig(QuantizationConfigMixin):
    """``quantization_config`` of a folder for the plug-in of vLLM, whose weights are as they were."""

    def __init__(self, quant_method: str = VLLM) -> None:
        self.quant_method = quant_method  # type: ignore[assignment]


@register_quantizer(VLLM)
class VllmQuantizer(HfQuantizer):
    """Loads such a folder as any other."""

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True


@register_quantizer(INT4)
class Int4Quantizer(HfQuantizer):
    """Puts :class:`CodedLinear` in the place of matrices before their words are read, of each layer and the LM head."""

    requires_calibration = True

    def _process_model_before_weight_loading(self, model: Any, **_kwargs: Any) -> Any:
        shape = dims_of(model.config)
        layouts = row_layouts(model.config.model_type, shape)
        self._coded = [*layouts]
        blocks = [each for module in model.modules() if isinstance(module, nn.ModuleList) for each in module]
        for block in blocks:  # whatever the family calls their list
            replace_matrices(block, own_layouts(block, layouts))
        head = head_sizes(shape, self._head())
        if head is not None and hasattr(model, "lm_head"):
            self._coded.append("lm_head")
            replace_matrices(model, {"lm_head": head_layout(head)})
        return model

    def _head(self) -> str:
        return str(getattr(self.quantization_config, "lm_head", "fp16"))

    def get_weight_conversions(self) -> list[Any]:
        from transformers.core_model_loading import WeightRenaming  # may be half loaded while this module is

        return [WeightRenaming(f"{part}.weight", f"{part}.words") for part in self._coded]

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return False


def own_layouts(block: nn.Module, layouts: Mapping[str, RowLayout]) -> dict[str, RowLayout]:
    """Layouts of the matrices that a layer has. One with a half alone has fewer than others."""
    names = {name for name, _ in block.named_modules()}
    return {part: layout for part, layout in layouts.items() if part in names}


def replace_matrices(module: nn.Module, layouts: Mapping[str, RowLayout]) -> None:
    """Exchange matrices, by their names within a decoder block or model, on the device where they lie."""
    for part, layout in layouts.items():
        owner, _, name = part.rpartition(".")
        parent = module.get_submodule(owner)
        linear: Any = getattr(parent, name)
        with linear.weight.device:
            made = CodedLinear(layout, linear.in_features, linear.out_features, linear.bias is not None)
        setattr(parent, name, made)
