"""Tidegate runs Mixture-of-Experts language models that are larger than fast memory, inside a hard byte budget."""

__version__ = "0.1.0"
