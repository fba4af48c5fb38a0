"""Draft tokens, their trees, and other masks of steps: stable names, as `ra.drafts`."""

# isort: off

# Draft tokens and their trees
from rocm_attn.kernels.metadata.step_tensors import NO_PARENT as NO_PARENT
from rocm_attn.batch.drafts import Drafts as Drafts
from rocm_attn.batch.step_batch import draft_batch as draft_batch
from rocm_attn.batch.mask import StepMask as StepMask
from rocm_attn.batch.mask import TokenSpans as TokenSpans
from rocm_attn.batch.mask import TreeMask as TreeMask
from rocm_attn.batch.mask import spans_of_blocks as spans_of_blocks
from rocm_attn.step.step import Series as Series
from rocm_attn.step.accepting import select_last_accepted as select_last_accepted
