"""Heads as torch modules: what the graphs compute, and the losses that train it."""

from draftline.training.heads.eagle1 import Eagle1Head, describe_eagle1
from draftline.training.heads.eagle3 import Eagle3Head, describe_eagle3
from draftline.training.heads.head import DraftHead, HeadLoss
from draftline.training.heads.medusa import MedusaHeads, describe_medusa
from draftline.training.heads.target_tensors import TargetTensors, load_target_tensors

__all__ = [
    "DraftHead",
    "Eagle1Head",
    "Eagle3Head",
    "HeadLoss",
    "MedusaHeads",
    "TargetTensors",
    "describe_eagle1",
    "describe_eagle3",
    "describe_medusa",
    "load_target_tensors",
]
