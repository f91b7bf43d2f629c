"""The command line: which commands and extras there are, and how flags and YAML become dataclasses. Without torch."""
