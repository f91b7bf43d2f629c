"""Reads and writes a bundle: every predictor of one model, its thresholds, and what they were measured at.

A folder with ``bundle.json`` (metadata), ``predictors.safetensors`` (tensors) and ``README.md``, the model card for
people, which is never read. Nothing is ever unpickled. Reading is strict: whatever is missing, surplus, of another
shape or changed by one byte is named in one line. The curves of calibration (density, threshold, ...) travel with the
predictors, so one bundle serves every density (``Bundle.at``).
"""

import dataclasses
import hashlib
import logging
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from dejavu_train.bundle.allocation import allocate
from dejavu_train.bundle.card import card
from dejavu_train.bundle.folder import METADATA, model_reference, published_name, referenced_model
from dejavu_train.bundle.measured import measured_rows
from dejavu_train.bundle.spec import CASCADE_PARTS, PredictorSpec, check_spec, tensor_name
from dejavu_train.families import TARGETS, ModelDims, Target, UnitKey, dims_of
from dejavu_train.families.dims import listed
from dejavu_train.ground.errors import UserError
from dejavu_train.ground.files import (
    json_digest,
    plain,
    read_json,
    replacing_files,
    sha256_file,
    write_json,
    write_text,
)
from dejavu_train.models.config_values import read_values, refuse_foreign
from dejavu_train.models.hub import check_repository, fetch, looks_local, push
from dejavu_train.models.installed import hint, installed
from dejavu_train.models.load import weight_hash
from dejavu_train.models.tokenizer_hash import tokenizer_hash
from dejavu_train.predictors.bit_planes import SecondStage, build_second_stage
from dejavu_train.predictors.checkpoint import as_stored, build_predictor
from dejavu_train.predictors.custom import PredictorClass, chosen_classes
from dejavu_train.predictors.quantization import row_codes

logger = logging.getLogger(__name__)

SCHEMA = 3
TENSORS = "predictors.safetensors"
MAKE_ANEW = "restore it or make the bundle anew"
CARD = "README.md"


