"""Reported faults of what is asked: numbers, refusals, what is optional, transformers' calls, the commands."""

import copy
import dataclasses
import shutil
from typing import Any

import torch
from reported_case import IDS, TRUE, Case, Row, every, refusal, results
from transformers import AutoModelForCausalLM

from dejavu_train import SparseOPTForCausalLM
from dejavu_train.models.load import load_model, weight_hash

# -------------------------------------------------------------------------------- K7: numbers that are not finite


def large_scores_in_half_precision(case: Case) -> dict[str, Any]:
    """Scores beyond 65,504, which attention in fp16 cannot hold: as the same weights in fp32 select and mix."""
    dense = case.dense(torch.float16)
    for block in dense.model.decoder.layers:
        for name in ("q_proj", "k_proj"):
            for parameter in block.self_attn.get_submodule(name).parameters():
                parameter.data.mul_(250)
    wide = copy.deepcopy(dense).float()
    wanted = wide(IDS).logits.detach()

    def one(backend: str) -> bool:
        got = case.sparse(backend, case.full, copy.deepcopy(dense))(IDS).logits.float().detach()
        return bool((got - wanted).abs().mean() < 0.05 * wanted.std())

    return every(one)


# -------------------------------------------------------------------------------- K8: refused before anything changes


def a_bundle_by_its_path(case: Case) -> dict[str, Any]:
    """set_bundle takes a bundle. Anything else leaves the model as it was."""

    def one(backend: str) -> bool:
        model = case.sparse(backend)
        before = results(model)[1]
        line = refusal(lambda: model.set_bundle("checkpoints/bundle"))
        return line is not None and "undle" in line and results(model)[1] == before and model.bundle is case.bundle

    return every(one)


# ------------------------------------------------------------------------------------------- K10: transformers' calls


def the_stored_dtype(case: Case) -> list[str]:
    folder = shutil.copytree(case.folder, case.own / "model")
    case.dense(torch.float16).save_pretrained(folder)
    bundle = dataclasses.replace(case.bundle, weight_hash=weight_hash(str(folder)))
    made = SparseOPTForCausalLM.from_pretrained(folder, bundle, backend="mask", dtype="auto")
    made.save_pretrained(case.own / "joint")
    again = AutoModelForCausalLM.from_pretrained(case.own / "joint", dtype="auto")
    return [str(made.dtype), str(again.dtype), type(again).__name__]


# -------------------------------------------------------------------------------------------------- K16: the commands


def a_prompt_with_its_own_start(case: Case) -> list[int]:
    from dejavu_train.evaluation import run
    from dejavu_train.evaluation.config import InferConfig
    from dejavu_train.models.load import load_tokenizer

    config = InferConfig(model=str(case.folder), bundle="", generate="</s>the model")
    ids = run._prompt(config, load_model(str(case.folder)), load_tokenizer(str(case.folder)))
    return [int(token) for token in ids[0, :2]].count(2)


ROWS = (
    Row("K7", "attention scores beyond fp16", large_scores_in_half_precision, TRUE),
    Row("K8", "set_bundle with a path", a_bundle_by_its_path, TRUE),
    Row("K10", 'dtype="auto"', the_stored_dtype, ["torch.float16", "torch.float16", "SparseOPTForCausalLM"]),
    Row("K16", "a prompt that begins with the start token", a_prompt_with_its_own_start, 1),
)
