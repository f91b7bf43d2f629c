"""Downstream tasks through lm-evaluation-harness (extra ``eval``): its only home, imported by nothing else here."""
