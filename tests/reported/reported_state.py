"""Reported faults of a model's state: of a call among others, of a module, and of what follows from weights."""

import copy
import pickle
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from bundles import make_bundle
from conftest import save_tiny_opt
from four_bit_models import four_bits
from reported_case import FOUR, FOUR_TRUE, GREEDY, IDS, TRUE, TURN, Case, Row, agree, every, refusal, results
from torch import nn
from torch.nn.utils import parametrize

from dejavu_train import SparseOPTForCausalLM
from dejavu_train.models.load import load_model

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

    return every(one, FOUR)


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
            with around.disable_adapter():
                without = agree(around, case.dense())
            inner = case.dense()
            with_lora(inner, targets)
            return without and agree(around, dense) and agree(case.sparse(backend, case.full, inner), dense)

        return every(one, FOUR)

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
        model = SparseOPTForCausalLM.from_model(four_bits(load_model(str(folder))), bundle, backend)
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

        return every(one, FOUR)

    return call


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

    def one(backend: str) -> bool:
        with torch.inference_mode():
            model = case.sparse(backend, case.full)
            inside = results(model)[1]
        return agree(model, case.dense()) and results(model)[1] == inside

    return every(one, FOUR)


ROWS = (
    Row("K1", "threads: each text as alone, nothing left behind", threads_leave_nothing, FOUR_TRUE),
    Row("K1", "an error within a call leaves the next ones alone", an_error_within_a_call, TRUE),
    Row("K1", "the dense model while a sparse one around it runs", the_dense_model_beside_a_sparse_one),
    Row("K2", "LoRA of q and v", lora(["q_proj", "v_proj"]), FOUR_TRUE),
    Row("K2", "LoRA of fc1 and fc2", lora(["fc1", "fc2"]), FOUR_TRUE),
    Row("K2", "LoRA of out and k", lora(["out_proj", "k_proj"]), FOUR_TRUE),
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
    Row("K3", "deepcopy", copied(copy.deepcopy), FOUR_TRUE),
    Row("K3", "pickle", copied(lambda model: pickle.loads(pickle.dumps(model))), FOUR_TRUE),
    Row("K3", "mask with a second stage gives every weight its gradient", without_gradient, []),
    Row("K3", "gradients of adapters around gather", gradients_of_adapters_alone),
    Row("K3", "a model that inference mode made", made_in_inference_mode, FOUR_TRUE),
)
