"""A bundle comes back as it was written, moves to any density, and names every part that is not as it should be."""

import dataclasses
import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from bundles import make_bundle
from huggingface_hub.errors import HTTPError, OfflineModeIsEnabled
from safetensors.torch import load_file, save_file

from dejavu_train.bundle.artifact import CARD, METADATA, TENSORS, Bundle
from dejavu_train.ground.errors import UserError
from dejavu_train.ground.files import json_digest, sha256_file
from dejavu_train.models.tokenizer_hash import tokenizer_hash
from dejavu_train.predictors.quantization import stored_rows


@pytest.fixture(scope="module")
def bundle(tiny_opt):
    return make_bundle(tiny_opt).at(mlp_density=0.2, head_density=0.85)


@pytest.fixture
def folder(bundle, tmp_path):
    bundle.save_pretrained(tmp_path / "bundle")
    return tmp_path / "bundle"


def rewrite(folder, change_metadata=None, change_tensors=None):
    """Change a bundle and make its checksums right again, so that the deeper checks are reached."""
    metadata = json.loads((folder / METADATA).read_text())
    metadata.pop("sha256")
    if change_tensors:
        tensors = load_file(folder / TENSORS)
        change_tensors(tensors)
        save_file(tensors, folder / TENSORS)
        metadata["tensors_sha256"] = sha256_file(folder / TENSORS)
    if change_metadata:
        change_metadata(metadata)
    (folder / METADATA).write_text(json.dumps(metadata | {"sha256": json_digest(metadata)}))


def one_line(error) -> str:
    text = str(error.value)
    assert "\n" not in text
    return text


def test_roundtrip(bundle, folder):
    again = Bundle.from_pretrained(folder)
    assert again.specs == bundle.specs
    assert again.metadata == {"text": "made up"}
    assert again.targets == ["mlp", "heads"]
    assert sorted(path.name for path in folder.iterdir()) == [CARD, METADATA, TENSORS]
    for name, tensor in bundle.tensors.items():
        torch.testing.assert_close(again.tensors[name], tensor, rtol=0, atol=0)
    again.save_pretrained(folder)  # over an existing one
    assert Bundle.from_pretrained(folder).specs == bundle.specs


def test_means_travel_with_the_bundle(tiny_opt, tmp_path):
    made = make_bundle(tiny_opt, means=True)
    made.save_pretrained(tmp_path / "bundle")
    again = Bundle.from_pretrained(tmp_path / "bundle").head_means()
    assert sorted(again) == [0, 1] and again[0].shape == (4, 12) and again[0].dtype == torch.float32
    torch.testing.assert_close(again[1], made.tensors["layers.1.heads.mean"].float())


def rounded(bundle, dtype):
    """The same bundle with its predictors in int8 or int4."""
    tensors = {name: tensor for name, tensor in bundle.tensors.items() if name.split(".")[-1] not in ("down", "up")}
    for name in bundle.tensors.keys() - tensors.keys():
        tensors[name], tensors[name + "_scale"] = stored_rows(bundle.tensors[name], dtype)
    specs = {key: dataclasses.replace(spec, dtype=dtype) for key, spec in bundle.specs.items()}
    return dataclasses.replace(bundle, specs=specs, tensors=tensors)


@pytest.mark.parametrize(("dtype", "stored", "levels"), [("int8", torch.int8, 254), ("int4", torch.uint8, 2)])
def test_predictors_in_few_bits(bundle, tmp_path, dtype, stored, levels):
    rounded(bundle, dtype).save_pretrained(tmp_path / "bundle")
    again = Bundle.from_pretrained(tmp_path / "bundle")
    assert again.tensors["layers.1.mlp.up"].dtype == stored
    for key in bundle.specs:
        exact, quantised = bundle.predictor(*key), again.predictor(*key)
        for name, parameter in quantised.named_parameters():
            limit = 0 if name == "bias" else dict(exact.named_parameters())[name].abs().amax(1, keepdim=True) / levels
            assert ((parameter - dict(exact.named_parameters())[name]).abs() <= limit + 1e-6).all()
    rewrite(tmp_path / "bundle", change_tensors=lambda tensors: tensors.pop("layers.0.mlp.up_scale"))
    with pytest.raises(UserError, match="layers.0.mlp.up_scale is missing"):
        Bundle.from_pretrained(tmp_path / "bundle")


