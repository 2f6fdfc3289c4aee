"""Appendix C of the paper: is the residual of trained models invisible to the merge, and how large is it?

Expected: a null violation of about 1e-6 in fp32, which is rounding, and a residual share that grows with compression
for ToMe and PiToMe.
"""

from statistics import fmean, pstdev
from typing import Any

from nsr.experiments.merge_survey import survey
from nsr.experiments.segmentation import SegmentationLab
from nsr.tokens import Segmenter
from nsr.training.segmentation_evaluation import centre_batches


def numerics(lab: SegmentationLab, model: Segmenter) -> dict[str, Any]:
    """Null violation and residual share at every merge of a trained model, in fp32 over the validation split.

    ``null_violation`` is the largest over blocks, ``residual_share`` the mean over blocks, with its deviation; lists
    hold the blocks' own numbers, in the order of ``blocks``.
    """
    batches = centre_batches(lab.validation_data, lab.task.window, None, lab.device, lab.workers)
    found = dict(sorted(survey(model.vit, (batch.image for batch in batches), "fp32").items()))
    shares = [at.residual_share for at in found.values()]
    return {
        "null_violation": max(at.null_violation for at in found.values()),
        "residual_share": fmean(shares),
        "residual_share_std": pstdev(shares),
        "blocks": list(found),
        "null_violation_by_block": [at.null_violation for at in found.values()],
        "residual_share_by_block": shares,
        "merged_by_block": [fmean(at.merged) for at in found.values()],
    }
