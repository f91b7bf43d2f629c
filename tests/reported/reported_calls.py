"""Reported faults of what is read and asked: files, numbers, refusals, transformers' calls, the commands."""

import copy
import dataclasses
import math
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from forgotten import forget_modules
from reported_case import GREEDY, IDS, TRUE, Case, Row, agree, every, refusal, results
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, OPTForCausalLM

from dejavu_train import Bundle, SparseOPTForCausalLM
from dejavu_train.models.config_values import read_dims
from dejavu_train.models.load import load_model, weight_hash
from dejavu_train.models.stored import check_folder

# -------------------------------------------------------------------------------- K4: the files that are really read


def an_index_beside_other_weights(case: Case) -> bool:
    """Shards with an index, and a model.safetensors of other weights that transformers takes."""
    folder = case.copied()
    (folder / "model.safetensors").unlink()
    case.dense().save_pretrained(folder, max_shard_size="60KB")
    other = {name: tensor * 1.5 for name, tensor in case.tensors().items()}
    save_file(other, folder / "model.safetensors", {"format": "pt"})
    line = refusal(lambda: SparseOPTForCausalLM.from_pretrained(folder, case.bundle, backend="mask"))
    return line is not None


def a_head_under_its_own_name(case: Case) -> bool:
    """A tied embedding that is stored as the LM head alone, as some tools do: what loads passes the check."""
    tensors = case.tensors()
    tensors["lm_head.weight"] = tensors.pop("model.decoder.embed_tokens.weight")
    folder = case.copied(tensors)
    loads = OPTForCausalLM.from_pretrained(folder)
    right = torch.equal(loads.lm_head.weight, tensors["lm_head.weight"]) and torch.equal(
        loads.model.decoder.embed_tokens.weight, tensors["lm_head.weight"]
    )
    line = refusal(lambda: check_folder(str(folder), read_dims(str(folder))))
    return line is None if right else line is not None


def saved_over_its_shards(case: Case) -> bool:
    folder = case.copied()
    (folder / "model.safetensors").unlink()
    case.dense().save_pretrained(folder, max_shard_size="60KB")
    model = SparseOPTForCausalLM.from_pretrained(folder, case.bundle, backend="mask")
    with torch.no_grad():
        model.model.decoder.layers[0].fc1.weight.mul_(1.25)
    model.save_pretrained(folder)
    return agree(SparseOPTForCausalLM.from_pretrained(folder, backend="mask"), model)


# --------------------------------------------------------------------------------------- K5: identity, not spelling


def hash_of(rename: Callable[[str], str]) -> Callable[[Case], bool]:
    def call(case: Case) -> bool:
        folder = case.copied({rename(name): tensor for name, tensor in case.tensors().items()})
        return refusal(lambda: case.bundle.check_model(str(folder))) is None

    return call


def one_changed_number(case: Case) -> bool:
    tensors = case.tensors()
    next(iter(tensors.values())).view(-1)[0] += 1
    return "other weights" in str(refusal(lambda: case.bundle.check_model(str(case.copied(tensors)))))


# -------------------------------------------------------------------------------- K6, K7: numbers that are not finite


def a_weight_that_is_no_number(case: Case) -> dict[str, Any]:
    dense = case.dense()
    with torch.no_grad():
        dense.model.decoder.layers[1].fc2.bias[3] = math.nan

    def one(backend: str) -> bool:
        model = case.sparse(backend, None, dense)
        lines = [refusal(lambda: model.generate(IDS, **GREEDY)), refusal(lambda: model(IDS))]
        return all(line is not None and "finite" in line for line in lines)

    return every(one)


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


def what_a_streamer_is_given(case: Case) -> dict[str, Any]:
    """The prompt once, and the text once, also where the engine leaves the call to gather."""

    class Kept:
        def __init__(self) -> None:
            self.tokens: list[int] = []

        def put(self, value: torch.Tensor) -> None:
            self.tokens += value.flatten().tolist()

        def end(self) -> None: ...

    def one(backend: str) -> bool:
        model = case.sparse(backend)
        for asked in ({}, {"min_new_tokens": 4}, {"repetition_penalty": 1.2}):
            kept = Kept()
            if model.generate(IDS, streamer=kept, **GREEDY, **asked)[0].tolist() != kept.tokens:
                return False
        return True

    return every(one)


# --------------------------------------------------------------------------------------------- K9: what is optional


def without_numba(case: Case) -> tuple[str, bool]:
    with pytest.MonkeyPatch.context() as patch, forget_modules(lambda name: name.startswith("dejavu_train.engine.cpu")):
        patch.setitem(sys.modules, "numba", None)
        model = SparseOPTForCausalLM.from_pretrained(case.folder, case.bundle)
        return model.backend, refusal(lambda: case.sparse("cpu")) is not None


# ------------------------------------------------------------------------------------------- K10: transformers' calls


def the_loss_by_items(case: Case) -> dict[str, Any]:
    """num_items_in_batch divides the sum of losses, as Trainer asks for where it accumulates gradients."""

    def one(backend: str) -> bool:
        model = case.sparse(backend, case.full)
        with torch.no_grad():
            mean, of_items = model(IDS, labels=IDS).loss, model(IDS, labels=IDS, num_items_in_batch=12).loss
        return math.isclose(float(mean) * (IDS.shape[1] - 1) / 12, float(of_items), rel_tol=1e-4)

    return every(one)


def stop_tokens_as_a_tensor(case: Case) -> dict[str, Any]:
    def one(backend: str) -> bool:
        model = case.sparse(backend)
        stop = results(model)[1][IDS.shape[1] + 2]
        asked = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 1}
        texts = [
            model.generate(IDS, eos_token_id=torch.tensor([stop, 5]), **asked),
            model.generate(IDS, eos_token_id=[stop, 5], **asked),
        ]
        return torch.equal(*texts) and int(texts[0][0, -1]) == stop

    return every(one)


