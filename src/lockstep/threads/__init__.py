"""Threads that compute at the same time: the pool, random streams, exchanges, batch norm over
replicas.
"""
