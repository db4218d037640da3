"""Fused layers in models: how they are found (``structure.py``), and the check that they compute the same."""

from qgemm.fusion.fuse import fuse, fusion_report, unfuse
from qgemm.fusion.report import FusionRecord, FusionReport

__all__ = ["FusionRecord", "FusionReport", "fuse", "fusion_report", "unfuse"]
