"""Samples whose image and text conflict: how they are drawn, asked, scored and degraded."""
