"""The methods that benchmarks/frontier.py compares; nothing here is part of the library."""
