"""What a person writes without Lockstep: scripts for torchrun, which print their rate as the
last line.
"""