@dataclasses.dataclass(frozen=True, repr=False)
class Bundle:
    """All predictors of one model.

    Args:
        model: what it was made from: an absolute path, an id on the hub, or a bare name of a folder that is not here.
        It is shown, and ``weight_hash`` decides.
        weight_hash: of the model's stored tensors, see ``opt.weight_hash``.
        shape: sizes of the model.
        specs: by (layer, target). A target is there for every layer that has it, or for none.
        tensors: ``layers.{l}.{target}.down`` (rank, d_in), ``.up`` (n_out, rank) and ``.bias`` (n_out) in the spec's
            dtype. ``.frequency`` (n_out) fp32 is how often a neuron is active, and of heads the mean contribution. With
            the replacement ``mean`` also ``layers.{l}.heads.mean`` (n_heads, head_dim) fp16: each head's mean output.
            An int8 spec has a fp16 bias and ``.down_scale`` (rank), ``.up_scale`` (n_out) fp32. An int4 spec the same
            with scales in fp16 and two weights a byte, see ``quantization``. A cascade also has ``.fc1_scale`` fp32 and
            ``.fc1_steps`` int16, the grid of ``up``'s planes, and ``.stage2_threshold`` fp32, all (n_out). A custom
            predictor has its ``state_dict`` under ``.predictor.`` in place of ``.down``, ``.up`` and ``.bias``.
        metadata: anything else worth keeping, as JSON: text name and hash, tokens, seconds.
        classes: of custom predictors, by the name that their specs give.
        tokenizer_hash: of the model's tokenizer, see ``tokenizer_hash.py``. None: the model has none.
    """

    model: str
    weight_hash: str
    shape: ModelDims
    specs: dict[UnitKey, PredictorSpec]
    tensors: dict[str, Tensor]
    metadata: dict[str, Any] = dataclasses.field(default_factory=dict)
    classes: Mapping[str, PredictorClass] = dataclasses.field(default_factory=dict, compare=False)
    tokenizer_hash: str | None = None

    def __post_init__(self) -> None:
        if Path(self.model).is_dir():  # what is a folder now is none elsewhere, and could be taken for an id on the hub
            object.__setattr__(self, "model", os.path.abspath(self.model))

    def __repr__(self) -> str:
        """One line: the model, its sizes, and each target with its mean density."""
        shape = self.shape
        sizes = f"{shape.n_layers} layers, d_model {shape.d_model}, d_ffn {shape.d_ffn}, {shape.n_heads} heads"
        targets = "".join(f", {target} at {self.mean_density(target):.3g}" for target in self.targets)
        return f"Bundle({self.model}: {sizes}{targets})"

    @property
    def targets(self) -> list[Target]:
        present = {target for _, target in self.specs}
        return [target for target in TARGETS if target in present]

    def predictor(self, layer: int, target: Target) -> nn.Module:
        """The predictor as deployed: its weights rounded to the spec's dtype, held in fp32.

        Raises:
            UserError: weights that are not finite.
        """
        where, prefix = f"the {target} predictor of layer {layer}", tensor_name(layer, target, "")
        predictor = build_predictor(vars(self.specs[UnitKey(layer, target)]), self.classes, where)
        stored = {n.removeprefix(prefix): tensor for n, tensor in self.tensors.items() if n.startswith(prefix)}
        made = as_stored(predictor, stored, where).requires_grad_(False).eval()
        if not all(bool(parameter.isfinite().all()) for parameter in made.parameters()):
            raise UserError(f"{where} has weights that are not finite; copy the bundle anew, or train that predictor")
        return made

    def codes(self, layer: int, target: Target, part: str) -> tuple[Tensor, Tensor]:
        """``down`` or ``up`` of an int8 or int4 spec: codes (rows, columns) int8 and scales (rows,) fp32."""
        spec = self.specs[UnitKey(layer, target)]
        stored = self.tensors[tensor_name(layer, target, part)]
        scale = self.tensors[tensor_name(layer, target, part + "_scale")].float()
        return row_codes(stored, spec.d_in if part == "down" else spec.rank), scale

    def cascades(self) -> dict[int, tuple[Tensor, Tensor, Tensor]]:
        """By layer (scale, steps, threshold), each (d_ffn,): the grid of ``up``'s planes, the second stage's test."""
        layers = [layer for (layer, _), spec in self.specs.items() if spec.kind == "cascade"]
        return {i: tuple(self.tensors[tensor_name(i, Target.MLP, part)] for part in CASCADE_PARTS) for i in layers}  # type: ignore[misc]

    def second_stages(self, ups: Sequence[Any]) -> dict[int, SecondStage]:
        """By layer the second stage of its cascade, of every layer's linear map into the neurons."""
        return {layer: self.second_stage(layer, ups[layer]) for layer in self.cascades()}

    def second_stage(self, layer: int, up: Any) -> SecondStage:
        """The second stage of a layer with a cascade, of its linear map into the neurons."""
        return build_second_stage(up.weight, up.bias, *self.cascades()[layer])

    def frequency(self, layer: int, target: Target) -> Tensor:
        """(n_out,) fp32: how often each unit was needed on ``calibration``. Orders the static selection."""
        return self.tensors[tensor_name(layer, target, "frequency")]

    def head_means(self, device: torch.device | str = "cpu") -> dict[int, Tensor]:
        """By layer the (n_heads, head_dim) fp32 that stands in for skipped heads. Only layers that do so are there."""
        replaced = [spec.layer for spec in self.specs.values() if spec.replacement == "mean"]
        return {layer: self.tensors[tensor_name(layer, Target.HEADS, "mean")].to(device).float() for layer in replaced}

    def mean_density(self, target: Target) -> float:
        """Mean of the calibrated densities over the layers. 1.0 for a target without predictors."""
        densities = [spec.density for spec in self.specs.values() if spec.target == target]
        return sum(densities) / len(densities) if densities else 1.0

    def selects_top_k(self, target: Target) -> bool:
        """Whether ``target`` selects the k largest logits, and not those above a threshold, where it is dense, whether
        the other one does."""
        sparse = [spec for spec in self.specs.values() if not spec.dense]
        return any(spec.top_k is not None for spec in [one for one in sparse if one.target == target] or sparse)

    def with_densities(self, densities: Mapping[UnitKey, float], top_k: bool | None = None) -> "Bundle":
        """The same predictors with thresholds for the given densities. Specs not named stay as they are.

        Args:
            densities: in (0, 1], by (layer, target).
            top_k: select the k largest logits of a token, density n_out of them, in place of those above a threshold.
                None: as each target selects now.

        Raises:
            UserError: a key or a density that cannot be.
        """
        specs = dict(self.specs)
        for key, density in densities.items():
            if key not in specs:
                has = [f"{target} of layers {listed(self.shape.layers_of(target))}" for target in self.targets]
                raise UserError(
                    f"this bundle has no predictor for {key[1]} of layer {key[0]}; it has {' and '.join(has)}"
                )
            specs[key] = specs[key].at(density, self.selects_top_k(key[1]) if top_k is None else top_k)
        return dataclasses.replace(self, specs=specs)

    def one_stage(self) -> "Bundle":
        """The same without second stages: candidates are what is selected, as the decode engine of a GPU reads them."""
        specs = dict(self.specs)
        for key, spec in specs.items():
            if spec.kind == "cascade":
                specs[key] = dataclasses.replace(spec, kind="low_rank", stage2_retained_mass=None)
        return dataclasses.replace(self, specs=specs)

    def at(
        self, mlp_density: float | None = None, head_density: float | None = None, top_k: bool | None = None
    ) -> "Bundle":
        """The same predictors at other mean densities, shared out over the layers as their curves ask. 1.0 is dense.

        Args:
            mlp_density: mean over the layers, in (0, 1]. None: as it is.
            head_density: the same for the heads.
            top_k: as in :meth:`with_densities`.

        Raises:
            UserError: a density outside (0, 1], or a target this bundle has no predictors for.
        """
        densities: dict[UnitKey, float] = {}
        for target, density in ((Target.MLP, mlp_density), (Target.HEADS, head_density)):
            if density is None or (density == 1 and target not in self.targets):
                continue
            if isinstance(density, str) or not 0 < density <= 1:
                raise UserError(f"the {target} density must lie above 0 and at most at 1, got {density}")
            if target not in self.targets:
                raise UserError(f"this bundle has no predictors for {target}; train them, or ask for density 1.0")
            layers = {layer: self.specs[UnitKey(layer, target)] for layer in self.shape.layers_of(target)}
            densities |= {UnitKey(layer, target): share for layer, share in allocate(layers, density).items()}
        return self.with_densities(densities, top_k)

    def check_model(self, model: str, revision: str | None = None) -> None:
        """Make sure that the bundle belongs to exactly these weights and to this tokenizer.

        A folder without a tokenizer, and a bundle that names none, are compared by their weights alone.

        Args:
            model: folder or hub id of a model, or a weight hash.
            revision: commit or tag of a hub model.
        Raises:
            UserError: another shape, the same shape with other weights, or the same weights with another tokenizer.
        """
        if re.fullmatch(r"(full:)?[0-9a-f]{64}", model):
            given = model
        else:
            values = read_values(model, revision)
            shape = dims_of(values, model)
            if shape != self.shape:
                ours, theirs = dataclasses.asdict(self.shape), dataclasses.asdict(shape)
                name = next(name for name in ours if ours[name] != theirs[name])
                raise UserError(
                    f"the bundle belongs to another model: it was made for {self.model} with {name} {ours[name]},"
                    f" {model} has {theirs[name]}; give the bundle of this model"
                )
            refuse_foreign(values, model)
            given = weight_hash(model, self.weight_hash.startswith("full:"), revision)
        if given != self.weight_hash:
            if self.model == os.path.abspath(model):
                raise UserError(
                    f"the bundle belongs to other weights: those in {model} have changed since, from weight hash"
                    f" {self.weight_hash[:12]} to {given[:12]}; put them back, write the folder anew, or train and"
                    " calibrate predictors for these weights"
                )
            raise UserError(
                f"the bundle belongs to other weights: made for {self.model} with weight hash {self.weight_hash[:12]},"
                f" {model if given != model else 'this model'} has {given[:12]} (another model or revision);"
                f" take the model {self.model}, or train and calibrate predictors for these weights"
            )
        if self.tokenizer_hash is None or given == model:
            return
        tokenizer = tokenizer_hash(model, revision)
        if tokenizer not in (None, self.tokenizer_hash):
            raise UserError(
                f"the bundle belongs to another tokenizer: made for {self.model} with tokenizer hash"
                f" {self.tokenizer_hash[:12]}, {model} has {tokenizer[:12]}; put back the tokenizer that the bundle was"
                " made with, or train and calibrate predictors with this one"
            )

    def digest(self) -> str:
        """A name for exactly these predictors and thresholds, wherever they lie."""
        specs = [dataclasses.asdict(self.specs[key]) for key in sorted(self.specs)]
        digest = hashlib.sha256(json_digest({"predictors": specs}).encode())
        for name in sorted(self.tensors):
            digest.update(
                name.encode() + self.tensors[name].detach().cpu().flatten().view(torch.uint8).numpy().tobytes()
            )
        return digest.hexdigest()

    def save_pretrained(self, folder: str | Path, results: str | Path | None = None) -> None:
        """Write ``bundle.json``, ``predictors.safetensors`` and the model card ``README.md`` into ``folder``.

        ``results`` is a folder in which ``infer.py`` scored this bundle. The card has its rows.

        The card may be changed or removed afterwards: no digest covers it. All files are written aside and take their
        places together, so that a save that fails leaves what was there. Numbers of numpy and torch in the metadata are
        written as numbers, paths as text.

        Raises:
            UserError: metadata that JSON cannot hold. ``results`` of another bundle.
            OSError: no room, or no permission.
        """
        self._write(Path(folder), model_reference(self.model, Path(folder)), results)

    def card(self, model: str, results: str | Path | None = None, together: bool = False) -> str:
        """The text of the model card, in which the model is called ``model``. ``together``: it lies beside the bundle.

        Raises:
            UserError: ``results`` of another bundle.
        """
        specs = [self.specs[key] for key in sorted(self.specs)]
        rows = None if results is None else measured_rows(results, self.weight_hash, specs)
        metadata = plain(self.metadata, "the metadata of this bundle")
        return card(model, self.weight_hash, self.shape, self.specs, metadata, rows, together)

    def _write(self, folder: Path, model: str, results: str | Path | None = None) -> None:
        if not self.specs:
            raise UserError("this bundle has no predictors to save; python train.py trains some")
        _check_parts(self, "this bundle")
        text = self.card(model, results)
        stored = {
            "schema": SCHEMA,
            "model": model,
            "weight_hash": self.weight_hash,
            "tokenizer_hash": self.tokenizer_hash,
            "shape": self.shape.stored(),
            "targets": self.targets,
            "tensors_sha256": "",
            "metadata": self.metadata,
            "predictors": [dataclasses.asdict(self.specs[key]) for key in sorted(self.specs)],
        }
        metadata: dict[str, Any] = plain(stored, "the metadata of this bundle")
        with replacing_files(folder, last=METADATA) as aside:
            save_file({name: tensor.contiguous().cpu() for name, tensor in self.tensors.items()}, aside / TENSORS)
            write_text(aside / CARD, text)
            metadata["tensors_sha256"] = sha256_file(aside / TENSORS)
            write_json(aside / METADATA, metadata | {"sha256": json_digest(metadata)})

    @classmethod
    def exact(cls, model: str, shape: ModelDims, weight_hash: str = "") -> "Bundle":
        """A bundle without predictors: a model that runs with it computes all units, and skips silent neurons alone.

        Args:
            model, weight_hash: as of the class. shape: of the model.
        """
        return cls(model, weight_hash, shape, {}, {})

    @classmethod
    def from_pretrained(
        cls,
        name: str | Path,
        revision: str | None = None,
        predictor_class: PredictorClass | Mapping[str, PredictorClass] | None = None,
        **hub: Any,
    ) -> "Bundle":
        """Read a bundle from a folder or a hub id. Its schema is 3, which 0.2 and later versions write.

        Args:
            name: the folder, or ``OWNER/NAME`` on the hub.
            revision: commit or tag on the hub.
            predictor_class: of custom predictors: the class, or classes by the names that the bundle gives them. The
                bundle names its classes and none is ever imported for it.
            hub: ``token``, ``cache_dir``, ``local_files_only`` and ``force_download``, as in transformers.

        Raises:
            UserError: anything that is not exactly as it was written, naming the part.
        """
        folder = Path(installed(str(name)))
        if not folder.is_dir():
            if looks_local(str(name)):
                raise UserError(f"there is no bundle folder {name}; python train.py makes one{hint(str(name))}")
            folder = fetch(str(name), [METADATA, TENSORS], "cannot fetch the bundle", {"revision": revision, **hub})
        where = f"the bundle {name}"
        metadata = read_json(folder / METADATA, f"{where}: {METADATA}")
        if not isinstance(metadata, dict) or "schema" not in metadata:
            raise UserError(f"{where}: {METADATA} is not a bundle's; give the folder that train.py wrote")
        if metadata["schema"] != SCHEMA:
            raise UserError(
                f"{where} has schema {metadata['schema']}, this version reads {SCHEMA}, which 0.2 and later write;"
                " make the bundle anew with train.py"
            )
        if metadata.pop("sha256", None) != json_digest(metadata):
            raise UserError(f"{where}: {METADATA} was changed after it was written; restore it or make the bundle anew")
        if not (folder / TENSORS).is_file():
            raise UserError(f"{where}: {TENSORS} is missing, and no other format is read; {MAKE_ANEW}")
        if sha256_file(folder / TENSORS) != metadata.get("tensors_sha256"):
            raise UserError(
                f"{where}: {TENSORS} is not the file that {METADATA} describes (its SHA-256 differs: truncated, changed"
                " or replaced); restore it or make the bundle anew"
            )
        try:
            tensors = load_file(folder / TENSORS)
        except SafetensorError as error:
            raise UserError(f"{where}: {TENSORS} is not readable safetensors ({error}); {MAKE_ANEW}") from None
        try:
            specs = [PredictorSpec(**spec) for spec in metadata["predictors"]]
            shape = ModelDims.from_stored(dict(metadata["shape"]))
            bundle = cls(
                referenced_model(metadata, folder),
                metadata["weight_hash"],
                shape,
                {e.key: e for e in specs},
                tensors,
                metadata["metadata"],
                tokenizer_hash=metadata.get("tokenizer_hash"),
            )
            if not isinstance(bundle.tokenizer_hash, str | None) or not isinstance(bundle.weight_hash, str):
                raise TypeError("weight_hash or tokenizer_hash is no text")
            if not isinstance(bundle.model, str):
                raise TypeError("model is no text")
            if not isinstance(bundle.metadata, dict):
                raise TypeError("metadata holds no keys and values")
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, UserError):
                raise
            raise UserError(
                f"{where}: {METADATA} does not hold what schema {SCHEMA} asks ({error}); {MAKE_ANEW}"
            ) from None
        if len(specs) != len(bundle.specs) or metadata.get("targets") != bundle.targets:
            raise UserError(f"{where}: {METADATA} names a predictor twice, or targets it does not hold; {MAKE_ANEW}")
        _check_parts(bundle, where)
        if bundle.tokenizer_hash is None:
            logger.warning(
                "%s does not say with which tokenizer it was made, so none is compared; train it again to have it said",
                where,
            )
        named = {spec.class_path: spec.key for spec in specs if spec.class_path is not None}
        bundle = dataclasses.replace(bundle, classes=chosen_classes(set(named), predictor_class, where))
        for key in named.values():
            bundle.predictor(*key)  # a class that its tensors do not fit is named now, not in the middle of a run
        return bundle

    def push_to_hub(
        self,
        repo_id: str,
        private: bool = True,
        token: str | None = None,
        dry_run: bool = False,
        revision: str | None = None,
        results: str | Path | None = None,
    ) -> str:
        """Upload what :meth:`save_pretrained` writes to a model repository of the Hugging Face hub, made if need be.

        Args:
            repo_id: ``OWNER/NAME``, or ``NAME`` for the owner of the token.
            private: of a new repository: only its owner sees it.
            token: of access. None: that of ``hf auth login`` or ``HF_TOKEN``.
            dry_run: touch no network. Return a line with the repository and one for each file with its bytes.
            revision: branch to push to, which is there.
            results: folder in which ``infer.py`` scored this bundle, for the card.

        Returns:
            the address of the commit, or what a dry run found.

        Raises:
            UserError: a ``repo_id`` that cannot be one, no network, no access, or the hub refuses. ``results`` of
                another bundle.
        """
        check_repository(repo_id)
        with tempfile.TemporaryDirectory() as folder:
            self._write(Path(folder), published_name(self.model), results)
            if dry_run:
                files = [f"{path.name}: {path.stat().st_size:,} bytes" for path in sorted(Path(folder).iterdir())]
                return "\n".join([f"{repo_id} ({'private' if private else 'public'} if it is new)", *files])
            message = "Add predictor bundle"
            options = {"private": private, "token": token, "revision": revision, "commit_message": message}
            return push(Path(folder), repo_id, "the bundle", **options)