def test_at_moves_thresholds_to_the_mean_density(bundle):
    for density in (0.05, 0.2, 0.5):
        moved = bundle.at(mlp_density=density)
        assert moved.mean_density("mlp") == pytest.approx(density, rel=1e-3)
        shares = [moved.specs[layer, "mlp"].density for layer in range(2)]
        assert shares[1] == pytest.approx(2 * shares[0], rel=1e-3)  # in proportion to the true densities 0.1 and 0.2
        assert moved.specs[0, "heads"] == bundle.specs[0, "heads"]
    assert all(moved.specs[layer, "mlp"].dense for layer in range(2)) is False
    dense = bundle.at(mlp_density=1.0, head_density=1.0)
    assert all(spec.dense and spec.density == 1 for spec in dense.specs.values())
    assert dense.at(mlp_density=0.2).specs[0, "mlp"].threshold == bundle.specs[0, "mlp"].threshold


def test_at_top_k_and_layers_kept_dense(bundle):
    top = bundle.at(mlp_density=0.25, top_k=True)
    assert [top.specs[layer, "mlp"].top_k for layer in range(2)] == [16, 32]
    assert top.specs[0, "mlp"].threshold is None
    kept = dataclasses.replace(bundle.specs[0, "mlp"], keep_dense=True, threshold=None)
    moved = dataclasses.replace(bundle, specs=bundle.specs | {(0, "mlp"): kept}).at(mlp_density=0.6)
    assert moved.specs[0, "mlp"].dense
    assert moved.specs[1, "mlp"].density == pytest.approx(0.2, rel=1e-3)


def test_densities_that_cannot_be(bundle):
    for density in (0.0, -1.0, 1.5):
        with pytest.raises(UserError, match="density"):
            bundle.at(mlp_density=density)
    only_mlp = {key: spec for key, spec in bundle.specs.items() if key[1] == "mlp"}
    with pytest.raises(UserError, match="no predictors for heads"):
        dataclasses.replace(bundle, specs=only_mlp).at(head_density=0.5)
    assert dataclasses.replace(bundle, specs=only_mlp).at(0.2, 1.0).mean_density("heads") == 1.0
    bare = {key: dataclasses.replace(spec, curve={}) for key, spec in bundle.specs.items()}
    with pytest.raises(UserError, match="layer 0 has no calibration curve"):
        dataclasses.replace(bundle, specs=bare).at(mlp_density=0.2)
    with pytest.raises(UserError, match="mlp of layer 7"):
        bundle.with_densities({(7, "mlp"): 0.5})


def test_model_must_be_the_one(bundle, tiny_opt, tmp_path):
    bundle.check_model(str(tiny_opt))
    bundle.check_model(bundle.weight_hash)
    with pytest.raises(UserError, match="other weights"):
        bundle.check_model("0" * 64)
    from conftest import save_tiny_opt

    wider = save_tiny_opt(tmp_path / "wider", ffn_dim=128)
    with pytest.raises(UserError, match="another model.*d_ffn 96.*128"):
        bundle.check_model(str(wider))
    revised = shutil.copytree(tiny_opt, tmp_path / "revised")
    tensors = load_file(revised / "model.safetensors")
    tensors["model.decoder.layers.0.fc1.weight"][3, 3] += 1
    save_file(tensors, revised / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match="other weights.*revision") as error:
        bundle.check_model(str(revised))
    one_line(error)


