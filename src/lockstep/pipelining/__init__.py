"""Pipelining: which stage holds which layer, in which order the stages take their turns, and
what runs them.
"""
