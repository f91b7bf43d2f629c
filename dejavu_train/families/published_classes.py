"""Classes of transformers' for published checkpoints. Importing this lets its Auto classes make them.

All but one are Llama's or Mistral's with other activations, numbers or both. ``published.py`` says what they compute.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationMixin, LlamaConfig, MistralConfig
from transformers.models.cosmos3_edge.configuration_cosmos3_edge import Cosmos3EdgeTextConfig
from transformers.models.cosmos3_edge.modeling_cosmos3_edge import Cosmos3EdgePreTrainedModel, Cosmos3EdgeTextModel
from transformers.models.llama.modeling_llama import LlamaForCausalLM
from transformers.models.mistral.modeling_mistral import MistralForCausalLM

from dejavu_train.families.gates import activate_both
from dejavu_train.families.published import BambooFamily, MiniCPMFamily, SparseLMFamily, is_extra
from dejavu_train.families.scaled import ScaledEmbedding, ScaledRMSNorm
from dejavu_train.ground.files import write_json


class Published:
    """Base of the classes: a saved model keeps what the origin's code reads, and no module here does.

    These are its tensors, the name of its class, and keys of a config.json by their earlier names.

    Attributes:
        loaded_from: the folder that the model was loaded from. None: that of its name.
    """

    loaded_from: str | None = None
    config: Any
    state_dict: Any

    def save_pretrained(self, save_directory: Any, *args: Any, state_dict: Any = None, **options: Any) -> None:
        """As transformers', with those tensors. Raises as it does."""
        kept = self._kept()
        given = {**(self.state_dict() if state_dict is None else state_dict), **kept} if kept else state_dict
        named = self.config.architectures
        super().save_pretrained(save_directory, *args, state_dict=given, **options)  # type: ignore[misc]
        path = Path(save_directory) / "config.json"
        if path.is_file():
            values = json.loads(path.read_text(encoding="utf-8"))
            write_json(path, {**values, **_earlier_keys(values), "architectures": named or values["architectures"]})

    def _kept(self) -> dict[str, Tensor]:
        folder = Path(self.loaded_from or self.config.name_or_path)
        made: dict[str, Tensor] = {}
        for file in sorted(folder.glob("*.safetensors")) if self.config.name_or_path else ():
            with safe_open(file, "pt") as stored:
                names = [name for name in stored.keys() if is_extra(self.config.model_type, name)]
                made |= {name: stored.get_tensor(name) for name in names}
        return made


def _earlier_keys(values: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a saved config.json by the names that transformers had for them when these models came out."""
    rope = dict(values.get("rope_parameters") or {})
    made = {"rope_theta": rope.pop("rope_theta", 10000.0), "torch_dtype": values.get("dtype")}
    return made | ({"rope_scaling": rope} if rope.get("rope_type", "default") != "default" else {})


class SparseLlamaConfig(LlamaConfig):
    model_type = "sparsellama"


class SparseLlama(Published, LlamaForCausalLM):
    """ProSparse."""

    config_class = SparseLlamaConfig


class SparseLMConfig(LlamaConfig):
    model_type = "llama_sparse_relu"


class SparseLM(Published, LlamaForCausalLM):
    """SakanaAI's SparseLM."""

    config_class = SparseLMConfig
    _keys_to_ignore_on_load_unexpected = SparseLMFamily.extra

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp.act_fn = nn.ReLU()


class BambooConfig(MistralConfig):
    model_type = "bamboo"


class Bamboo(Published, MistralForCausalLM):
    """TurboSparse-Mistral and Bamboo."""

    config_class = BambooConfig
    _keys_to_ignore_on_load_unexpected = BambooFamily.extra

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            activate_both(layer.mlp)


class MiniCPMConfig(LlamaConfig):
    model_type = "minicpm"

    def __init__(self, **values: Any) -> None:
        super().__init__(**{**MiniCPMFamily.defaults, **values})


class MiniCPM(Published, LlamaForCausalLM):
    """MiniCPM whose residual stream is shorter by the factor of what its layers add."""

    config_class = MiniCPMConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        added, eps = config.scale_depth / math.sqrt(config.num_hidden_layers), config.rms_norm_eps
        for layer in self.model.layers:
            layer.input_layernorm.variance_epsilon = layer.post_attention_layernorm.variance_epsilon = eps / added**2
        d, out = config.hidden_size, config.dim_model_base / config.hidden_size
        self.model.norm = ScaledRMSNorm(d, eps / added**2, out)
        self.model.embed_tokens = ScaledEmbedding(
            config.vocab_size, d, config.pad_token_id, factor=config.scale_emb / added
        )
        self.post_init()


class Cosmos3EdgeText(Cosmos3EdgePreTrainedModel, GenerationMixin):
    """Cosmos 3 Edge's text tower with its LM head, which transformers has around text and pictures together alone."""

    config_class = Cosmos3EdgeTextConfig
    _tied_weights_keys: Mapping[str, str] = {"lm_head.weight": "model.embed_tokens.weight"}
    forward = LlamaForCausalLM.forward

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = Cosmos3EdgeTextModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()


AutoModelForCausalLM.register(Cosmos3EdgeTextConfig, Cosmos3EdgeText, exist_ok=True)
for _config, _model in (
    (SparseLlamaConfig, SparseLlama), (SparseLMConfig, SparseLM), (BambooConfig, Bamboo), (MiniCPMConfig, MiniCPM),
):  # fmt: skip
    AutoConfig.register(_config.model_type, _config, exist_ok=True)
    AutoModelForCausalLM.register(_config, _model, exist_ok=True)