def test_tokenizer_must_be_the_one(bundle, tiny_opt, tmp_path, caplog):
    other = shutil.copytree(tiny_opt, tmp_path / "other")
    values = json.loads((other / "tokenizer.json").read_text("utf-8"))
    merges = values["model"]["merges"]
    merges[-1], merges[-2] = merges[-2], merges[-1]
    (other / "tokenizer.json").write_text(json.dumps(values))
    with pytest.raises(UserError, match="another tokenizer.*put back") as error:
        bundle.check_model(str(other))
    assert bundle.tokenizer_hash[:12] in one_line(error) and tokenizer_hash(str(other))[:12] in str(error.value)
    bundle.save_pretrained(tmp_path / "bundle")
    assert Bundle.from_pretrained(tmp_path / "bundle").tokenizer_hash == bundle.tokenizer_hash and not caplog.records
    (other / "tokenizer.json").unlink()
    bundle.check_model(str(other))  # token ids come from elsewhere

    rewrite(tmp_path / "bundle", lambda metadata: metadata.pop("tokenizer_hash"))  # of an earlier version
    older = Bundle.from_pretrained(tmp_path / "bundle")
    assert [record.getMessage().count("with which tokenizer") for record in caplog.records] == [1]
    older.check_model(str(tiny_opt))
    rewrite(tmp_path / "bundle", lambda metadata: metadata.update(tokenizer_hash=3))
    with pytest.raises(UserError, match="tokenizer_hash"):
        Bundle.from_pretrained(tmp_path / "bundle")


def flip_byte(folder, name, place):
    raw = bytearray((folder / name).read_bytes())
    raw[place] ^= 1
    (folder / name).write_bytes(raw)


def test_metadata_that_is_nested_too_deeply(folder):
    (folder / METADATA).write_text("[" * 100_000)
    with pytest.raises(UserError, match="not readable JSON") as error:
        Bundle.from_pretrained(folder)
    one_line(error)


def test_flipped_byte(folder):
    flip_byte(folder, TENSORS, -5)
    with pytest.raises(UserError, match=f"{TENSORS}.*SHA-256") as error:
        Bundle.from_pretrained(folder)
    one_line(error)


def test_flipped_digit_of_a_threshold(folder):
    text = (folder / METADATA).read_text()
    start = text.index('"threshold": ') + len('"threshold": ') + 4
    (folder / METADATA).write_text(text[:start] + ("1" if text[start] != "1" else "2") + text[start + 1 :])
    with pytest.raises(UserError, match=f"{METADATA} was changed"):
        Bundle.from_pretrained(folder)


@pytest.mark.parametrize("name", [METADATA, TENSORS])
def test_truncated_or_missing_file(folder, name):
    raw = (folder / name).read_bytes()
    (folder / name).write_bytes(raw[: len(raw) // 2])
    with pytest.raises(UserError, match=name) as error:
        Bundle.from_pretrained(folder)
    one_line(error)
    (folder / name).unlink()
    with pytest.raises(UserError, match=f"{name}.*(missing|no file)"):
        Bundle.from_pretrained(folder)


def test_pickle_is_never_read(folder):
    class Trap:
        def __reduce__(self):
            return (pytest.fail, ("a pickle was opened",))

    (folder / TENSORS).write_bytes(pickle.dumps(Trap()))
    with pytest.raises(UserError, match=TENSORS):
        Bundle.from_pretrained(folder)
    metadata = json.loads((folder / METADATA).read_text())
    metadata.pop("sha256")
    metadata["tensors_sha256"] = sha256_file(folder / TENSORS)  # even when somebody vouches for it
    (folder / METADATA).write_text(json.dumps(metadata | {"sha256": json_digest(metadata)}))
    with pytest.raises(UserError, match="not readable safetensors") as error:
        Bundle.from_pretrained(folder)
    one_line(error)
    (folder / TENSORS).rename(folder / "predictors.bin")
    with pytest.raises(UserError, match="missing"):
        Bundle.from_pretrained(folder)


def set_spec(**values):
    return lambda metadata: metadata["predictors"][0].update(values)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda metadata: metadata["predictors"].pop(1), "lacks the mlp predictor of layer 0"),
        (lambda metadata: metadata["predictors"].append(metadata["predictors"][0]), "twice"),
        (lambda metadata: metadata.update(schema=4), "schema 4"),
        (lambda metadata: metadata.pop("predictors"), "predictors"),
        (lambda metadata: metadata.update(targets=["mlp"]), "targets"),
        (lambda metadata: metadata["predictors"].append(metadata["predictors"][0] | {"layer": 9}), "layer 9"),
        (set_spec(kind="mlp"), "kind mlp"),
        (set_spec(site="mlp_in"), "no site before"),
        (set_spec(rank=5), "must be"),
        (set_spec(n_out=3), "maps 48 -> 3"),
        (set_spec(threshold=1.0, top_k=2), "one finite threshold or one top_k"),
        (set_spec(surprise=1), "surprise"),
        (set_spec(replacement="median"), "unknown replacement median"),
        (set_spec(replacement="mean"), "layers.0.heads.mean is missing"),
        (lambda metadata: metadata["predictors"][1].update(replacement="mean"), "unknown replacement mean"),
        (set_spec(curve={"density": [0.5, 0.1]}), "curve"),
    ],
)
def test_metadata_that_does_not_fit(folder, change, message):
    rewrite(folder, change_metadata=change)
    with pytest.raises(UserError, match=message) as error:
        Bundle.from_pretrained(folder)
    one_line(error)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop("layers.1.heads.up"), "layers.1.heads.up is missing"),
        (lambda tensors: tensors.update({"layers.2.mlp.up": torch.ones(2)}), "layers.2.mlp.up belongs to no predictor"),
        (lambda tensors: tensors.update({"layers.0.mlp.up": torch.ones(2)}), r"layers.0.mlp.up must be \(96, 8\)"),
        (lambda tensors: tensors["layers.0.mlp.bias"].fill_(float("nan")), "layers.0.mlp.bias holds a value"),
    ],
)
def test_tensors_that_do_not_fit(folder, change, message):
    rewrite(folder, change_tensors=change)
    with pytest.raises(UserError, match=message) as error:
        Bundle.from_pretrained(folder)
    one_line(error)


