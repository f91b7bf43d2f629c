"""What is shown of long work: lines without a terminal, a bar on one."""

import time

import pytest

from dejavu_train.ground.progress import Progress, progress


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_line_says_how_much_is_left():
    clock = Clock()
    shown = Progress("collecting", 20_000, "token", done=5000, clock=clock)
    assert shown.line() == "collecting: 5,000 of 20,000 tokens"
    clock.now += 30
    shown.update(1000)
    assert shown.line() == "collecting: 6,000 of 20,000 tokens, 7 min left"
    shown.describe("scoring docs", "loss 3")
    clock.now += 3600
    shown.update(13_000)
    assert shown.line() == "scoring docs: 19,000 of 20,000 tokens, 4 min left, loss 3"
    shown.update(1000)
    assert shown.line() == "scoring docs: 20,000 of 20,000 tokens, loss 3"
    shown.close()
    unknown = Progress("reading", None, "file", clock=clock)
    unknown.update(7)
    assert unknown.line() == "reading: 7 files"
    unknown.close()


def test_lines_come_while_a_single_piece_takes_long(caplog):
    caplog.set_level("INFO", logger="dejavu_train")
    with Progress("collecting", 10, "token", seconds=0.02):
        deadline = time.monotonic() + 20
        while len(caplog.records) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
    assert len(caplog.records) >= 2 and caplog.records[0].message == "collecting: 0 of 10 tokens"
    count = len(caplog.records)
    time.sleep(0.1)
    assert len(caplog.records) <= count + 1  # none after the end


@pytest.mark.parametrize("fails", [False, True])
def test_items_are_counted_and_a_bar_is_shown_on_a_terminal(fails, monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    seen = []
    with pytest.raises(ZeroDivisionError) if fails else open("/dev/null"):
        for item in progress(range(3), "counting", 3, "item"):
            seen.append(item)
            if fails:
                raise ZeroDivisionError
    assert seen == ([0] if fails else [0, 1, 2])
    assert "counting" in capsys.readouterr().err
