"""A model and what belongs to it in this process: building, loss, optimizer, precision, what its
forward does.
"""
