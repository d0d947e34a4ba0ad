"""Compute papers' tables anew, and set them beside the papers' figures."""
