"""Both methods as vLLM knows quantizations: a configuration decides what runs each linear map, by its name.

Zeros are all that maps share: the one into the neurons writes them, the activation keeps them, the one out of them
skips them. So every map is decided alone, and tensor parallel ranks need nothing from each other.
"""

import re
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from vllm.logger import init_logger
from vllm.model_executor.layers.linear import (
    LinearBase,
    UnquantizedLinearMethod,
    register_weight_loader_v2_supported_method,
)
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

from dejavu_train.ground.errors import UserError
from dejavu_vllm.neurons import INTO, MERGED, OUT_OF, Neurons, neurons_of
from dejavu_vllm.ops import most_tokens, register_ops
from dejavu_vllm.predictors import check_bundle, has_predictor, part_of

logger = init_logger("vllm.dejavu")
OURS = ("zeroskip", "dejavu")


class ZeroSkipConfig(QuantizationConfig):
    """``--quantization zeroskip``: rows of silent neurons are left out. Needs no file, and changes no number."""

    name: ClassVar[str] = "zeroskip"

    def __init__(self) -> None:
        super().__init__()
        self.neurons = Neurons("unknown", False)

    def get_name(self) -> str:
        return self.name

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "ZeroSkipConfig":
        return cls()

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        """Refuse weights that another method has stored. A folder with predictors may be asked for zeroskip alone."""
        stored = hf_quant_cfg.get("quant_method", "unknown")
        if user_quant != cls.name or stored == cls.name:
            return None
        if stored not in OURS:
            raise UserError(
                f"--quantization {cls.name} runs weights of 16 or 32 bits, and these are stored by {stored}; take the"
                " model that they were made of, or leave the option out"
            )
        return cls.name

    def maybe_update_config(self, model_name: str, hf_config: Any = None, revision: str | None = None) -> None:
        """Learn what the neurons compute. A model without silent ones runs dense."""
        self.neurons = neurons_of(hf_config.get_text_config().to_dict())
        if not self.neurons.silent:
            logger.warning(
                "%s computes %s, which gives no zeros: zeroskip leaves nothing out, and the model runs dense",
                model_name,
                self.neurons.activation,
            )
        else:
            logger.info("zeroskip: rows of neurons that %s leaves at zero are not read", self.neurons.activation)

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        if not isinstance(layer, LinearBase):
            return None
        return self.method_of(layer, prefix) or UnquantizedLinearMethod()

    def method_of(self, layer: LinearBase, prefix: str) -> Any:
        """The method that runs a linear map, or None where the map is dense."""
        last = prefix.rpartition(".")[2]
        if self.neurons.silent and last in OUT_OF:
            return LiveRows()
        if self.neurons.silent and MERGED.fullmatch(last):
            return GatedRows(self.neurons.threshold)
        return None


class DejavuConfig(ZeroSkipConfig):
    """``--quantization dejavu``: predictors beside the weights choose neurons, and the others become zeros."""

    name: ClassVar[str] = "dejavu"

    def __init__(self) -> None:
        super().__init__()
        self.folder = ""

    def maybe_update_config(self, model_name: str, hf_config: Any = None, revision: str | None = None) -> None:
        """Check that the bundle beside the weights is theirs."""
        check_bundle(model_name)
        self.folder, self.neurons = model_name, neurons_of(hf_config.get_text_config().to_dict())
        logger.info("dejavu: rows of neurons that the predictors of %s do not choose are not read", model_name)

    def method_of(self, layer: LinearBase, prefix: str) -> Any:
        *_, last = prefix.split(".")
        number = re.search(r"\.(\d+)\.", prefix)
        if number is None or not has_predictor(self.folder, int(number.group(1))):
            return super().method_of(layer, prefix)
        if last in INTO or MERGED.fullmatch(last):
            return PredictedRows(self.folder, int(number.group(1)))
        return LiveRows() if last in OUT_OF else None  # zeros are there whatever the activation


class _Rows(UnquantizedLinearMethod):
    """A map whose rows may be left out. Weights are loaded as vLLM loads those of any linear map."""

    op: ClassVar[str]

    def process_weights_after_loading(self, layer: Any) -> None:
        device = layer.weight.device
        self.most = most_tokens(self.op, torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu")

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        made = self.rows(layer, x.reshape(-1, x.shape[-1]), bias)
        return made.view(*x.shape[:-1], made.shape[-1])

    def rows(self, layer: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        """(B, columns) of x (B, d)."""
        raise NotImplementedError


@register_weight_loader_v2_supported_method
class LiveRows(_Rows):
    """The map out of the neurons, kept with a row a neuron."""

    op = "live_rows"

    def process_weights_after_loading(self, layer: Any) -> None:
        super().process_weights_after_loading(layer)
        layer.weight = nn.Parameter(layer.weight.data.t().contiguous(), requires_grad=False)

    def rows(self, layer: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        return torch.ops.dejavu.live_rows(x, layer.weight, bias, self.most)


@register_weight_loader_v2_supported_method
class GatedRows(_Rows):
    """Gates, and of their other maps what stands behind an open one."""

    op = "gated_rows"

    def __init__(self, threshold: float) -> None:
        super().__init__()
        self.threshold = threshold

    def rows(self, layer: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        return torch.ops.dejavu.gated_rows(x, layer.weight, bias, self.threshold, self.most)


@register_weight_loader_v2_supported_method
class PredictedRows(_Rows):
    """The map into the neurons, of those that a predictor chooses."""

    op = "predicted_rows"

    def __init__(self, folder: str, number: int) -> None:
        super().__init__()
        self.folder, self.number = folder, number

    def process_weights_after_loading(self, layer: Any) -> None:
        super().process_weights_after_loading(layer)
        part, weight = part_of(self.folder, self.number, layer.tp_rank, layer.tp_size), layer.weight
        if len(weight) not in (len(part.up), 2 * len(part.up)):
            raise UserError(
                f"layer {self.number} has {len(weight)} rows here, and its predictor {len(part.up)} neurons;"
                " choose a tensor parallel size that divides them"
            )
        dtype = weight.dtype if weight.is_cuda else torch.float32
        for name in ("down", "up", "offset"):
            tensor = getattr(part, name).to(weight.device, dtype).contiguous()
            layer.register_buffer(f"dejavu_{name}", tensor, persistent=False)
        self.relu, self.cut = part.relu, part.cut

    def rows(self, layer: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        return torch.ops.dejavu.predicted_rows(
            x,
            layer.weight,
            bias,
            layer.dejavu_down,
            layer.dejavu_up,
            layer.dejavu_offset,
            self.relu,
            self.cut,
            self.most,
        )


def register_methods() -> None:
    """Make the ops and both names known to vLLM, and its activations to transformers. May be called again."""
    import dejavu_train  # noqa: F401  lets transformers compute FATReLU and dReLU

    register_ops()
    for config in (ZeroSkipConfig, DejavuConfig):
        register_quantization_config(config.name)(config)
