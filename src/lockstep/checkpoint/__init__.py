"""Checkpoints: what a training needs to go on, as a folder that any strategy and number of devices
can read.

::

    checkpoints/step-120/
      rank-0-of-2.safetensors  what rank 0 wrote: all tensors, but the rows that others have
      rank-1-of-2.safetensors  the rows that rank 1 has of them, under fsdp
      index.json               the tree of names, which rows are where, sizes and SHA-256 of the files, plain values

A copy of a part is written in a thread, into a folder beside; rank 0 adds the index and renames it.
So a folder ``step-N`` is whole, and a crash or a full disk leaves the one before. Nothing is
pickled.
"""
