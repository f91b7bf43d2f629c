"""Faults that others reported, a row each: the kind, the call, the right value. On the tiny model."""

import copy
import dataclasses
import io
import logging
import math
import pickle
import shutil
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from bundles import make_bundle
from conftest import save_tiny_opt
from forgotten import forget_modules
from four_bit_models import four_bits
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.utils import parametrize
from transformers import AutoModelForCausalLM, OPTForCausalLM

from dejavu_train import Bundle, SparseOPTForCausalLM
from dejavu_train.errors import UserError
from dejavu_train.models.config_values import read_dims
from dejavu_train.models.opt import load_opt, weight_hash
from dejavu_train.models.stored import check_folder

IDS = torch.tensor([[2, 30, 31, 200, 33, 170, 91]])
GREEDY = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
ALL = ("mask", "gather", "auto")
TURN = 2.0  # by what hooks and parametrisations multiply


@dataclasses.dataclass(frozen=True)
class Row:
    """What was reported: its kind in the list of kinds, in words, and the call whose value must be ``right``."""

    kind: str
    what: str
    call: Callable[["Case"], Any]
    right: Any = True


@dataclasses.dataclass
class Case:
    """What rows start from: the tiny model's folder, bundles for it, and a folder of your own."""

    folder: Path
    own: Path
    bundle: Bundle
    cascade: Bundle

    @property
    def full(self) -> Bundle:
        return self.bundle.at(mlp_density=1.0, head_density=1.0)

    def dense(self, dtype: torch.dtype = torch.float32) -> OPTForCausalLM:
        return OPTForCausalLM.from_pretrained(self.folder, dtype=dtype).eval()

    def sparse(self, backend: str, bundle: Bundle | None = None, dense: Any = None, **options: Any) -> Any:
        return SparseOPTForCausalLM.from_model(dense or self.dense(), bundle or self.bundle, backend, **options)

    def tensors(self) -> dict[str, torch.Tensor]:
        return load_file(self.folder / "model.safetensors")

    def copied(self, tensors: dict[str, torch.Tensor] | None = None) -> Path:
        """The model's folder anew, with other tensors where they are given."""
        folder = self.own / "model"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self.folder, folder)
        if tensors is not None:
            save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return folder


@torch.no_grad()
def results(model: Any) -> tuple[torch.Tensor, list[int]]:
    """Logits of a forward pass and a text."""
    text = model.generate(input_ids=IDS, attention_mask=torch.ones_like(IDS), **GREEDY)
    return model(IDS).logits, text[0].tolist()


def agree(model: Any, other: Any) -> bool:
    """Whether two models give the same logits, within 1e-3 of the largest, and the same text."""
    (ours, text), (theirs, wanted) = results(model), results(other)
    return bool((ours - theirs).abs().max() <= 1e-3 * theirs.abs().max()) and text == wanted


def refusal(call: Callable[[], Any]) -> str | None:
    """The line of a refusal. None where there was none."""
    try:
        call()
    except UserError as error:
        return str(error)
    return None


def every(call: Callable[[str], Any]) -> dict[str, Any]:
    """The value for each backend."""
    return {backend: call(backend) for backend in ALL}


TRUE = dict.fromkeys(ALL, True)
PLAIN = dict.fromkeys(("mask", "gather"), True)

# ------------------------------------------------------------------------------------- K1: state of a call is shared


def threads_leave_nothing(case: Case) -> dict[str, Any]:
    def one(backend: str) -> Any:
        dense = case.dense()
        model = case.sparse(backend, case.cascade, dense, sparse_from="prompt")
        prompts = [torch.tensor([[2] + [17 + i] * n]) for i, n in enumerate((3, 40, 9, 25))]

        def text(ids: torch.Tensor) -> list[int]:
            return model.generate(ids, attention_mask=torch.ones_like(ids), **GREEDY)[0].tolist()

        alone = [text(ids) for ids in prompts]
        with ThreadPoolExecutor(4) as pool:
            together = list(pool.map(text, prompts * 3))
        hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in dense.modules())
        exchanged = [name for name, m in dense.named_modules() if "forward" in vars(m)]
        return together == alone * 3 and (hooks, exchanged, model.sparse_from) == (0, [], "prompt")

    return every(one)


def an_error_within_a_call(case: Case) -> dict[str, Any]:
    class Broken:
        def put(self, value: Any) -> None:
            raise RuntimeError("a streamer that raises")

        def end(self) -> None: ...

    def one(backend: str) -> Any:
        model = case.sparse(backend, sparse_from="prompt")
        before = results(model)[1]
        with pytest.raises(RuntimeError, match="raises"):
            model.generate(IDS, streamer=Broken(), **GREEDY)
        return results(model)[1] == before and model.sparse_from == "prompt"

    return every(one)


