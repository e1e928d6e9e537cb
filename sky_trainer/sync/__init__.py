"""Bringing the trainer's weights to inference servers, and seeing whether they arrived."""
