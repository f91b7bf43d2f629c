"""A run of train.py, from text to bundle: its checks, its folder, its stages in order, and its workers on this host."""