def the_dense_model_beside_a_sparse_one(case: Case) -> bool:
    """Its logits while the sparse model that was made around it generates."""
    dense = case.dense()
    model, wanted = case.sparse("mask", case.cascade, dense), dense(IDS).logits.detach()
    over, seen = threading.Event(), []

    def watch() -> None:
        with torch.no_grad():
            while not over.is_set():
                seen.append(float((dense(IDS).logits - wanted).abs().max()))

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        for _ in range(6):
            model.generate(IDS, **GREEDY)
    finally:
        over.set()
        watcher.join()
        sys.setswitchinterval(before)
    return max(seen) < 1e-3


# ----------------------------------------------------------------------- K2: a module is more than the weight it has


def with_lora(model: Any, targets: list[str]) -> Any:
    from peft import LoraConfig, get_peft_model

    made = get_peft_model(model, LoraConfig(r=4, lora_alpha=16, target_modules=targets, init_lora_weights=False))
    generator = torch.Generator().manual_seed(0)
    for name, parameter in sorted(made.named_parameters()):
        if "lora_" in name:
            parameter.data.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    return made.eval()


def lora(targets: list[str]) -> Callable[[Case], dict[str, Any]]:
    def call(case: Case) -> dict[str, Any]:
        dense = with_lora(case.dense(), targets)

        def one(backend: str) -> bool:
            around = with_lora(case.sparse(backend, case.full), targets)
            inner = case.dense()
            with_lora(inner, targets)
            return agree(around, dense) and agree(case.sparse(backend, case.full, inner), dense)

        return every(one)

    return call


def counts_or_refused(change: Callable[[Any], Any]) -> Callable[[Case], dict[str, Any]]:
    """A change to fc2 of layer 1, after a first use: the dense model's results with it, or one line."""

    def call(case: Case) -> dict[str, Any]:
        dense = case.dense()
        change(dense.model.decoder.layers[1].fc2)

        def one(backend: str) -> bool:
            model = case.sparse(backend, case.full)
            results(model)
            change(model.model.decoder.layers[1].fc2)
            said: list[bool] = []
            line = refusal(lambda: said.append(agree(model, dense)))
            return "fc2" in line if line is not None else said[0]

        return every(one)

    return call


class Turned(nn.Module):
    """A parametrisation that multiplies."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * TURN


def a_parametrised_projection_of_a_gpus_engine(case: Case) -> bool:
    """It counts while it is there, and the module is as before once it is removed."""
    dense, model = case.dense(), case.sparse("triton", case.full, ops="reference")
    for each in (dense, model):
        parametrised(each.model.decoder.layers[0].self_attn.q_proj)
    counted = agree(model, dense)
    for each in (dense, model):
        parametrize.remove_parametrizations(each.model.decoder.layers[0].self_attn.q_proj, "weight", False)
    return counted and agree(model, dense)


def hooked(module: nn.Module) -> None:
    module.register_forward_hook(lambda _module, _args, output: output * TURN)


def parametrised(module: nn.Module) -> None:
    parametrize.register_parametrization(module, "weight", Turned())


# ------------------------------------------------------------------------------------ K3: what follows from a weight


def edited(way: str) -> Callable[[Case], dict[str, Any]]:
    """Weights and biases changed after a first use. A cascade, and means of heads, follow from them."""

    def write(model: Any) -> None:
        block, other = model.model.decoder.layers[0], model.model.decoder.layers[1]
        with torch.no_grad():
            if way == "state":
                state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
                for name in state:
                    if "layers.0.fc1" in name or "layers.1.self_attn.out_proj" in name:
                        state[name] *= 0.6
                model.load_state_dict(state)
            else:
                for parameter in (*block.fc1.parameters(), *other.self_attn.out_proj.parameters()):
                    parameter.mul_(0.6)

    def call(case: Case) -> dict[str, Any]:
        bundle = make_bundle(case.folder, cascade=True, means=True).at(0.4, 0.5)
        dense = case.dense()
        write(dense)

        def one(backend: str) -> bool:
            model = case.sparse(backend, bundle)
            results(model)
            write(model)
            return agree(model, case.sparse("mask", bundle, dense))

        return every(one)

    return call


def scales_of_a_four_bit_matrix(case: Case) -> dict[str, Any]:
    """Twice the scales are twice the weight, also after a first use, and a copy has its own."""
    sizes = {"hidden_size": 64, "word_embed_proj_dim": 64}
    folder = save_tiny_opt(case.own / "wide", **sizes)
    bundle = make_bundle(folder).at(1.0, 1.0)

    def one(backend: str) -> bool:
        model = SparseOPTForCausalLM.from_model(four_bits(load_opt(str(folder))), bundle, backend)
        fc2 = model.model.decoder.layers[1].fc2
        before, halved = fc2.weight.clone(), pickle.loads(pickle.dumps(model))
        logits = results(model)[0]
        fc2.scales.mul_(2)
        halved.model.decoder.layers[1].fc2.scales.mul_(0.5)
        weights = (fc2.weight / before, halved.model.decoder.layers[1].fc2.weight / before)
        moved = (results(model)[0] - logits).abs().max() > 1e-2
        return bool(moved) and [float(ratio.nanmedian()) for ratio in weights] == [2.0, 0.5]

    return {backend: one(backend) for backend in ("mask", "gather")}


def copied(make: Callable[[Any], Any]) -> Callable[[Case], dict[str, Any]]:
    """A copy works on its own weights, and leaves the original's alone."""

    def call(case: Case) -> dict[str, Any]:
        def one(backend: str) -> bool:
            model = case.sparse(backend)
            before = results(model)[1]
            other = make(model)
            same = results(other)[1] == before
            changed = case.dense()
            for each in (other, changed):
                with torch.no_grad():
                    each.model.decoder.layers[0].fc1.weight.mul_(-1)
                    each.model.decoder.layers[0].fc2.bias.add_(1)
            return same and agree(other, case.sparse("mask", None, changed)) and results(model)[1] == before

        return every(one)

    return call