def the_stored_dtype(case: Case) -> list[str]:
    folder = case.copied()
    case.dense(torch.float16).save_pretrained(folder)
    bundle = dataclasses.replace(case.bundle, weight_hash=weight_hash(str(folder)))
    made = SparseOPTForCausalLM.from_pretrained(folder, bundle, backend="mask", dtype="auto")
    made.save_pretrained(case.own / "joint")
    again = AutoModelForCausalLM.from_pretrained(case.own / "joint", dtype="auto")
    return [str(made.dtype), str(again.dtype), type(again).__name__]


# ---------------------------------------------------------------------------------------- K11: evaluated as it was made


def moved(case: Case, bundle: Bundle) -> Any:
    """What infer.py generates and times with, by its defaults."""
    from dejavu_train.evaluation.calibrated import timed
    from dejavu_train.evaluation.config import InferConfig

    folder = case.own / "bundle"
    bundle.save_pretrained(folder)
    found = Bundle.from_pretrained(folder)
    return found, timed(InferConfig(model=str(case.folder), bundle=str(folder)), found)


def densities_of_infer(case: Case) -> bool:
    made, used = moved(case, case.bundle.at(0.05, 0.5))
    return all(math.isclose(used.mean_density(t), made.mean_density(t), abs_tol=1e-6) for t in ("mlp", "heads"))


def top_k_of_infer(case: Case) -> bool:
    made, used = moved(case, case.bundle.at(0.1, top_k=True))
    return {key: spec.top_k for key, spec in used.specs.items()} == {k: s.top_k for k, s in made.specs.items()}


def neurons_alone(case: Case) -> bool:
    """A bundle without heads' predictors is used as it is."""
    specs = {key: spec for key, spec in case.bundle.specs.items() if key[1] == "mlp"}
    tensors = {name: tensor for name, tensor in case.bundle.tensors.items() if ".mlp." in name}
    made, used = moved(case, dataclasses.replace(case.bundle, specs=specs, tensors=tensors))
    return used.targets == ["mlp"] and used.mean_density("mlp") == made.mean_density("mlp")


# -------------------------------------------------------------------------------------------------- K13, K16, K17


def a_joint_folder_that_moved(case: Case) -> bool:
    """Model and bundle saved together name each other wherever they lie."""
    from dejavu_train.bundle.folder import named_model

    first, second = case.own / "first", case.own / "second"
    case.sparse("mask").save_pretrained(first)
    shutil.move(first, second)
    named = named_model(str(second / "predictors"))
    return Path(named).is_dir() and Path(named).resolve() == second.resolve()


def a_prompt_with_its_own_start(case: Case) -> list[int]:
    from dejavu_train.evaluation import run
    from dejavu_train.evaluation.config import InferConfig
    from dejavu_train.models.load import load_tokenizer

    config = InferConfig(model=str(case.folder), bundle="", generate="</s>the model")
    ids = run._prompt(config, load_model(str(case.folder)), load_tokenizer(str(case.folder)))
    return [int(token) for token in ids[0, :2]].count(2)


def rows_of_all_ranks(rows: int, world: int) -> Callable[[Case], list[int]]:
    """Which rows the ranks read without shuffling, as validation does."""

    def call(_: Case) -> list[int]:
        from dejavu_train.data.datamodule import BlockShuffled

        class Reader:
            def __init__(self) -> None:
                self.rows = rows

            def blocks(self) -> list[tuple[int, int]]:
                return [(start, min(start + 100, rows)) for start in range(0, rows, 100)]

        ranks = [BlockShuffled({"x": (Reader(), "x")}, 32, r, world, pool_blocks=0) for r in range(world)]  # type: ignore[dict-item]
        read = [row for rank in ranks for low, high in rank.row_ranges(rank.rank) for row in range(low, high)]
        return sorted(read)

    return call


ROWS = (
    Row("K4", "an index beside a model.safetensors of other weights", an_index_beside_other_weights),
    Row("K4", "a tied embedding stored as the head", a_head_under_its_own_name),
    Row("K4", "save_pretrained over the shards it came from", saved_over_its_shards),
    Row("K5", "names without model.", hash_of(lambda name: name.removeprefix("model."))),
    Row("K5", "one changed number", one_changed_number),
    Row("K6", "a weight that is not a number", a_weight_that_is_no_number, TRUE),
    Row("K7", "attention scores beyond fp16", large_scores_in_half_precision, TRUE),
    Row("K8", "set_bundle with a path", a_bundle_by_its_path, TRUE),
    Row("K8", "a streamer's prompt", what_a_streamer_is_given, TRUE),
    Row("K9", "no numba", without_numba, ("gather", True)),
    Row("K10", "num_items_in_batch", the_loss_by_items, TRUE),
    Row("K10", "stop tokens as a tensor", stop_tokens_as_a_tensor, TRUE),
    Row("K10", 'dtype="auto"', the_stored_dtype, ["torch.float16", "torch.float16", "SparseOPTForCausalLM"]),
    Row("K11", "infer.py: the bundle's densities", densities_of_infer),
    Row("K11", "infer.py: top_k", top_k_of_infer),
    Row("K11", "infer.py: no heads' predictors", neurons_alone),
    Row("K13", "a joint folder that was moved", a_joint_folder_that_moved),
    Row("K16", "a prompt that begins with the start token", a_prompt_with_its_own_start, 1),
    Row("K17", "999 validation rows, two ranks", rows_of_all_ranks(999, 2), list(range(999))),
    Row("K17", "1,001 validation rows, three ranks", rows_of_all_ranks(1001, 3), list(range(1001))),
)
