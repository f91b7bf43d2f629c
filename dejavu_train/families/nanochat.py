"""NanoChat: squared ReLU, RMSNorm without weights, also behind the embedding and behind the rotation of q and k.

Its rotation turns the other way round, and its logits are capped.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from dejavu_train.families.base import BlockParts
from dejavu_train.families.dims import Activation, ModelDims, Norm, QkNorm
from dejavu_train.families.standard import StandardFamily

if TYPE_CHECKING:  # torch is not loaded to check the keys of a run
    from torch import Tensor


class NanoChatFamily(StandardFamily):
    classes = {"nanochat": "NanoChat"}
    least_transformers = "5.0"
    activations = {"relu2": Activation.RELU2, "relu": Activation.RELU}
    defaults = {"hidden_act": "relu2", "final_logit_softcapping": 15.0}
    needed = ("head_dim",)
    norm = Norm.RMS_NORM_PLAIN
    turns_part = False
    maps = ("fc1", "fc2", "activation_fn")

    @property
    def structure(self) -> tuple[str, ...]:
        return (*super().structure, "final_logit_softcapping")

    def dims(self, values: Mapping[str, Any], name: str) -> ModelDims:
        cap = self.given(values)["final_logit_softcapping"]
        return replace(
            super().dims({**values, "mlp_bias": self.given(values)["attention_bias"]}, name),
            qk_norm=QkNorm.BEHIND,
            embedding_norm=True,
            logit_cap=float(cap or 0),
        )

    def stored_tensors(self, values: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        made = super().stored_tensors(values)
        return {name: shape for name, shape in made.items() if not ("fc" in name and name.endswith("bias"))}

    def blocks(self, model: Any) -> list[BlockParts]:
        blocks = super().blocks(model)
        return [replace(each, norm_q=each.attention.q_norm, norm_k=each.attention.k_norm) for each in blocks]

    def rotation(self, model: Any) -> "Callable[[Tensor, Tensor], Tensor]":
        return partial(_rotate_back, model.model.rotary_emb)

    def embed(self, model: Any, inputs: "Tensor", positions: "Tensor") -> "Tensor":
        normed: Tensor = model.model.norm(super().embed(model, inputs, positions))
        return normed

    def embeddings(self, model: Any) -> list[Any]:
        return [model.model.embed_tokens, model.model.norm]


def _rotate_back(rotary: Any, x: "Tensor", positions: "Tensor") -> "Tensor":
    from dejavu_train.families.block import turn

    cos, sin = rotary(x, positions)
    return turn(x, cos, -sin)