def _check_parts(bundle: Bundle, where: str) -> None:
    """Every predictor and every tensor that must be there is there, and nothing else."""
    foreign = {target for _, target in bundle.specs} - set(TARGETS)
    if foreign or not bundle.targets:
        raise UserError(f"{where}: targets must be some of {', '.join(TARGETS)}, got {sorted(foreign)}; {MAKE_ANEW}")
    for target in bundle.targets:
        for layer in bundle.shape.layers_of(target):
            if (layer, target) not in bundle.specs:
                raise UserError(f"{where} lacks the {target} predictor of layer {layer}; train that layer")
    expected: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for spec in bundle.specs.values():
        try:
            expected |= check_spec(spec, bundle.shape, where)
        except UserError as error:
            raise UserError(f"{error}; {MAKE_ANEW}") from None
    for name, (shape, dtype) in expected.items():
        if name not in bundle.tensors:
            raise UserError(f"{where}: the tensor {name} is missing; {MAKE_ANEW}")
        tensor = bundle.tensors[name]
        if tuple(tensor.shape) != shape or tensor.dtype != dtype:
            got = f"{tuple(tensor.shape)} {tensor.dtype}"
            raise UserError(f"{where}: the tensor {name} must be {shape} {dtype}, got {got}; {MAKE_ANEW}")
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise UserError(f"{where}: the tensor {name} holds a value that is not finite; train that layer again")
    surplus = sorted(set(bundle.tensors) - set(expected))
    if surplus:
        raise UserError(f"{where}: the tensor {surplus[0]} belongs to no predictor; {MAKE_ANEW}")
