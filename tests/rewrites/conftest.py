"""Tiny models run faster on one thread, and the twins must be importable from here."""

import sys
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]
torch.set_num_threads(1)
