"""Bringing the trainer's weights to inference servers: by files, by broadcast, as adapters; and whether they arrived."""
