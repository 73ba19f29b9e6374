"""The benchmark of modality preference (MC2): conditions, ablations, report."""
