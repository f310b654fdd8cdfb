"""Callbacks that come with Lockstep: ``lockstep.callbacks``. One's own derive from
``lockstep.Callback``.
"""
