"""Tensors: what all other rooms do with them.

::

    pytree.py         nestings: lists, tuples, dictionaries and dataclasses of tensors
    rows.py           the rows of nestings, which are the samples of a batch
    row_shard.py      some rows of a tensor whose others are on other ranks
    seeding.py        global generators of random numbers
    digest.py         a few numbers that tell the values of a tensor from others
    placing.py        parameters and buffers moved to a device
    common_memory.py  parameters and buffers that share memory
    state_tree.py     a state as JSON and tensors
    array_file.py     arrays on disk, written by several processes
    new_file.py       files that are never written through a link
    byte_size.py      numbers of bytes as a person reads them
    allocator.py      how the CPU's memory is asked for
"""
