"""The keywords of transformers' ``from_pretrained``: which are taken, which change nothing here, which are refused.

A keyword with its default value passes, whatever its row says.
"""

import dataclasses
import difflib
import logging
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from dejavu_train.families import ModelDims, dims_of
from dejavu_train.families.base import family_named
from dejavu_train.ground.errors import UserError
from dejavu_train.models.hub import KEYWORDS as HUB

logger = logging.getLogger(__name__)

TAKEN = (  # by from_pretrained of the dense class
    "attn_implementation", "max_memory", "offload_folder", "offload_buffers", "generation_config", "disable_mmap",
    "tqdm_class",
)  # fmt: skip
OWN = (  # of our from_pretrained, by name
    "predictors", "backend", "sparse_from", "dtype", "device", "device_map", "predictor_class", "guard",
)  # fmt: skip
WITHIN = ("subfolder", "config", "output_loading_info")  # by it, among other keywords
PRIVATE = ("_from_auto", "_from_pipeline", "_commit_hash")  # that transformers passes itself

_DENSE = "load the model by AutoModelForCausalLM.from_pretrained and give it to {name}.from_model"
_SAVED = "load the model so by AutoModelForCausalLM.from_pretrained, save_pretrained it, and give that folder"
_ADAPTER = "load the adapter with peft, merge it (merge_and_unload), and give the model to {name}.from_model"
_QUANTISED = "give the folder that python -m dejavu_train.quantize --model MODEL --output FOLDER writes"
_KERNELS = "leave it out: the backends bring their own kernels"
_ALONE = "leave it out: a sparse model is loaded by one process; device_map lays a large one over several GPUs"

IGNORED = {  # why they change nothing
    "trust_remote_code": "no code is fetched",
    "code_revision": "no code is fetched",
    "low_cpu_mem_usage": "weights always go from the file to their place",
    "_fast_init": "weights always go from the file to their place",
    "offload_state_dict": "weights always go from the file to their place",
    "experts_implementation": "a sparse model has no experts",
    "use_auth_token": "its name is token now",
    "mirror": "HF_ENDPOINT names another hub",
    "proxies": "HTTPS_PROXY in the environment names a proxy",
    "resume_download": "a download that broke off always goes on",
}
REFUSED = {  # what to do instead; {name} is the class
    "quantization_config": _QUANTISED,
    "load_in_8bit": _QUANTISED,
    "load_in_4bit": _QUANTISED,
    "state_dict": _DENSE,
    "key_mapping": _SAVED,
    "variant": _SAVED,
    "gguf_file": _SAVED,
    "from_tf": _SAVED,
    "from_flax": _SAVED,
    "ignore_mismatched_sizes": "a bundle belongs to exactly its weights; leave it out",
    "use_safetensors": "leave it out: safetensors are read where there are any",
    "weights_only": "leave it out: nothing is unpickled but tensors",
    "adapter_kwargs": _ADAPTER,
    "adapter_name": _ADAPTER,
    "distributed_config": _ALONE,
    "device_mesh": _ALONE,
    "tp_plan": _ALONE,
    "tp_size": _ALONE,
    "use_kernels": _KERNELS,
    "kernel_config": _KERNELS,
    "allow_all_kernels": _KERNELS,
    "fusion_config": _KERNELS,
}
DEFAULTS = {"use_safetensors": True, "weights_only": True, "adapter_name": "default"}
# Of a config beside what its family names: what decides which tensors there are. The rest may be given as keywords.
STRUCTURE = ("tie_word_embeddings", "model_type", "architectures", "transformers_version")


@dataclasses.dataclass(frozen=True)
class SortedKeywords:
    """Keywords by where they go.

    Attributes:
        hub: to the hub.
        options: to ``from_pretrained`` of the dense class.
        attributes: into the model's config.
        subfolder: of the model's folder or repository.
        loading_info: whether what transformers says of the loading comes back as well.
    """

    hub: dict[str, Any]
    options: dict[str, Any]
    attributes: dict[str, Any]
    subfolder: str
    loading_info: bool


def refuse_keywords(keywords: Mapping[str, Any], name: str) -> None:
    """Raise :class:`UserError` for a keyword of ``REFUSED``, in the name of a class."""
    for key, value in keywords.items():
        if key in REFUSED and _says_something(key, value):
            raise UserError(f"{name}.from_pretrained takes no {key}; {REFUSED[key].format(name=name)}")


def _says_something(key: str, value: Any) -> bool:
    return value is not None and value is not False and value != DEFAULTS.get(key) and value != {}


def sort_keywords(keywords: Mapping[str, Any], name: str, kind: str) -> SortedKeywords:
    """Say where each keyword goes. One logged line for each that changes nothing.

    Args:
        keywords: of ``from_pretrained``.
        name: of the class, to show.
        kind: the ``model_type`` of the dense model.
    Raises:
        UserError: a keyword that nobody knows.
    """
    hub: dict[str, Any] = {}
    options: dict[str, Any] = {}
    attributes: dict[str, Any] = {}
    structure = {*family_named(kind, name).structure, *STRUCTURE}
    known = set(CONFIG_MAPPING[kind]().to_dict()) - structure
    for key, value in keywords.items():
        if key in HUB:
            hub[key] = value
        elif key in TAKEN:
            options |= {key: value} if value is not None else {}
        elif key in WITHIN or key in PRIVATE or key in REFUSED:
            continue
        elif key in IGNORED:
            if _says_something(key, value):
                logger.warning("%s.from_pretrained: %s changes nothing, %s", name, key, IGNORED[key])
        elif key in known:
            attributes[key] = value
        else:
            raise UserError(_unknown(key, name, known, structure))
    return SortedKeywords(
        {key: value for key, value in hub.items() if value is not None},
        options,
        _of_config(keywords.get("config"), known) | attributes,
        str(keywords.get("subfolder") or ""),
        bool(keywords.get("output_loading_info")),
    )


def check_config(config: Any, shape: ModelDims, name: str, kind: str) -> None:
    """Raise :class:`UserError` for a ``config=`` that is none, or of other sizes than the model's."""
    if config is None:
        return
    if not isinstance(config, PreTrainedConfig):
        raise UserError(
            f"config must be an {CONFIG_MAPPING[kind].__name__}, got {config!r}; AutoConfig.from_pretrained reads one"
        )
    if dims_of(config, "config") != shape:
        raise UserError(f"config has other sizes than {name}; leave it out, or give the config of this model")


def hub_keywords(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords that say where on the hub, the others left out."""
    return {key: keywords[key] for key in HUB if keywords.get(key) is not None}


def _of_config(config: Any, known: set[str]) -> dict[str, Any]:
    values = config.to_dict() if isinstance(config, PreTrainedConfig) else {}
    return {key: value for key, value in values.items() if key in known and key != "dtype"}


def _unknown(key: str, name: str, known: set[str], structure: set[str]) -> str:
    if key in structure:
        return f"{name}.from_pretrained takes no {key}: it is that of the weights; leave it out"
    close = difflib.get_close_matches(key, [*OWN, *HUB, *TAKEN, *WITHIN, *known], 1)
    remedy = f"did you mean {close[0]}?" if close else f"where it is one of transformers, {_DENSE.format(name=name)}"
    return f"{name}.from_pretrained takes no {key}; {remedy}"
