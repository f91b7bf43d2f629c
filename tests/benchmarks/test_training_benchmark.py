import json

from benchmarks.training import run


def test_small_shards_are_made_and_trained(tmp_path, capsys):
    folder = tmp_path / "bench"
    run(
        ["--shape=opt-mini", "--layers=1", "--tokens=3000", f"--folder={folder}", "--mlp_steps=20", "--head_steps=20"]
        + ["--batch_size=128", "--precision=32-true", "--memory_gb=0"]
    )
    metadata = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert metadata["extrapolated_seconds"] > metadata["seconds"] > 0
    assert len(metadata["loader_rows_per_s"]) == 2 and not folder.exists()
