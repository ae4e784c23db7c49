"""Read published draft checkpoints and write them in the form that ``HeadConfig`` describes."""

from draftline.checkpoints.drafts.convert import HEAD_METHODS, SourceMethod, convert_head
from draftline.checkpoints.drafts.head_file import load_head_config
from draftline.checkpoints.drafts.vocabulary import check_same_vocabulary

__all__ = ["HEAD_METHODS", "SourceMethod", "check_same_vocabulary", "convert_head", "load_head_config"]
