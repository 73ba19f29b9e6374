"""Samples whose image and text conflict: drawing, asking, scoring and degrading them."""
