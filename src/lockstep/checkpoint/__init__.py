"""Checkpoints: what a training needs to go on, as a folder that any strategy and number of devices
can read.

::

    checkpoints/step-120/
      rank-0-of-2.safetensors  the tensors, or rows of them, that rank 0 wrote
      rank-1-of-2.safetensors
      index.json               the tree of names, which rows are where, sizes and SHA-256 of the files, plain values

Each rank copies and writes its part only, in a thread, into a folder beside; rank 0 adds the index
and renames it. So a folder ``step-N`` is whole, and a crash or a full disk leaves the one before.
Nothing is pickled.
"""
