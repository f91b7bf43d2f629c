import numpy as np
import pytest
from conftest import make_text

from dejavu_train.data.config import CollectConfig
from dejavu_train.data.text import Document
from dejavu_train.data.windows import Window, plan_shards, plan_windows
from dejavu_train.ground.errors import UserError
from dejavu_train.models.load import load_tokenizer


def test_the_plan_follows_from_the_seed(tiny_opt):
    tokenizer = load_tokenizer(str(tiny_opt))
    documents = [Document(str(i), make_text(300, seed=i)) for i in range(6)]
    config = CollectConfig(window=32, windows_per_document=2)
    plans = [plan_windows(documents, tokenizer, config, 300, seed) for seed in (1, 1, 2)]
    ids = [[window.ids.tolist() for window in plan] for plan in plans]
    assert ids[0] == ids[1] != ids[2]
    assert sum(map(len, ids[0])) == 300
    counts = np.bincount([window.document for window in plans[0]])
    assert counts.max() == 2
    everything = plan_windows(documents, tokenizer, CollectConfig(window=32), None, 0)
    assert {window.document for window in everything} == set(range(6))


def test_shards_hold_whole_windows():
    planned = [Window(0, np.zeros(n, np.int32)) for n in (5, 9, 3, 8, 2)]
    shards = plan_shards(planned, 10)
    assert [[len(window.ids) for window in shard] for shard in shards] == [[9, 5], [8, 3], [2]]


def test_mistakes_are_named():
    with pytest.raises(UserError, match="train_tokens"):
        CollectConfig(train_tokens=0)
    with pytest.raises(UserError, match="batch_size"):
        CollectConfig(batch_size=0)
