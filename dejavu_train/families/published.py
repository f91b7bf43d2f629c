"""Published checkpoints whose own code is not part of transformers, and is not run here.

Each alias says by ``model_type`` what that code computes, as a Llama or a Mistral. No one needs ``trust_remote_code``.
A config.json may name an activation that its code does not use. Loading says so in a line.

What was read, as it stood when this file came in. No released weights were run.

- ``sparsellama`` (SparseLLM/prosparse-llama-2-7b, -13b): keys of its configuration, as they were given to this project.
  modeling_sparsellama.py was not at hand.
- ``llama_sparse_relu``: custom_models/sparse_models.py and cfgs/run_cfg of SakanaAI/sparser-faster-llms, whole.
- ``bamboo``: the MLP on Bamboo's model card, and public programs that patch modeling_bamboo.py or spell it out. That
  file itself was not at hand.
- ``minicpm`` (openbmb/MiniCPM-S-1B): public ports of modeling_minicpm.py to other engines. That file itself was not at
  hand.
"""

import logging
import math
import re
from collections.abc import Mapping
from typing import Any

from dejavu_train.families.base import dense_type, families
from dejavu_train.families.dims import ModelDims
from dejavu_train.families.llama import LlamaFamily, MistralFamily
from dejavu_train.ground.errors import UserError

logger = logging.getLogger(__name__)


class SparseLlamaFamily(LlamaFamily):
    """ProSparse: a Llama whose gate is FATReLU. Its config.json says so."""

    classes = {"sparsellama": "Llama"}
    coded_as = "llama"


class SparseLMFamily(LlamaFamily):
    """SakanaAI's SparseLM: a Llama whose gate is ReLU, whatever ``hidden_act`` says.

    ``tracker.*`` and ``metrics_accumulator.*`` beside the weights are counts of its training.
    """

    classes = {"llama_sparse_relu": "Llama"}
    coded_as = "llama"
    computes = "relu"
    extra = (r"^tracker\.", r"^metrics_accumulator\.")

    @property
    def structure(self) -> tuple[str, ...]:
        return (*super().structure, "sparsity_gated_mlp", "sparsity_new_intermediate_size")

    def dims(self, values: Mapping[str, Any], name: str) -> ModelDims:
        if not values.get("sparsity_gated_mlp", True):
            raise UserError(f"{name} has MLPs without a gate (sparsity_gated_mlp), which are not read here")
        neurons, plain = values.get("sparsity_new_intermediate_size"), values.get("intermediate_size")
        if neurons not in (None, plain):
            raise UserError(
                f"{name} has {neurons} neurons (sparsity_new_intermediate_size) and the intermediate_size {plain}; give"
                " both the number that the weights have"
            )
        return super().dims(values, name)


class BambooFamily(MistralFamily):
    """TurboSparse-Mistral and Bamboo: a Mistral with ReLU of both maps, whatever ``hidden_act`` says.

    ``mlp.predictor.*`` are predictors of the origin's own, by which its code leaves neurons out. They are not read
    here: without predictors of this package all neurons are computed.
    """

    classes = {"bamboo": "Mistral"}
    coded_as = "mistral"
    computes = "drelu"
    extra = (r"\.mlp\.predictor\.",)


class MiniCPMFamily(LlamaFamily):
    """MiniCPM with FATReLU: a Llama with three numbers more.

    The embedding is multiplied with ``scale_emb``, what a half of a layer adds with ``scale_depth / sqrt(layers)``, and
    the final norm's output with ``dim_model_base / hidden_size``. RMSNorm does not see how long its input is. So the
    residual stream is divided by the second number from the embedding on, and no layer multiplies anything.
    """

    classes = {"minicpm": "Llama"}
    coded_as = "llama"
    defaults = {
        **LlamaFamily.defaults, "tie_word_embeddings": True, "scale_emb": 1, "scale_depth": 1, "dim_model_base": 1,
    }  # fmt: skip

    @property
    def structure(self) -> tuple[str, ...]:
        return (*super().structure, "scale_emb", "scale_depth", "dim_model_base")

    def dims(self, values: Mapping[str, Any], name: str) -> ModelDims:
        given = self.given(values)
        if given.get("num_experts"):
            raise UserError(f"{name} has experts (num_experts), which are not read here; give a MiniCPM without them")
        for key in ("scale_emb", "scale_depth", "dim_model_base"):
            if isinstance(given[key], bool) or not isinstance(given[key], int | float) or not 0 < given[key] < math.inf:
                raise UserError(f"{key} of {name} must be a number above 0, got {given[key]!r}")
        return super().dims(values, name)


FAMILIES = (SparseLlamaFamily(), SparseLMFamily(), BambooFamily(), MiniCPMFamily())


def is_extra(kind: str, name: str) -> bool:
    """Whether a stored tensor is one that no module reads, of a model of the ``model_type`` ``kind``."""
    extra = getattr(families().get(dense_type(kind)), "extra", ())
    return any(re.search(each, name) for each in extra)


def say_code(values: Mapping[str, Any], name: str) -> None:
    """Log a line where a config.json asks for code of its own, or names an activation that this code does not use."""
    kind = dense_type(values["model_type"])
    if "auto_map" in values:
        logger.warning("%s names code of its own (trust_remote_code), which is not run: %s is known here", name, kind)
    computes = getattr(families().get(kind), "computes", "")
    given = values.get("hidden_act", computes)
    if computes and given != computes:
        logger.warning(
            "config.json of %s says hidden_act %s, the code that it was published with computes %s, and so does this",
            name, given, computes,
        )  # fmt: skip
