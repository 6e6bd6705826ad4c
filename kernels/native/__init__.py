"""Kernels in C++ for CPUs: compiled on first use for the processor at hand, and called without a copy."""
