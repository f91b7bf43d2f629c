"""Faults that others reported, a row each: the kind, the call, the right value. On the tiny model."""

import logging

import pytest
import reported_calls
import reported_files
import reported_numbers
import reported_served
import reported_state
from bundles import make_bundle
from reported_case import Case

ROWS = (
    *reported_state.ROWS, *reported_calls.ROWS, *reported_numbers.ROWS, *reported_served.ROWS, *reported_files.ROWS,
)  # fmt: skip


@pytest.fixture
def case(tiny_opt, tmp_path):
    logging.disable(logging.WARNING)
    made = make_bundle(tiny_opt).at(0.3, 0.5)
    yield Case(tiny_opt, tmp_path, made, make_bundle(tiny_opt, cascade=True).at(0.4, 0.5))
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("row", ROWS, ids=[f"{row.kind}-{row.what.replace(' ', '-')}" for row in ROWS])
def test_what_was_reported(case, row):
    assert row.call(case) == row.right
