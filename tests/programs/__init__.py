"""Random programs of calls on a sparse model, each result compared with an oracle that shares no tensor with it.

``python -m tests.programs --seeds 0-499`` runs many. ``test_programs.py`` a few.
"""