def test_no_such_bundle():
    with pytest.raises(UserError, match="no bundle folder"):
        Bundle.from_pretrained("./nowhere")


class Api:
    """A hub that keeps what it is sent. ``failure`` is raised in its place."""

    failure: Exception | None = None

    def __init__(self, token=None):
        self.calls = type(self).calls

    def create_repo(self, repo_id, **options):
        if self.failure is not None:
            raise self.failure
        self.calls.append((repo_id, options["private"]))

    def upload_folder(self, repo_id, folder_path, **options):
        names = sorted(path.name for path in Path(folder_path).iterdir())
        self.calls.append((names, Bundle.from_pretrained(folder_path)))
        return "https://example.org/commit"


@pytest.fixture
def hub(monkeypatch):
    monkeypatch.setattr(Api, "calls", [], raising=False)
    monkeypatch.setattr("huggingface_hub.HfApi", Api)
    return Api.calls


def test_a_dry_run_of_push_to_hub_shows_what_would_be_sent(bundle, folder, hub):
    first, *files = bundle.push_to_hub("someone/bundle", dry_run=True).splitlines()
    assert first.startswith("someone/bundle (private")
    assert [line.split(":")[0] for line in files] == [CARD, METADATA, TENSORS]
    assert files[2] == f"{TENSORS}: {(folder / TENSORS).stat().st_size:,} bytes"
    assert hub == []


@pytest.mark.parametrize(
    "failure", [OfflineModeIsEnabled("offline mode is enabled.\nUnset it"), HTTPError("[Errno -2] Name not known")]
)
def test_push_to_hub_without_a_network_is_one_line(bundle, hub, monkeypatch, failure):
    monkeypatch.setattr(Api, "failure", failure)
    with pytest.raises(UserError, match="cannot push the bundle to someone/bundle: .*HF_HUB_OFFLINE") as error:
        bundle.push_to_hub("someone/bundle")
    assert str(failure).splitlines()[0].rstrip(".") in one_line(error)


def test_push_to_hub_refuses_a_name_before_anything_is_sent(bundle, hub):
    for name in ("a/b/c", "../bundle", "two words/x", ""):
        with pytest.raises(UserError, match="no repository of the hub.*give OWNER/NAME") as error:
            bundle.push_to_hub(name, dry_run=True)
        one_line(error)
    assert hub == []


def test_an_error_of_ours_while_pushing_keeps_its_traceback(bundle, hub, monkeypatch):
    monkeypatch.setattr(Api, "failure", RuntimeError("a bug"))
    with pytest.raises(RuntimeError, match="a bug"):
        bundle.push_to_hub("someone/bundle")
