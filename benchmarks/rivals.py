"""Times transformers on several GPUs: a device map, whose GPUs take turns, and the tensor parallel plan of a model.

Each rival runs in processes of its own. One that fails, or takes too long, ends alone and leaves its message. The cache
is static, and weights are random. Both ways of generate() are timed: as it is, and compiled, which it does by itself.

`benchmarks.tensor_parallel --rivals` starts these, and writes their rows. By hand, for one of them:

    python -m benchmarks.rivals hf-device-map 66b /tmp/rival --gpus 4 --layers 8
    torchrun --nproc-per-node 4 -m benchmarks.rivals hf-tp-plan afm-4.5b /tmp/rival
"""

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers

from benchmarks.decode_hf import random_model, times_of
from benchmarks.decode_problem import RANKS, SHAPES, STD
from benchmarks.rows import command_line
from dejavu_train.families import ModelDims
from dejavu_train.families.dims import Activation, Norm, Positions
from dejavu_train.ground.errors import first_line

DEVICE_MAP, PLAN = "hf-device-map", "hf-tp-plan"
WAYS = {"as it is": True, "compiled": False}  # the value of disable_compile
OF_LAUNCHERS = ("RANK", "LOCAL_", "WORLD_SIZE", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_")
FOUND = "found.json"
ERROR = re.compile(r"^(?:\[rank\d+\]: )?([\w.]*Error: .+)$", re.MULTILINE)
# For rehearsals.
TINY = ModelDims(64, 256, 4, 8, 400, 256)
SHAPES["tiny"], RANKS["tiny"] = TINY, 16
SHAPES["afm-tiny"], RANKS["afm-tiny"] = dataclasses.replace(
    TINY, n_kv_heads=4, norm=Norm.RMS_NORM, positions=Positions.ROTARY, activation=Activation.RELU2, biases=False
), 16  # fmt: skip


def rivals_of(name: str) -> list[str]:
    """What transformers can do with a shape of this name: it has no plan for OPT."""
    return [PLAN] if name.startswith("afm") else [DEVICE_MAP]


def layers_of(rival: str, world: int, counts: list[int]) -> list[int]:
    """Numbers of layers for which time grows evenly: with a device map as many on each GPU, so that hops are alike."""
    if rival == PLAN or len(counts) == 1:
        return counts
    return [world, 2 * world]


def times_apart(
    rival: str, name: str, layers: int, world: int, prompt: int, steps: int, seconds: float, cpu: bool
) -> dict[str, Any]:
    """By way of generate(): milliseconds between tokens, or the first line of what went wrong."""
    launch = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(world), "-m"] if rival == PLAN else []
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", *launch, "benchmarks.rivals", rival, name, folder, "--gpus", str(world)]
        command += ["--layers", str(layers), "--prompt", str(prompt), "--steps", str(steps), *["--cpu"] * cpu]
        env = {key: value for key, value in os.environ.items() if not key.startswith(OF_LAUNCHERS)}
        child = subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True, start_new_session=True)
        try:
            said = child.communicate(timeout=seconds)[1]
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.communicate()
            said = f"not within {seconds:.0f} s"
        path = Path(folder) / FOUND
        found: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    return {way: found.get(way, reason(said)) for way in WAYS}


def reason(said: str) -> str:
    """The first error of what a process said, or its last line."""
    error = ERROR.search(said)
    return error.group(1) if error else (said.strip().splitlines() or ["nothing was said"])[-1]


def model_by_map(name: str, dims: ModelDims, devices: list[str]) -> Any:
    """A random OPT whose layers lie evenly on these devices, in their order. The LM head lies by the embedding."""
    from accelerate import dispatch_model

    cpu = devices[0] == "cpu"
    model = random_model(name, dims, "meta", torch.float32 if cpu else torch.float16)
    layers, first = "model.decoder.layers.", devices[0]
    where: dict[str, str | int] = {f"{layers}{i}": devices[i * len(devices) // dims.n_layers]
                                   for i in range(dims.n_layers)}  # fmt: skip
    where |= {"model.decoder.embed_tokens": first, "model.decoder.embed_positions": first, "lm_head": first}
    where["model.decoder.final_layer_norm"] = devices[-1]
    for part, device in where.items():
        model.get_submodule(part).to_empty(device=device)
    for key, value in model.state_dict().items():
        if key.endswith("bias"):
            value.zero_()
        elif "norm" in key:
            value.fill_(1)
        else:
            value.normal_(0, STD)
    model.tie_weights()
    mapped = {part: device if cpu else torch.device(device).index for part, device in where.items()}
    model = dispatch_model(model, mapped, skip_keys=model._skip_keys_device_placement, force_hooks=True)
    model.hf_device_map = mapped
    return model


def model_by_plan(name: str, dims: ModelDims, folder: Path, cpu: bool) -> Any:
    """A random model that transformers shares out over all processes. The first one writes it."""
    local = int(os.environ["LOCAL_RANK"])
    if not cpu:
        torch.cuda.set_device(local)
    dist.init_process_group("gloo" if cpu else "cpu:gloo,cuda:nccl")
    dtype = torch.float32 if cpu else torch.float16
    if dist.get_rank() == 0:
        random_model(name, dims, "cpu" if cpu else "cuda", dtype).save_pretrained(folder)
    torch.cuda.empty_cache()
    dist.all_reduce(torch.zeros(1))
    return transformers.AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto", dtype=dtype).eval()


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("rival", choices=[DEVICE_MAP, PLAN])
    parser.add_argument("shape", choices=list(SHAPES))
    parser.add_argument("folder", type=Path, help=f"for a model, and for {FOUND}")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--layers", type=int, help="all by default")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--cpu", action="store_true")
    args = parser.parse_args()
    dims = SHAPES[args.shape]
    dims = dataclasses.replace(dims, n_layers=args.layers or dims.n_layers)
    if args.rival == DEVICE_MAP:
        devices = ["cpu"] * args.gpus if args.cpu else [f"cuda:{i}" for i in range(args.gpus)]
        model = model_by_map(args.shape, dims, devices)
    else:
        model = model_by_plan(args.shape, dims, args.folder / "model", args.cpu)
    found: dict[str, Any] = {}
    for way, plain in WAYS.items():
        try:
            found[way] = times_of(model, dims.vocab_size, args.prompt, 1, args.steps, True, disable_compile=plain)
        except Exception as error:  # what transformers raises is its answer
            found[way] = f"{type(error).__name__}: {first_line(error)}"
        if not dist.is_initialized() or dist.get_rank() == 0:
            written = args.folder / f"{FOUND}.new"
            written.write_text(json.dumps(found))
            written.replace(args.folder / FOUND)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
