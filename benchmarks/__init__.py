"""Ratios against plain PyTorch and against peers, in turns in one run: `python -m benchmarks
[NAME ...]`.
"""