def saved_by_torch(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def without_gradient(case: Case) -> list[str]:
    model = case.sparse("mask", case.cascade)
    model(IDS, labels=IDS).loss.backward()
    return [name for name, parameter in model.named_parameters() if parameter.grad is None]


def gradients_of_adapters_alone(case: Case) -> bool:
    """Adapters around gather freeze all weights. A backward pass is refused in the words of the backend."""
    model = with_lora(case.sparse("gather"), ["fc1"])
    line = refusal(lambda: model(IDS, labels=IDS).loss.backward())
    return line is not None and "gives no gradients" in line


def made_in_inference_mode(case: Case) -> dict[str, Any]:
    """Weights that count no edits: the model is made, used, and used outside."""

    def one(options: dict[str, Any]) -> bool:
        with torch.inference_mode():
            model = SparseOPTForCausalLM.from_model(case.dense(), case.full, **options)
            inside = results(model)[1]
        return agree(model, case.dense()) and results(model)[1] == inside

    made = {name: one({"backend": name}) for name in ALL}
    return made | {"triton": one({"backend": "triton", "ops": "reference"})}


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
    from dejavu_train.models.opt import load_tokenizer

    config = InferConfig(model=str(case.folder), bundle="", generate="</s>the model")
    ids = run._prompt(config, load_opt(str(case.folder)), load_tokenizer(str(case.folder)))
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
    Row("K1", "threads: each text as alone, nothing left behind", threads_leave_nothing, TRUE),
    Row("K1", "an error within a call leaves the next ones alone", an_error_within_a_call, TRUE),
    Row("K1", "the dense model while a sparse one around it runs", the_dense_model_beside_a_sparse_one),
    Row("K2", "LoRA of q and v", lora(["q_proj", "v_proj"]), TRUE),
    Row("K2", "LoRA of fc1 and fc2", lora(["fc1", "fc2"]), TRUE),
    Row("K2", "LoRA of out and k", lora(["out_proj", "k_proj"]), TRUE),
    Row("K2", "a forward hook on fc2", counts_or_refused(hooked), TRUE),
    Row("K2", "a parametrisation of fc2", counts_or_refused(parametrised), TRUE),
    Row("K2", "a parametrised q of a GPU's engine", a_parametrised_projection_of_a_gpus_engine),
    Row("K3", "load_state_dict after a first use", edited("state"), TRUE),
    Row("K3", "weights changed in place after a first use", edited("in place"), TRUE),
    Row(
        "K3",
        "scales of a 4-bit matrix changed in place",
        scales_of_a_four_bit_matrix,
        dict.fromkeys(("mask", "gather"), True),
    ),
    Row("K3", "deepcopy", copied(copy.deepcopy), TRUE),
    Row("K3", "pickle", copied(lambda model: pickle.loads(pickle.dumps(model))), TRUE),
    Row("K3", "torch.save of the model", copied(saved_by_torch), TRUE),
    Row("K3", "mask with a second stage gives every weight its gradient", without_gradient, []),
    Row("K3", "gradients of adapters around gather", gradients_of_adapters_alone),
    Row("K3", "a model that inference mode made", made_in_inference_mode, TRUE | {"triton": True}),
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


@pytest.fixture
def case(tiny_opt, tmp_path):
    logging.disable(logging.WARNING)
    made = make_bundle(tiny_opt).at(0.3, 0.5)
    yield Case(tiny_opt, tmp_path, made, make_bundle(tiny_opt, cascade=True).at(0.4, 0.5))
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("row", ROWS, ids=[f"{row.kind}-{row.what.replace(' ', '-')}" for row in ROWS])
def test_what_was_reported(case, row):
    assert row.call(case) == row.right
