"""Pipeline files: their schema, loading with every error at once, and the field reference."""

from draftline.config.loading import load_pipeline
from draftline.config.runnable import check_runnable
from draftline.config.schema import Acceptance, Check, Draft, Engine, KvCache, Pipeline, Serve, Target, Tree
from draftline.config.training import Train

__all__ = [
    "Acceptance",
    "Check",
    "Draft",
    "Engine",
    "KvCache",
    "Pipeline",
    "Serve",
    "Target",
    "Train",
    "Tree",
    "check_runnable",
    "load_pipeline",
]
