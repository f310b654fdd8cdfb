"""The parallel loss: the output layer and the loss, a chunk of the tokens at a time on each
device.
"""
