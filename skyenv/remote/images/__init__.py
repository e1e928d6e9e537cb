"""Container images without an engine: from a registry, a layout, an archive or a directory to unpacked layers.

`references` says what people write, `sources` (with `registry`, `files`, `engine`) deliver a manifest and blobs,
`unpack` is a program of its own that turns one blob into one overlay layer, and `store` keeps what was unpacked: each
layer once, whichever images share it. Nothing here knows of sandboxes.
"""
