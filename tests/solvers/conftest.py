"""Small matrices run faster on one thread, and the problems must be importable from here."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
torch.set_num_threads(1)
