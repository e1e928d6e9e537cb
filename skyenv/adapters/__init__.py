"""Our environments and pipeline inside other libraries: one module a library, which alone imports it."""
