"""What ``fsdp`` is made of, imported where it is used: PyTorch's sharding takes half a second to
import.
"""
