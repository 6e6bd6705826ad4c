"""Measurements: what is claimed in README and docs, with the command that reproduces it."""
