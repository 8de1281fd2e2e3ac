"""Experiments of the NFA paper.

References:
    Beaglehole, Mitliagkas & Agarwala, "Feature learning as alignment", https://openreview.net/forum?id=JXCe2ZcUXr
"""

MODULES = (*(f"fig{name}" for name in (1, 2, "2_vgg", "2_gpt", 3, 4, 5, 6, 7, 8, 12, 16, 17)), "thm9", "eq9")
"""Modules of its experiments, in the order in which they are listed."""
