"""The stages, in the order in which they run."""

from __future__ import annotations

from draftline.stages import build, check, convert, package, smoke

STAGES = (convert.STAGE, check.STAGE, build.STAGE, package.STAGE, smoke.STAGE)
"""A later stage may rely on the earlier ones having passed, even where it reads none of their files."""
