"""Tensors: nestings of them, random generators, digests, arrays on disk, the memory allocator."""
